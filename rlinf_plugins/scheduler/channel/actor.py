"""The broker in a Ray actor. The only module of the channel that needs Ray."""

import asyncio
import functools
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util import list_named_actors

from rlinf_plugins.core.config import suggest
from rlinf_plugins.core.errors import BrokerUnreachableError, ConfigError, UnknownChannelError
from rlinf_plugins.scheduler.channel.config import ChannelConfig
from rlinf_plugins.scheduler.channel.host import Host
from rlinf_plugins.scheduler.channel.link import FutureReply, Reply
from rlinf_plugins.scheduler.channel.sockets import Line, Port, Request, dial

NAMESPACE = "rlinf-channels"
_CONCURRENT = 1_000_000  # every waiting get is a call in progress; none may keep another from coming in


class Broker:
    """Ray actor that hosts one channel."""

    def __init__(self, name: str, config: ChannelConfig) -> None:
        self._name = name
        self._config = config
        self._host: Host | None = None
        self._port = Port(self._do)

    async def call(self, operation: str, request: bytes) -> bytes:
        """Do one request; arguments and answer are pickles, which Ray carries as they are."""
        return pickle.dumps(await self._do(operation, pickle.loads(request)), protocol=5)

    async def place(self) -> tuple[str, str]:
        """Where the broker runs (the same text elsewhere means that memory is shared), and its socket there."""
        return node_name(), await self._port.open()

    async def shut_down(self) -> None:
        """Answer whoever waits and remove files."""
        if self._host is not None:
            self._host.shut_down()
        await self._port.close()

    async def _do(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        if self._host is None:
            self._host = Host(self._name, self._config)
        return await self._host.call(operation, arguments)


@functools.cache
def node_name() -> str:
    """A name that processes have in common if and only if they share memory: machine, boot and file system."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/dev/shm').st_dev if os.path.exists('/dev/shm') else 0}"


class RayReply:
    """A reply that is an object reference."""

    def __init__(self, reference: Any, channel: str) -> None:
        self._reference = reference
        self._channel = channel

    def wait(self, timeout: float | None) -> Any:
        """Block until the answer is here."""
        try:
            return pickle.loads(ray.get(self._reference, timeout=timeout))
        except (GetTimeoutError, RayActorError) as error:
            raise _unreachable(self._channel, error) from error

    async def wait_async(self, timeout: float | None) -> Any:
        """Wait on the loop."""
        try:
            return pickle.loads(await asyncio.wait_for(asyncio.wrap_future(self._reference.future()), timeout))
        except (TimeoutError, RayActorError) as error:
            raise _unreachable(self._channel, error) from error

    def ready(self) -> bool:
        """Whether the answer is here."""
        return bool(ray.wait([self._reference], timeout=0)[0])

    def then(self, call: Callable[[Any], None]) -> None:
        """Call back from a thread of Ray's."""

        def done(future: Any) -> None:
            error = future.exception()
            call(_unreachable(self._channel, error) if error is not None else pickle.loads(future.result()))

        self._reference.future().add_done_callback(done)


class RayLink:
    """Reaches a broker that is a Ray actor: over its socket on the same node, else, or if that is lost, by actor calls.

    Can be pickled and used in other processes.

    Args:
        name: Name of the channel.
        actor: Handle of the actor.
        place: What :meth:`Broker.place` answered.
    """

    def __init__(self, name: str, actor: Any, place: tuple[str, str]) -> None:
        self.name = name
        self.node, self._path = place
        self._actor = actor

    def __reduce__(self) -> tuple[Any, ...]:
        return RayLink, (self.name, self._actor, (self.node, self._path))

    def submit(self, operation: str, arguments: tuple[Any, ...]) -> Reply:
        """Send a request."""
        line = self._line()
        if line is None:
            return self._call(operation, arguments)
        return FutureReply(line.submit(operation, arguments, self._take_over), self.name)

    def _call(self, operation: str, arguments: tuple[Any, ...]) -> RayReply:
        body = pickle.dumps(arguments, protocol=5)
        try:
            return RayReply(self._actor.call.remote(operation, body), self.name)
        except Exception as error:  # Ray raises it bare where it knows no such actor, or was shut down
            raise BrokerUnreachableError(
                f"channel {self.name!r}: its broker cannot be reached any more: {error}"
            ) from error

    def _line(self) -> Line | None:
        path = self._path
        if not path or self.node != node_name():
            return None
        line = dial(path)
        if line is None:  # the broker was restarted, or is gone; actor calls know which
            self._path = ""
            with suppress(Exception):  # as above; the call that follows says so
                self._actor.place.remote().future().add_done_callback(self._moved)
        return line

    def _moved(self, place: Any) -> None:
        if place.exception() is None:
            self.node, self._path = place.result()

    def _take_over(self, request: Request) -> None:
        """A request is unanswered and the socket gone: Ray repeats it to a restarted broker, or says that it died."""

        def settle(answer: Any) -> None:
            if isinstance(answer, BrokerUnreachableError):
                request.future.set_exception(answer)
            else:
                request.future.set_result(answer)

        try:
            self._call(request.operation, request.arguments).then(settle)
        except BrokerUnreachableError as error:
            settle(error)

    def destroy(self) -> None:
        """End the broker's process."""
        with suppress(RayActorError):  # it may be gone already
            ray.get(self._actor.shut_down.remote())
        ray.kill(self._actor)


def create(name: str, config: ChannelConfig, options: dict[str, Any]) -> RayLink:
    """Start a broker.

    Args:
        name: Name of the channel, unique in the cluster.
        config: Options of the channel.
        options: Ray actor options, e.g. a scheduling strategy that puts it on a node.

    Raises:
        ConfigError: There is a channel of this name.
    """
    restarts = {} if config.journal is None else {"max_restarts": -1, "max_task_retries": -1}
    chosen = {
        "num_cpus": 0,
        "max_concurrency": _CONCURRENT,
        "name": name,
        "namespace": NAMESPACE,
        **restarts,
        **options,
    }
    try:
        actor = ray.remote(Broker).options(**chosen).remote(name, config)
    except ValueError as error:
        raise ConfigError(f"channel {name!r} exists already: connect to it or choose another name") from error
    return RayLink(name, actor, ray.get(actor.place.remote()))


def connect(name: str) -> RayLink:
    """Find a broker that another process started.

    Raises:
        UnknownChannelError: There is none of this name; those that exist are listed.
    """
    try:
        actor = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        names = [entry["name"] for entry in list_named_actors(all_namespaces=True) if entry["namespace"] == NAMESPACE]
        raise UnknownChannelError(f"unknown channel {name!r}; {suggest(name, names)}") from error
    return RayLink(name, actor, ray.get(actor.place.remote()))


def _unreachable(channel: str, error: BaseException) -> BrokerUnreachableError:
    if isinstance(error, ActorUnavailableError):
        return BrokerUnreachableError(f"channel {channel!r}: the broker is restarting: {error}")
    if isinstance(error, ActorDiedError | RayActorError):
        return BrokerUnreachableError(
            f"channel {channel!r}: the broker's process died and, unless it keeps a journal, its items with it: {error}"
        )
    return BrokerUnreachableError(f"channel {channel!r} does not answer; its process is stopped or overloaded")
