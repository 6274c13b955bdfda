"""What a consumer gets: values on lease."""

from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from rlinf_plugins.scheduler.channel.rows import cut, gather, join
from rlinf_plugins.scheduler.channel.wire import BatchRow, GroupRow, ItemRow

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.channel.consumer import Consumer


class Place(NamedTuple):
    """Where a row is: in which batch, at which row."""

    identity: Any
    row: int
    batch: Any


class Delivery:
    """Items on lease. Acknowledge them when their effect is safe; what is not acknowledged comes again, to somebody.

    As a context manager it is acknowledged at the end of the block, or handed back if the block raises.

    Attributes:
        number: Number of the delivery, which the acknowledgement carries.
        groups: The groups, where they are kept whole; ``None`` otherwise.
        step: Optimiser step the items count towards; ``None`` without a step size.
        ends_step: The last items of the step: time for the optimiser.
    """

    def __init__(self, consumer: "Consumer", row: BatchRow, parts: list[Any]) -> None:
        self._consumer = consumer
        self._row = row
        self._parts = parts
        self.number = row.number
        self.groups: list[GroupRow] | None = row.groups
        self.step = row.step
        self.ends_step = row.ends_step

    def __len__(self) -> int:
        return len(self._parts)

    @cached_property
    def items(self) -> list[ItemRow]:
        """Who made each item, with which weights, how often it was delivered."""
        return [ItemRow(*item) for item in self._row.items]

    @cached_property
    def stale(self) -> list[ItemRow]:
        """Items that were passed over because their weights were too old; their values are gone."""
        return [ItemRow._make((*item, None)) for item in self._row.stale]

    @cached_property
    def values(self) -> list[Any]:
        """The items, in order; a row of a batch is a batch of one."""
        return [cut(part.batch, part.row, part.row + 1) if isinstance(part, Place) else part for part in self._parts]

    @property
    def value(self) -> Any:
        """The only item's value; for deliveries of one."""
        (value,) = self.values
        return value

    @property
    def units(self) -> int:
        """How many units can be acknowledged separately: groups where they are kept whole, else items."""
        return len(self._parts if self.groups is None else self.groups)

    def merged(self) -> Any:
        """All items as one batch: rows that were put together are one view, batches are concatenated."""
        if all(isinstance(part, Place) for part in self._parts):
            return gather(self._parts)
        return join(self.values)

    def ack(self) -> None:
        """Commit the items.

        Raises:
            StaleDeliveryError: The lease had ended; whatever was done with the items must be undone or ignored.
        """
        self._consumer.ack(self)

    async def ack_async(self) -> None:
        """As :meth:`ack`, without blocking the loop."""
        await self._consumer.ack_async(self)

    def nack(self) -> None:
        """Hand the items back at once."""
        self._consumer.nack(self)

    def __enter__(self) -> "Delivery":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.ack()
        else:
            self.nack()
