"""Where a flow's workers live: threads of this process here, Ray actors in :mod:`ray_host`."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.channel import Channel, ChannelConfig
from rlinf_plugins.scheduler.lock.fence import MemoryFence, Permit
from rlinf_plugins.scheduler.macro.devices import DeviceHost, LoopThread, WorkerResident
from rlinf_plugins.scheduler.macro.ports import Ports
from rlinf_plugins.scheduler.macro.turn import Turn
from rlinf_plugins.scheduler.macro.worker import Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How to make a worker.

    Attributes:
        kind: The worker's class.
        arguments: Positional arguments of its constructor.
        options: Keyword arguments.
        name: The stage's name.
        rank: Its number in the group.
        size: Workers of the group.
        devices: Its devices.
    """

    kind: type[Worker]
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str
    rank: int
    size: int
    devices: tuple[str, ...] = ()

    @property
    def member(self) -> str:
        """``stage/rank``."""
        return f"{self.name}/{self.rank}"

    def make(self) -> Worker:
        """Make the worker."""
        worker = self.kind.__new__(self.kind)
        worker.name, worker.rank, worker.size, worker.devices = self.name, self.rank, self.size, self.devices
        self.kind.__init__(worker, *self.arguments, **self.options)
        return worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a worker's method.

    Attributes:
        method: The method.
        arguments: Positional arguments.
        options: Keyword arguments.
        number: Number of the call in its flow; makes names at channels unique.
        reads: Channels it reads, by the flow's name.
        writes: Channels it writes.
    """

    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    number: int
    reads: Mapping[str, Channel]
    writes: Mapping[str, Channel]


Answer = tuple[Any, list[Span]]
"""What a call returned, and the spans of its work."""


class Handle(Protocol):
    """A worker that was started."""

    def call(self, call: Call) -> "Future[Answer]":
        """Have it make a call; calls follow each other."""
        ...


class Host(Protocol):
    """Makes workers, channels and the device switcher of a flow."""

    def channel(self, name: str, config: ChannelConfig) -> Channel:
        """Start a channel."""
        ...

    def worker(self, recipe: Recipe) -> Handle:
        """Start a worker."""
        ...

    def switches(self) -> list[Span]:
        """Spans of the switcher since last asked."""
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...


def perform(worker: Worker, recipe: Recipe, call: Call, enter: Callable[[], None], leave: Callable[[], None]) -> Answer:
    """Make a call in the process of the worker."""
    turn = Turn(enter, leave)
    ports = Ports(recipe.name, f"{recipe.member}#{call.number}", call.reads, call.writes, turn)
    worker.ports = ports
    failed = True
    try:
        value = getattr(worker, call.method)(*call.arguments, **call.options)
        failed = False
    finally:
        worker.ports = None
        ports.close(failed=failed)
    return value, ports.recorder.drain()


def no_device() -> None:
    """A worker without devices has nothing to wait for."""


class LocalHost:
    """Workers on threads of this process. The capacity of each device is given in bytes, by name."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self._loop = LoopThread("flow-devices")
        self._fence = MemoryFence()
        self._devices = self._loop.run(_host(capacity))
        self._channels: list[Channel] = []
        self._workers: list[_LocalWorker] = []

    def channel(self, name: str, config: ChannelConfig) -> Channel:
        """Start a channel on a thread."""
        self._channels.append(Channel.local(name, config))
        return self._channels[-1]

    def worker(self, recipe: Recipe) -> Handle:
        """Make a worker; its calls run on a thread of its own."""
        made = _LocalWorker(recipe, self._loop, self._devices, self._fence)
        self._workers.append(made)
        return made

    def switches(self) -> list[Span]:
        """Spans of the switcher since last asked."""
        return self._loop.run(self._devices.spans())

    def close(self) -> None:
        """Close the channels, so that nobody waits at them, and end the threads."""
        for channel in self._channels:
            channel.close("the flow was closed")
        for worker in self._workers:
            worker.close()
        for channel in self._channels:
            channel.destroy()
        self._loop.close()


class _LocalWorker:
    def __init__(self, recipe: Recipe, loop: LoopThread, devices: DeviceHost, fence: MemoryFence) -> None:
        self._recipe = recipe
        self._worker = recipe.make()
        self._loop = loop
        self._devices = devices
        self._fence = fence
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=recipe.member)
        self._mover = ThreadPoolExecutor(1, thread_name_prefix=f"{recipe.member} moves")
        if recipe.devices:
            footprint = dict.fromkeys(recipe.devices, self._worker.footprint)
            loop.run(devices.add(WorkerResident(recipe.member, footprint, self._move)))

    def call(self, call: Call) -> "Future[Answer]":
        """Make a call on the worker's thread."""
        enter, leave = (self._enter, self._leave) if self._recipe.devices else (no_device, no_device)
        return self._thread.submit(perform, self._worker, self._recipe, call, enter, leave)

    def close(self) -> None:
        """End the threads."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._mover.shutdown(wait=True)

    def _enter(self) -> None:
        self._loop.run(self._devices.enter(self._recipe.member))

    def _leave(self) -> None:
        self._loop.run(self._devices.leave(self._recipe.member))

    async def _move(self, onto: bool, permit: Permit) -> None:
        await asyncio.get_running_loop().run_in_executor(self._mover, move, self._worker, onto, permit, self._fence)


def move(worker: Worker, onto: bool, permit: Permit, fence: Any) -> None:
    """Bring a worker to its devices or take it off them, past their fence."""
    with fence.admit(permit, worker.devices):
        (worker.onload if onto else worker.offload)()


async def _host(capacity: Mapping[str, int]) -> DeviceHost:
    return DeviceHost(capacity)
