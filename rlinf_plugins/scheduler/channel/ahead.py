"""Values fetched ahead of whoever works on them, in batches that grow with what is ready."""

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from rlinf_plugins.core.errors import EndOfStreamError
from rlinf_plugins.scheduler.channel.link import Reply, Steps, drive
from rlinf_plugins.scheduler.channel.model import Request

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.channel.consumer import Consumer
    from rlinf_plugins.scheduler.channel.delivery import Delivery


class Asked(NamedTuple):
    """A get that is on its way: whose, what, and the reply to wait for."""

    handle: int
    request: Request
    reply: Reply


def iterate(consumer: "Consumer", ahead: int, key: Hashable, max_staleness: int | None) -> Iterator[Any]:
    """Values one by one, the next batch being fetched while the caller works on the present one."""
    request = Request(key, 0, ahead, None, False, max_staleness, ahead=True)
    asked = consumer.ask(request, None)
    delivery: Delivery | None = None
    done = 0
    try:
        while True:
            fresh = drive(_await(consumer, asked))
            finished, delivery, done = delivery, fresh, 0
            asked = consumer.ask(request, None, [] if finished is None else [finished])
            for value in delivery.values:
                yield value
                done += 1
            if not asked.reply.ready():
                consumer.ack(delivery)  # nothing to send it with: others may wait for it to know that this is the end
                delivery = None
    except EndOfStreamError:
        if delivery is not None:
            consumer.ack(delivery)
    except GeneratorExit:
        consumer.withdraw(asked)
        if delivery is not None:
            consumer.ack_part(delivery, done + 1)
        raise


def _await(consumer: "Consumer", asked: Asked) -> "Steps[Delivery]":
    while True:
        delivery = yield from consumer.receive(asked, (yield asked.reply, None))
        if delivery is not None:
            return delivery
        asked = consumer.ask(asked.request, None)
