"""The driver of a macro flow: makes groups and channels, ends streams, captures the graph, reports failures."""

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from rlinf_plugins.core.errors import EndOfStreamError, FlowError, StageFailedError
from rlinf_plugins.core.extras import require
from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.channel import ChannelConfig, Granularity
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.macro.devices import UNLIMITED
from rlinf_plugins.scheduler.macro.group import Group, Port, Started
from rlinf_plugins.scheduler.macro.host import Answer, Host, LocalHost, Recipe
from rlinf_plugins.scheduler.macro.placement import Placement
from rlinf_plugins.scheduler.macro.worker import Worker
from rlinf_plugins.scheduler.planning.capture import flow_from_spans

_LEAST_ROOM = 4096


class MacroFlow:
    """Runs a user's flow as a placement says. Use it in a ``with`` block.

    Args:
        name: Name of the flow.
        items: Items a step processes.
        placement: Where stages run and how many items they take at a time.
        memory: Bytes of every device, or of each by name; None: not limited.
        host: ``"local"``: threads of this process; ``"ray"``: actors of the Ray session of this process.
    """

    def __init__(
        self,
        name: str,
        *,
        items: int,
        placement: Placement | None = None,
        memory: int | Mapping[str, int] | None = None,
        host: Literal["local", "ray"] = "local",
    ) -> None:
        if items < 1:
            raise FlowError(f"flow {name!r} has items={items}; a step needs at least one item")
        self.name = name
        self.items = items
        self.placement = placement or Placement()
        capacity = {
            device: memory[device] if isinstance(memory, Mapping) else UNLIMITED if memory is None else memory
            for devices in self.placement.devices.values()
            for device in devices
        }
        self._host: Host = LocalHost(capacity) if host == "local" else require(_RAY, "").RayHost(capacity)
        self._groups: dict[str, Group] = {}
        self._ports: list[Port] = []
        self._writers: dict[Port, list[Future[Any]]] = defaultdict(list)
        self._calls = itertools.count(1)
        self._spans: list[Span] = []
        self._fed: set[str] = set()
        self._waiting = False
        self._failure: StageFailedError | None = None
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def group(
        self, name: str, kind: type[Worker], *arguments: Any, workers: int | None = None, **options: Any
    ) -> Group:
        """Return the group of a stage; it is started when it is first asked for.

        Args:
            name: The stage's name.
            kind: Class of its workers.
            arguments: Positional arguments of their constructor.
            workers: How many; None: one a device of the stage.
            options: Keyword arguments of their constructor.

        Raises:
            PlanError: The stage's devices cannot be divided among the workers.
            ExceedsCapacityError: A worker can never be on its device.
        """
        if name not in self._groups:
            size = workers or self.placement.workers_of(name)
            handles = [
                self._host.worker(
                    Recipe(
                        kind=kind,
                        arguments=arguments,
                        options=options,
                        name=name,
                        rank=rank,
                        size=size,
                        devices=devices,
                    )
                )
                for rank, devices in enumerate(self.placement.shares(name, size))
            ]
            self._groups[name] = Group(self, name, kind, handles)
        return self._groups[name]

    def channel(self, name: str, *, max_items: int | None = None) -> Port:
        """Start a channel between stages. Its stream ends when every call that writes to it has returned.

        Args:
            name: Its name in the flow.
            max_items: Items it holds before those who send wait; None: a step's and more.
        """
        config = ChannelConfig(max_items=max_items or max(_LEAST_ROOM, 2 * self.items))
        port = Port(name, self._host.channel(f"{self.name}/{name}/{len(self._ports)}", config))
        self._ports.append(port)
        return port

    def feed(self, name: str, values: Iterable[Any]) -> Port:
        """Start a channel with ``values`` in it, and nothing after them."""
        port = self.channel(name)
        port.fed = True
        self._fed.add(name)
        with port.channel.producer("driver").stream() as stream:
            for value in values:
                stream.put(value)
        port.channel.close("all was fed")
        return port

    def drain(self, port: Port) -> list[Any]:
        """Return everything a channel brings until its stream ends.

        Raises:
            StageFailedError: A worker of the flow raised.
        """
        self.settle()
        consumer = port.channel.consumer("driver")
        found: list[Any] = []
        try:
            while True:
                delivery = consumer.get_batch()
                found += delivery.values
                consumer.ack(delivery)
        except EndOfStreamError:
            self.check()
            return found

    def captured(self, items: int | None = None, turns: Mapping[str, int] | None = None) -> Flow:
        """Return the graph of what has happened so far; see :func:`flow_from_spans`."""
        inner = []
        for span in self.spans():
            reads = tuple(name for name in span.attributes.get("reads", ()) if name not in self._fed)
            inner.append(
                Span(
                    name=span.name,
                    actor=span.actor,
                    start=span.start,
                    end=span.end,
                    attributes={**span.attributes, "reads": reads},
                )
            )
        return flow_from_spans(inner, name=self.name, items=items or self.items, turns=turns)

    def spans(self) -> list[Span]:
        """Return the stage calls of all calls that have returned."""
        with self._lock:
            return list(self._spans)

    def switches(self) -> list[Span]:
        """Return the switches since last asked: who came to a device, who left for it, bytes and seconds."""
        return [span for span in self._host.switches() if span.name == "switch"]

    def close(self) -> None:
        """End the workers and channels."""
        self._host.close()

    # --- for groups -------------------------------------------------------------------------------------------

    def opening(self, group: Group, reads: Iterable[Port], writes: Iterable[Port]) -> int:
        """Prepare a call: batches of the size the placement gives its stage. Returns the call's number."""
        self.check()
        with self._lock:
            self._waiting = False
        for port in writes:
            if port.fed:
                raise FlowError(f"{group.name} writes {port.name!r}, which is fed; its stream has ended")
        for port in reads:
            if port.reader not in (None, group.name):
                raise FlowError(
                    f"{group.name} and {port.reader} read {port.name!r}; an item goes to one reader, so send it twice"
                )
            port.reader = group.name
            size = self.placement.items_of(group.name, len(group), self.items)
            port.channel.set_granularity(Granularity.micro_batch(size))
        return next(self._calls)

    def opened(self, started: Started, writes: Iterable[Port]) -> None:
        """Watch a call that was started."""
        with self._lock:
            for port in writes:
                self._writers[port] += started.futures
        for rank, future in enumerate(started.futures):
            future.add_done_callback(partial(self._returned, f"{started.stage}/{rank}"))

    def settle(self) -> None:
        """End the streams whose writers have returned; from now on also as they return.

        Not before the driver waits for something: until then it may start further writers.
        """
        with self._lock:
            self._waiting = True
            over = [port for port, futures in self._writers.items() if self._failure or all(f.done() for f in futures)]
            for port in over:
                del self._writers[port]
        for port in over:
            port.channel.close("every writer has returned" if self._failure is None else str(self._failure))

    def check(self) -> None:
        """Raise the first failure of a worker.

        Raises:
            StageFailedError: With the worker's error as its cause.
        """
        if self._failure is not None:
            raise self._failure

    def _returned(self, member: str, future: "Future[Answer]") -> None:
        error = future.exception() if not future.cancelled() else None
        with self._lock:
            if error is None and not future.cancelled():
                self._spans += future.result()[1]
            elif self._failure is None and error is not None:
                self._failure = StageFailedError(f"{member} failed: {type(error).__name__}: {error}")
                self._failure.__cause__ = error
            waiting = self._waiting or self._failure is not None
        if waiting:
            self.settle()


_RAY = "rlinf_plugins.scheduler.macro.ray_host"
