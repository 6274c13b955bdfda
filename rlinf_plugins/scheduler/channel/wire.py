"""What crosses processes: plain tuples, cheap to pickle, and the views clients give of them."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from rlinf_plugins.core.errors import UnserialisableItemError
from rlinf_plugins.scheduler.channel.config import ChannelConfig
from rlinf_plugins.scheduler.channel.model import Group, Item
from rlinf_plugins.scheduler.channel.outlet import Batch

DEFAULT_KEY = "default"

Row = tuple[Hashable, Any, int, int, int | None, tuple[str, int] | None, str | None]
"""The fields of :class:`~.model.Entry`."""


class Put(NamedTuple):
    """One item for :meth:`Producer.put_many`.

    Attributes:
        value: Any Python object; tensors and arrays inside travel without being pickled.
        key: Queue of the channel it belongs to.
        weight: What it counts for in weighted batches and balancing, e.g. its tokens.
        version: Weight version it was made with.
        group: Name and size of the group it is a member of.
    """

    value: Any
    key: Hashable = DEFAULT_KEY
    weight: int = 1
    version: int | None = None
    group: tuple[str, int] | None = None


def check_key(key: Any) -> None:
    """Refuse what cannot be a key.

    Raises:
        UnserialisableItemError: It cannot be hashed.
    """
    try:
        hash(key)
    except TypeError as error:
        raise UnserialisableItemError(f"a key must be hashable, got {type(key).__name__}: {key!r}") from error


class Attached(NamedTuple):
    """Answer to attaching: the member's handle and epoch, what was claimed before, the folder and the options."""

    handle: int
    epoch: int
    claimed: int
    directory: str
    config: ChannelConfig


class ItemRow(NamedTuple):
    """An item as it is delivered.

    Attributes:
        producer: Name of its producer.
        epoch: The producer's epoch.
        seq: The producer's number for it. The three identify the item for ever.
        key: Its key.
        weight: Its weight.
        version: Weight version it was made with.
        group: Name of its group.
        attempts: Deliveries so far, this one included.
        payload: How its value travels.
    """

    producer: str
    epoch: int
    seq: int
    key: Hashable
    weight: int
    version: int | None
    group: str | None
    attempts: int
    payload: Any


class GroupRow(NamedTuple):
    """A group that was delivered whole.

    Attributes:
        name: Its name.
        size: Members announced.
        members: How many of the batch's items, in order, are its members.
        failed: Reasons of members that failed.
        short: Why it is incomplete; empty if it is not.
    """

    name: str
    size: int
    members: int
    failed: tuple[str, ...]
    short: str


class BatchRow(NamedTuple):
    """A batch as it is delivered. ``units``: how many items each unit has; ``None`` where each is one item."""

    number: int
    items: list[tuple[Any, ...]]
    groups: list[GroupRow] | None
    step: int | None
    ends_step: bool
    stale: list[tuple[Any, ...]]


def item_row(item: Item) -> ItemRow:
    """The row of one item."""
    return ItemRow(*_fields(item))


def pack_batch(batch: Batch) -> tuple[Any, ...]:
    """The fields of a :class:`BatchRow`, as a plain tuple."""
    groups = None
    if any(isinstance(unit, Group) for unit in batch.units):
        groups = [_group_row(unit) if isinstance(unit, Group) else _single(unit) for unit in batch.units]
    items = [_fields(item) for unit in batch.units for item in unit.items]
    return batch.number, items, groups, batch.step, batch.ends_step, [_fields(item)[:-1] for item in batch.stale]


def _fields(item: Item) -> tuple[Any, ...]:
    producer, group = item.producer, item.group
    return (
        producer.name,
        producer.epoch,
        item.seq,
        item.key,
        item.weight,
        item.version,
        None if group is None else group.name,
        item.attempts,
        item.payload,
    )


def _group_row(group: Group) -> GroupRow:
    return GroupRow(
        group.name, group.size, len(group.items), tuple(failure.reason for failure in group.failed), group.short
    )


def _single(item: Item) -> GroupRow:
    return GroupRow("", 1, 1, (), "")
