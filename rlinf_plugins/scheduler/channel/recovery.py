"""The state as records and back; what a journal holds. Leases are not recorded: after a restart they are void."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rlinf_plugins.scheduler.channel.members import give_up
from rlinf_plugins.scheduler.channel.model import Entry, Group, Item

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.channel.core import ChannelCore

Record = tuple[Any, ...]
"""``("put", order, producer, epoch, seq, entry)``, ``("gone", order)``, ``("acked", delivery)``,
``("producer", name, epoch, claimed)``, ``("short", key, group, reason)``, ``("version", number)``,
``("close", reason)``."""


def held_items(core: "ChannelCore") -> Iterator[Item]:
    """All items that were admitted and not committed."""
    state = core.state
    for queue in state.queues.values():
        yield from (item for unit in queue.ready for item in unit.items)
        if queue.granularity.whole_groups:
            yield from (item for group in queue.groups.values() for item in group.items)
    for consumer in state.consumers.values():
        for delivery in consumer.deliveries.values():
            yield from (item for unit in delivery.units if unit is not None for item in unit.items)
    yield from state.dead_letters


def snapshot(core: "ChannelCore") -> Iterator[Record]:
    """Records that stand for the present state."""
    state = core.state
    for name, producer in core.intake.known.items():
        waiting = sum(len(pending.entries) - pending.at for pending in producer.pending)
        yield "producer", name, producer.epoch, producer.claimed - waiting
    if state.version is not None:
        yield "version", state.version
    for group in _groups(core):
        for order, producer, seq, reason in group.failed:
            failure = Entry(group.key, b"", group=(group.name, group.size), failure=reason)
            yield "put", order, producer.name, producer.epoch, seq, tuple(failure)
        queue = state.queues.get(group.key)
        if group.short and (queue is None or queue.groups.get(group.name) is not group):
            yield "short", group.key, group.name, group.short
    for item in held_items(core):
        membership = None if item.group is None else (item.group.name, item.group.size)
        entry = Entry(item.key, item.payload, item.weight, item.nbytes, item.version, membership)
        yield "put", item.order, item.producer.name, item.producer.epoch, item.seq, tuple(entry)
    for number in state.committed:
        yield "acked", number
    if state.closed:
        yield "close", state.closed


def replay(records: Iterable[Record], core: "ChannelCore") -> None:
    """Bring a fresh channel to the recorded state; whatever was on lease is ready again."""
    items: dict[int, Record] = {}
    claimed: dict[str, tuple[int, int]] = {}
    short: list[Record] = []
    for kind, *fields in records:
        if kind == "put":
            order, producer, epoch, seq, _ = fields
            items[order] = tuple(fields)
            claimed[producer] = max(claimed.get(producer, (0, 0)), (epoch, seq + 1))
        elif kind == "gone":
            items.pop(fields[0], None)
        elif kind == "acked":
            core.state.committed[fields[0]] = None
        elif kind == "producer":
            claimed[fields[0]] = max(claimed.get(fields[0], (0, 0)), (fields[1], fields[2]))
        elif kind == "short":
            short.append(tuple(fields))
        elif kind == "version":
            core.state.version = fields[0]
        elif kind == "close":
            core.state.closed = fields[0]
    owners = {name: core.intake.restore(name, epoch, seq) for name, (epoch, seq) in claimed.items()}
    for order in sorted(items):
        _, name, epoch, seq, fields = items[order]
        entry = Entry(*fields)
        owner = owners[name] if owners[name].epoch == epoch else core.intake.former(name, epoch)
        core.intake.insert(core.state.queue(entry.key), owner, seq, core.state.order(order), entry)
    _settle_groups(core, short)


def _settle_groups(core: "ChannelCore", short: Iterable[Record]) -> None:
    """Groups that were given up are so again; where groups are not kept whole, their members went one by one."""
    for key, name, reason in short:
        queue = core.state.queues.get(key)
        if queue is not None and name in queue.groups:
            give_up(core.state, queue, name, reason)
    for queue in core.state.queues.values():
        if not queue.granularity.whole_groups:
            queue.groups.clear()


def _groups(core: "ChannelCore") -> Iterator[Group]:
    """Groups that are incomplete, ready or on lease."""
    for queue in core.state.queues.values():
        yield from queue.groups.values()
        yield from (unit for unit in queue.ready if isinstance(unit, Group))
    for consumer in core.state.consumers.values():
        for delivery in consumer.deliveries.values():
            yield from (unit for unit in delivery.units if isinstance(unit, Group))
