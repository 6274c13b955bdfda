"""A flow's workers, channels and device switcher as Ray actors."""

import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray

from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.channel import Channel, ChannelConfig
from rlinf_plugins.scheduler.lock.fence import FileFence, Permit
from rlinf_plugins.scheduler.macro.devices import DeviceHost, WorkerResident
from rlinf_plugins.scheduler.macro.host import Answer, Call, Handle, Recipe, move, no_device, perform

_MOST_WAITING = 1000
"""Workers that may wait for their turn at the same time."""


class DeviceActor:
    """Hosts the switcher; it moves workers by calling their actors.

    Args:
        capacity: Bytes of each device, by name.
    """

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self._capacity = dict(capacity)
        self._devices: DeviceHost | None = None

    async def add(self, name: str, footprint: Mapping[str, int], worker: Any) -> None:
        """Take charge of a worker's actor."""

        async def move_worker(onto: bool, permit: Permit) -> None:
            await worker.move.remote(onto, permit)

        await self._running().add(WorkerResident(name, footprint, move_worker))

    async def enter(self, name: str) -> None:
        """See :meth:`DeviceHost.enter`."""
        await self._running().enter(name)

    async def leave(self, name: str) -> None:
        """See :meth:`DeviceHost.leave`."""
        await self._running().leave(name)

    async def spans(self) -> list[Span]:
        """See :meth:`DeviceHost.spans`."""
        return await self._running().spans()

    def _running(self) -> DeviceHost:
        if self._devices is None:  # made on the actor's loop
            self._devices = DeviceHost(self._capacity)
        return self._devices


class WorkerActor:
    """A worker in a process of its own. One thread makes its calls, another one moves it.

    Args:
        recipe: How to make it.
        devices: Handle of the :class:`DeviceActor`.
        fence_folder: Where the fences of the machine's devices are.
    """

    def __init__(self, recipe: Recipe, devices: Any, fence_folder: str) -> None:
        self._recipe = recipe
        self._devices = devices
        self._fence = FileFence(Path(fence_folder))
        self._worker = recipe.make()

    def footprint(self) -> dict[str, int]:
        """Bytes on each of its devices."""
        return dict.fromkeys(self._recipe.devices, self._worker.footprint)

    @ray.method(concurrency_group="calls")  # type: ignore[untyped-decorator]
    def call(self, call: Call) -> Answer:
        """Make a call."""
        if not self._recipe.devices:
            return perform(self._worker, self._recipe, call, no_device, no_device)
        return perform(self._worker, self._recipe, call, self._enter, self._leave)

    @ray.method(concurrency_group="moves")  # type: ignore[untyped-decorator]
    def move(self, onto: bool, permit: Permit) -> None:
        """Bring it to its devices or take it off them."""
        move(self._worker, onto, permit, self._fence)

    def _enter(self) -> None:
        ray.get(self._devices.enter.remote(self._recipe.member))

    def _leave(self) -> None:
        ray.get(self._devices.leave.remote(self._recipe.member))


class RayHost:
    """Workers as actors. They ask Ray for no resources: the placement says where they are; see ``actor_options``.

    Args:
        capacity: Bytes of each device, by name.
        actor_options: Options of every worker's actor, e.g. a runtime environment.
    """

    def __init__(self, capacity: Mapping[str, int], **actor_options: Any) -> None:
        self._folder = tempfile.mkdtemp(prefix="rlinf-flow-", dir="/dev/shm")
        self._devices = (
            ray.remote(DeviceActor).options(num_cpus=0, max_concurrency=_MOST_WAITING).remote(dict(capacity))
        )
        self._options = {"num_cpus": 0, **actor_options}
        self._channels: list[Channel] = []
        self._actors: list[Any] = [self._devices]

    def channel(self, name: str, config: ChannelConfig) -> Channel:
        """Start a channel in an actor."""
        unique = f"{name}/{Path(self._folder).name}"
        self._channels.append(Channel.create(unique, config))
        return self._channels[-1]

    def worker(self, recipe: Recipe) -> Handle:
        """Start a worker's actor."""
        kind = ray.remote(concurrency_groups={"calls": 1, "moves": 1})(WorkerActor)
        actor = kind.options(**self._options).remote(recipe, self._devices, self._folder)
        self._actors.append(actor)
        footprint = ray.get(actor.footprint.remote())
        if footprint:
            try:
                ray.get(self._devices.add.remote(recipe.member, footprint, actor))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
        return _RayWorker(actor)

    def switches(self) -> list[Span]:
        """Spans of the switcher since last asked."""
        found: list[Span] = ray.get(self._devices.spans.remote())
        return found

    def close(self) -> None:
        """End all actors."""
        for channel in self._channels:
            channel.close("the flow was closed")
        for actor in self._actors:
            ray.kill(actor)
        for channel in self._channels:
            channel.destroy()
        shutil.rmtree(self._folder, ignore_errors=True)


class _RayWorker:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, call: Call) -> "Future[Answer]":
        """Make a call in the actor."""
        answer: Future[Answer] = Future()
        self._actor.call.remote(call).future().add_done_callback(lambda done: _pass_on(done, answer))
        return answer


def _pass_on(done: "Future[Answer]", answer: "Future[Answer]") -> None:
    """Hand over what came, errors as they were raised; Ray wraps those of its workers."""
    error = done.exception()
    if error is not None:
        answer.set_exception(getattr(error, "cause", None) or error)
    else:
        answer.set_result(done.result())
