"""What the user writes of a stage: a class with methods that receive, work and send."""

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from rlinf_plugins.core.errors import FlowError
from rlinf_plugins.scheduler.channel.wire import DEFAULT_KEY
from rlinf_plugins.scheduler.macro.ports import Ports


class Worker:
    """One worker of a stage. Subclass it and give it methods; a group of them is called as one.

    A method is ordinary code: it takes batches from :meth:`recv`, works on them and passes results to :meth:`send`. How
    many items a batch has, on which device the worker is and who else uses that device is not its business: it has its
    devices from the moment a batch is given to it until it asks for the next one.

    Attributes:
        footprint: Bytes the worker takes on each of its devices while it is there.
        name: The stage's name.
        rank: Its number in the group.
        size: Workers of the group.
        devices: Names of its devices.
    """

    footprint: int = 0
    name: str = ""
    rank: int = 0
    size: int = 1
    devices: tuple[str, ...] = ()
    ports: Ports | None = None

    def onload(self) -> None:
        """Come to the devices: called before work whenever the worker is not there."""

    def offload(self) -> None:
        """Leave the devices: called when somebody else needs the room. The bytes must be free when it returns."""

    def recv(self, channel: str | None = None, *, key: Hashable = DEFAULT_KEY) -> Iterator[list[Any]]:
        """Yield batches until the stream ends; a batch is acknowledged when the next is asked for.

        Args:
            channel: Which of the channels the call reads; the only one if left out.
            key: Queue within the channel.

        Raises:
            FlowError: The call does not read it.
        """
        return self._connected().recv(channel, key)

    def recv_all(self, channel: str | None = None, *, key: Hashable = DEFAULT_KEY) -> list[Any]:
        """Return everything that comes until the stream ends: a barrier. Arguments and errors as in :meth:`recv`."""
        return self._connected().recv_all(channel, key)

    def send(
        self,
        value: Any,
        channel: str | None = None,
        *,
        key: Hashable = DEFAULT_KEY,
        weight: int = 1,
        version: int | None = None,
        group: tuple[str, int] | None = None,
    ) -> None:
        """Send one item; other arguments as in :meth:`rlinf_plugins.scheduler.channel.Producer.put`.

        Args:
            value: Any Python object.
            channel: Which of the channels the call writes; the only one if left out.
            key: Queue within the channel.
            weight: What it counts for, e.g. its tokens.
            version: Weight version it was made with.
            group: Name and size of the group it is a member of.

        Raises:
            FlowError: The call does not write it.
        """
        self._connected().send(value, channel, key=key, weight=weight, version=version, group=group)

    def on_device(self) -> AbstractContextManager[None]:
        """Hold the worker's devices for a block, for work that no received batch brings."""
        return self._connected().turn.hold()

    def _connected(self) -> Ports:
        if self.ports is None:
            raise FlowError(f"{type(self).__name__} is not being called by a group; recv and send need its channels")
        return self.ports
