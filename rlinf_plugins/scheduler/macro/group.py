"""Groups of workers, called as one and without waiting."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_plugins.core.errors import FlowError
from rlinf_plugins.scheduler.channel import Channel
from rlinf_plugins.scheduler.macro.host import Answer, Call, Handle
from rlinf_plugins.scheduler.macro.worker import Worker

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.macro.flow import MacroFlow


@dataclass(eq=False, slots=True)
class Port:
    """A channel of a flow.

    Attributes:
        name: Its name in the flow.
        channel: The channel.
        fed: The driver puts into it, no stage does.
        reader: Name of the group that reads it.
    """

    name: str
    channel: Channel
    fed: bool = False
    reader: str | None = None


class Started:
    """A call that was started on every worker of a group.

    Args:
        flow: The flow.
        stage: The group's name.
        futures: One a worker, in the order of their ranks.
    """

    def __init__(self, flow: "MacroFlow", stage: str, futures: Sequence["Future[Answer]"]) -> None:
        self._flow = flow
        self.stage = stage
        self.futures = tuple(futures)

    @property
    def done(self) -> bool:
        """Whether all workers have returned."""
        return all(future.done() for future in self.futures)

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait, and return what each worker returned, in the order of their ranks.

        Args:
            timeout: Seconds to wait; None: as long as it takes.

        Raises:
            StageFailedError: A worker of the flow raised; it is the cause.
            TimeoutError: They had not returned in time.
        """
        self._flow.settle()
        wait(self.futures, timeout)
        self._flow.check()
        if not self.done:
            raise TimeoutError(f"{self.stage} has not returned after {timeout:g} s")
        return [future.result()[0] for future in self.futures]


class Group:
    """The workers of a stage. Any public method of theirs can be called on the group.

    ``group.method(port, ..., to=port)`` starts the method on every worker and returns at once. Ports among the
    positional arguments are what the workers receive from, those under ``to`` what they send to; everything else is
    passed on.

    Args:
        flow: The flow.
        name: The stage's name.
        kind: The workers' class.
        handles: The workers by rank.
    """

    def __init__(self, flow: "MacroFlow", name: str, kind: type[Worker], handles: Sequence[Handle]) -> None:
        self.name = name
        self._flow = flow
        self._kind = kind
        self._handles = tuple(handles)

    def __len__(self) -> int:
        return len(self._handles)

    def __getattr__(self, method: str) -> Callable[..., Started]:
        if method.startswith("_") or not callable(getattr(self._kind, method, None)):
            raise AttributeError(f"{self._kind.__name__}, the workers of {self.name!r}, have no method {method!r}")

        def start(*arguments: Any, to: Port | Iterable[Port] = (), **options: Any) -> Started:
            reads = [argument for argument in arguments if isinstance(argument, Port)]
            rest = tuple(argument for argument in arguments if not isinstance(argument, Port))
            writes = [to] if isinstance(to, Port) else list(to)
            return self._start(method, rest, options, _by_name(reads), _by_name(writes))

        return start

    def _start(
        self,
        method: str,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
        reads: Mapping[str, Port],
        writes: Mapping[str, Port],
    ) -> Started:
        number = self._flow.opening(self, reads.values(), writes.values())
        call = Call(
            method=method,
            arguments=arguments,
            options=options,
            number=number,
            reads={name: port.channel for name, port in reads.items()},
            writes={name: port.channel for name, port in writes.items()},
        )
        started = Started(self._flow, self.name, [handle.call(call) for handle in self._handles])
        self._flow.opened(started, writes.values())
        return started


def _by_name(ports: Iterable[Port]) -> dict[str, Port]:
    found: dict[str, Port] = {}
    for port in ports:
        if found.setdefault(port.name, port) is not port:
            raise FlowError(f"a call has two channels named {port.name!r}; give them different names")
    return found
