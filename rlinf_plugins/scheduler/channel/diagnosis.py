"""Why somebody waits, in words."""

from collections.abc import Iterable

from rlinf_plugins.scheduler.channel.model import PendingPut, Waiter
from rlinf_plugins.scheduler.channel.state import State


def explain_waiter(state: State, blocked: Iterable[PendingPut], waiter: Waiter) -> str:
    """Name a get that waits and everything that may be the cause.

    Returns:
        One line with channel, key, consumer, age and causes.
    """
    queue = waiter.queue
    age = state.clock() - waiter.since
    causes = [f"{queue.count} items ready, wants {_wanted(waiter)}"]
    if queue.groups:
        group = min(queue.groups.values(), key=lambda g: g.since)
        producers = ", ".join(sorted(repr(p.name) for p in group.contributors))
        causes.append(
            f"{len(queue.groups)} groups incomplete, oldest {group.name!r}: {group.arrived} of {group.size} members"
            f" from {producers}"
        )
    holders = {
        delivery.consumer.name
        for consumer in state.consumers.values()
        for delivery in consumer.deliveries.values()
        if delivery.queue is queue
    }
    if holders:
        causes.append(f"on lease to {_names(holders)}")
    causes.append(_producers(state))
    stuck = [pending for pending in blocked if pending.entries[pending.at].key != queue.key]
    if stuck:
        keys = {repr(pending.entries[pending.at].key) for pending in stuck}
        causes.append(f"producers wait for room with items of other keys: {', '.join(sorted(keys)[:5])}")
    return (
        f"get on channel {state.name!r}, key {queue.key!r} by {waiter.consumer.name!r} has waited {age:.1f} s: "
        + "; ".join(causes)
    )


def explain_put(state: State, pending: PendingPut) -> str:
    """Name a put that waits and who holds the room it needs.

    Returns:
        One line with channel, key, producer, age and causes.
    """
    entry, config = pending.entries[pending.at], state.config
    holders = {c.name for c in state.consumers.values() if c.deliveries}
    return (
        f"put to channel {state.name!r}, key {entry.key!r} by {pending.producer.name!r} has waited "
        f"{state.clock() - pending.since:.1f} s for room of {entry.nbytes} bytes: {state.items} of {config.max_items} "
        f"items and {state.bytes} of {config.max_bytes} bytes held, {state.leased} items on lease to {_names(holders)}"
    )


def _wanted(waiter: Waiter) -> str:
    request, granularity = waiter.request, waiter.queue.granularity
    count = request.limit if request.limit is not None or request.weight is not None else granularity.count
    weight = request.weight if request.limit is not None or request.weight is not None else granularity.weight
    parts = [f"{count} items"] if count is not None else []
    parts += [f"weight {weight} (has {waiter.queue.weight})"] if weight is not None else []
    parts += ["in whole groups"] if granularity.whole_groups else []
    return " ".join(parts) or f"step of {granularity.step} items"


def _producers(state: State) -> str:
    alive = sorted(p.name for p in state.producers.values() if not p.lapsed and not p.finished)
    dead = sorted(p.name for p in state.producers.values() if p.lapsed and not p.finished)
    if not alive and not dead:
        return "no producer is attached"
    text = f"{len(alive)} producers attached"
    return f"{text}, dead: {_names(dead)}" if dead else text


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(repr(name) for name in ordered[:5])
    return (shown or "nobody") + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")
