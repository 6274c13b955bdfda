"""Conformance suite for data channels: subclass it where a channel is hosted in another way.

    class TestMyChannel(ChannelConformance):
        @pytest.fixture
        def make_channel(self):
            return lambda config: Channel(MyLink("name", config))

The suite needs nothing but the client's interface. pytest is imported here, so import this module from tests only.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlinf_plugins.core.errors import (
    BatchTooLargeError,
    ChannelClosedError,
    ChannelTimeoutError,
    ConfigError,
    EndOfStreamError,
    ItemTooLargeError,
    StaleDeliveryError,
    UnserialisableItemError,
    WrongGroupError,
)
from rlinf_plugins.scheduler.channel import Channel, ChannelConfig, Granularity, Put

MakeChannel = Callable[[ChannelConfig], Channel]

_SOON = 60.0
"""Long enough for anything that should happen at once on a loaded machine."""


class ChannelConformance:
    """What every channel must do; a subclass provides the fixture ``make_channel``."""

    @pytest.fixture
    def make_channel(self) -> MakeChannel:
        """Make a channel with these options."""
        raise NotImplementedError("override the fixture make_channel in your subclass")

    @pytest.fixture
    def make(self, make_channel: MakeChannel) -> Iterator[Callable[..., Channel]]:
        """Make channels from options, and destroy them after the test."""
        made: list[Channel] = []

        def build(**options: Any) -> Channel:
            made.append(make_channel(ChannelConfig(**options)))
            return made[-1]

        yield build
        for channel in made:
            channel.destroy()

    def test_items_arrive_in_order_and_once(self, make: Callable[..., Channel]) -> None:
        """A simple stream."""
        channel = make(max_items=64)
        producer, consumer = channel.producer(), channel.consumer()

        def produce() -> None:
            with producer.stream(window=32) as stream:
                for index in range(1000):
                    stream.put({"index": index})
            channel.close()

        thread = threading.Thread(target=produce)
        thread.start()
        got = [value["index"] for value in consumer.stream(ahead=16)]
        thread.join()
        assert got == list(range(1000))
        assert channel.stats()["committed"] == 1000

    def test_a_blocked_get_does_not_block_others(self, make: Callable[..., Channel]) -> None:
        """A synchronous get on one key waits; one on another key is served."""
        channel = make()
        producer, consumer = channel.producer(), channel.consumer()
        errors: list[BaseException] = []

        def wait_for_nothing() -> None:
            try:
                consumer.get(key="never", timeout=_SOON)
            except EndOfStreamError as error:
                errors.append(error)

        thread = threading.Thread(target=wait_for_nothing)
        thread.start()
        _until(lambda: channel.stats()["waiting_gets"] == 1)
        producer.put("x", key="other")
        assert consumer.get(key="other", timeout=_SOON).value == "x"
        channel.close()
        thread.join()
        assert len(errors) == 1

    def test_the_bound_holds_the_producer(self, make: Callable[..., Channel]) -> None:
        """A put beyond the bound waits, fails in its time with the numbers, and takes nothing."""
        channel = make(max_items=2)
        producer, consumer = channel.producer(), channel.consumer()
        producer.put_many([Put(1), Put(2)])
        with pytest.raises(ChannelTimeoutError, match=r"2 of 2 items"):
            producer.put(3, timeout=0.05)
        consumer.get().ack()
        producer.put(4, timeout=_SOON)
        assert [consumer.get(timeout=_SOON).value for _ in range(2)] == [2, 4]

    def test_every_wait_ends_in_its_time(self, make: Callable[..., Channel]) -> None:
        """A get that finds nothing says what it waited for."""
        channel = make()
        consumer = channel.consumer("taker")
        start = time.monotonic()
        with pytest.raises(ChannelTimeoutError, match=r"key 'k' by 'taker'.*no producer is attached"):
            consumer.get(key="k", timeout=0.05)
        assert time.monotonic() - start < _SOON

    def test_closing_flushes_tails_and_ends_the_stream(self, make: Callable[..., Channel]) -> None:
        """The last batch may be short; then the stream ends, and nothing can be put."""
        channel = make(granularity=Granularity.micro_batch(4))
        producer, consumer = channel.producer(), channel.consumer()
        producer.put_many(Put(index) for index in range(6))
        channel.close()
        assert [delivery.values for delivery in consumer] == [[0, 1, 2, 3], [4, 5]]
        with pytest.raises(EndOfStreamError):
            consumer.get()
        with pytest.raises(ChannelClosedError):
            producer.put(7)

    def test_what_is_not_acknowledged_comes_again(self, make: Callable[..., Channel]) -> None:
        """A block that raises hands its items back; a consumer that leaves does too; a late ack is refused."""
        channel = make()
        producer, consumer = channel.producer(), channel.consumer("first")
        producer.put("x")
        with pytest.raises(RuntimeError), consumer.get():
            raise RuntimeError("worker failed")
        late = consumer.get(timeout=_SOON)
        assert late.items[0].attempts == 2
        consumer.detach()
        again = channel.consumer("second").get(timeout=_SOON)
        assert again.value == "x"
        with pytest.raises(StaleDeliveryError):
            late.ack()
        again.ack()
        assert channel.stats()["committed"] == 1

    def test_a_dead_consumer_is_noticed(self, make: Callable[..., Channel]) -> None:
        """One that is not heard of for a lease loses what it holds."""
        channel = make(lease_seconds=0.3)
        producer, consumer = channel.producer(), channel.consumer("dies")
        producer.put("x")
        held = consumer.get()
        _stop_beating(consumer)
        again = channel.consumer("lives").get(timeout=_SOON)
        assert again.value == "x"
        with pytest.raises(StaleDeliveryError):
            held.ack()
        assert any("'dies'" in report.text for report in channel.reports() if report.kind == "consumer-lost")

    def test_weights_make_batches_and_nothing_starves(self, make: Callable[..., Channel]) -> None:
        """A batch stops before the target; an item above it is a batch of its own."""
        channel = make()
        producer, consumer = channel.producer(), channel.consumer()
        producer.put_many(Put(weight, weight=weight) for weight in (90, 3, 3, 3))
        assert consumer.get_batch(weight=7, timeout=_SOON).values == [90]
        assert consumer.get_batch(weight=7, timeout=_SOON).values == [3, 3]

    def test_groups_stay_whole_even_if_a_member_fails(self, make: Callable[..., Channel]) -> None:
        """A failed member is named; its group is delivered without it."""
        channel = make(granularity=Granularity.group())
        producer, consumer = channel.producer(), channel.consumer()
        producer.put("a0", group=("a", 2))
        producer.put_many([Put("b0", group=("b", 2)), Put("b1", group=("b", 2))])
        producer.fail(("a", 2), "simulator crashed")
        first, second = consumer.get_batch(timeout=_SOON), consumer.get_batch(timeout=_SOON)
        assert first.values == ["b0", "b1"]
        assert second.values == ["a0"]
        assert second.groups is not None
        assert second.groups[0].failed == ("simulator crashed",)

    @pytest.mark.parametrize(
        ("granularity", "sizes"),
        [
            (Granularity.item(), [1] * 12),
            (Granularity.micro_batch(4), [4, 4, 4]),
            (Granularity.micro_batch(tokens=5), [2, 2, 2, 2, 2, 2]),
            (Granularity.micro_batch(4, step=6), [4, 2, 4, 2]),
            (Granularity.global_batch(6), [6, 6]),
        ],
        ids=["item", "count", "tokens", "step", "global"],
    )
    def test_the_same_loop_runs_at_every_granularity(
        self, make: Callable[..., Channel], granularity: Granularity, sizes: list[int]
    ) -> None:
        """The plan's choice changes the batches, not the flow's code."""
        channel = make()
        channel.set_granularity(granularity)
        channel.producer().put_many(Put(index, weight=2) for index in range(12))
        channel.close()
        batches = [(delivery.values, delivery.ends_step) for delivery in channel.consumer()]
        assert [len(values) for values, _ in batches] == sizes
        assert [value for values, _ in batches for value in values] == list(range(12))
        if granularity.step is not None:
            seen = [sum(sizes[: index + 1]) for index in range(len(sizes))]
            assert [ends for _, ends in batches] == [count % 6 == 0 for count in seen]

    def test_old_weights_are_passed_over_and_reported(self, make: Callable[..., Channel]) -> None:
        """Stale items are named in the next delivery and in the reports."""
        channel = make(max_staleness=1)
        producer, consumer = channel.producer("p"), channel.consumer()
        producer.put_many([Put("old", version=0), Put("new", version=2)])
        channel.set_version(2)
        delivery = consumer.get(timeout=_SOON)
        assert delivery.value == "new"
        assert [(item.producer, item.seq) for item in delivery.stale] == [("p", 0)]
        assert [report.kind for report in channel.reports()] == ["stale"]

    def test_peek_takes_nothing(self, make: Callable[..., Channel]) -> None:
        """Looking at the next items leaves them where they are."""
        channel = make()
        channel.producer().put_many([Put("a"), Put("b")])
        assert [value for _, value in channel.peek(5)] == ["a", "b"]
        assert channel.qsize() == 2

    def test_async_and_sync_are_the_same(self, make: Callable[..., Channel]) -> None:
        """The async methods do what the others do; a cancelled get loses nothing."""
        channel = make()
        producer, consumer = channel.producer(), channel.consumer()

        async def flow() -> list[Any]:
            cancelled = asyncio.ensure_future(consumer.get_async())
            while not channel.stats()["waiting_gets"]:
                await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await producer.put_async("a", timeout=_SOON)
            await producer.put_many_async([Put("b"), Put("c")], timeout=_SOON)
            first = await consumer.get_async(timeout=_SOON)
            await first.ack_async()
            rest = await consumer.get_batch_async(2, timeout=_SOON)
            await consumer.ack_async(rest)
            channel.close()
            return [first.value, *rest.values, *[d.values async for d in consumer]]

        assert asyncio.run(flow()) == ["a", "b", "c"]
        assert channel.stats()["committed"] == 3

    def test_leaving_a_stream_early_gives_back_what_was_not_seen(self, make: Callable[..., Channel]) -> None:
        """Items fetched ahead are not lost with the loop that fetched them."""
        channel = make()
        channel.producer().put_many(Put(index) for index in range(10))
        values = channel.consumer("early").stream(ahead=4)
        assert [next(values), next(values)] == [0, 1]
        values.close()  # type: ignore[attr-defined]
        channel.close()
        assert list(channel.consumer("later").stream()) == list(range(2, 10))

    def test_bad_input_is_named_and_drops_nothing(self, make: Callable[..., Channel]) -> None:
        """Each mistake is an error of its own, and the channel goes on."""
        channel = make(max_items=4, max_bytes=100_000, inline_bytes=1000)
        producer, consumer = channel.producer(), channel.consumer()
        with pytest.raises(ItemTooLargeError, match=r"\d{6} bytes.*max_bytes=100000"):
            producer.put(bytes(200_000))
        with pytest.raises(UnserialisableItemError, match="generator"):
            producer.put(index for index in range(3))
        with pytest.raises(UnserialisableItemError, match="list"):
            producer.put("x", key=["unhashable"])  # type: ignore[arg-type]
        with pytest.raises(WrongGroupError, match="'other'"):
            channel.consumer(group="other")
        with pytest.raises(BatchTooLargeError, match=r"5 items.*max_items=4"):
            consumer.get_batch(5)
        with pytest.raises(ConfigError, match="count"):
            channel.set_granularity(Granularity(count=0))
        with pytest.raises(ConfigError, match="share"):
            channel.consumer(share=0)
        producer.put("fine")
        assert consumer.get(timeout=_SOON).value == "fine"

    def test_one_shot_keys_leave_nothing(self, make: Callable[..., Channel]) -> None:
        """A key that is empty is forgotten."""
        channel = make()
        producer, consumer = channel.producer(), channel.consumer()
        for index in range(200):
            producer.put(index, key=f"once-{index}")
            consumer.get(key=f"once-{index}", timeout=_SOON).ack()
        assert channel.stats()["keys"] == 0


def _until(condition: Callable[[], bool]) -> None:
    """Wait for something the channel has no event for, such as another thread's call having arrived."""
    end = time.monotonic() + _SOON
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


def _stop_beating(member: Any) -> None:
    """What a process that was killed or stopped does."""
    member._heart.remove(member.attached.handle)
