"""What RLinf 0.3.0's channel was seen to do wrong, one test each."""

import runpy
import threading
from pathlib import Path

import pytest

from rlinf_plugins.core.errors import ChannelTimeoutError, EndOfStreamError, StaleDeliveryError
from rlinf_plugins.scheduler.channel import Channel, ChannelConfig, Granularity, Put


@pytest.fixture
def make():
    made = []

    def build(**options):
        made.append(Channel.local("peer", ChannelConfig(**options)))
        return made[-1]

    yield build
    for channel in made:
        channel.destroy()


def test_put_without_waiting_on_a_full_channel_returns_at_once(make):
    """There: it hangs."""
    channel = make(max_items=1)
    producer = channel.producer()
    producer.put(1)
    with pytest.raises(ChannelTimeoutError):
        producer.put(2, timeout=0)


def test_a_synchronous_get_on_one_key_does_not_block_another(make):
    """There: it does, within one worker."""
    channel = make()
    consumer = channel.consumer()
    blocked = threading.Thread(target=lambda: pytest.raises(EndOfStreamError, consumer.get, key="a"))
    blocked.start()
    channel.producer().put(1, key="b")
    assert consumer.get(key="b", timeout=30).value == 1
    channel.close()
    blocked.join()


def test_a_head_heavier_than_the_target_is_delivered(make):
    """There: the batch is empty for ever."""
    channel = make()
    channel.producer().put_many([Put("heavy", weight=100), Put("light", weight=1)])
    consumer = channel.consumer()
    assert consumer.get_batch(weight=10, timeout=30).values == ["heavy"]


def test_a_getter_that_goes_away_loses_nothing(make):
    """There: the item is gone with it."""
    channel = make()
    channel.producer().put("x")
    goes = channel.consumer("goes")
    held = goes.get()
    goes.detach()
    assert channel.consumer("stays").get(timeout=30).value == "x"
    with pytest.raises(StaleDeliveryError):
        held.ack()


def test_two_thousand_one_shot_keys_leave_none(make):
    """There: 2001 queues."""
    channel = make()
    producer, consumer = channel.producer(), channel.consumer()
    producer.put_many(Put(index, key=index) for index in range(2000))
    assert channel.stats()["keys"] == 2000
    for index in range(2000):
        consumer.ack(consumer.get(key=index, timeout=30))
    assert channel.stats()["keys"] == 0


def test_the_bound_bounds_the_producer(make):
    """There: puts return before they have room, so the producer runs ahead without limit."""
    channel = make(max_items=4)
    with channel.producer().stream(window=2) as stream:
        for index in range(6):
            stream.put(index, timeout=30)
        assert channel.stats()["items"] <= 4
        with pytest.raises(ChannelTimeoutError):
            stream.put(6, timeout=0.05)
        channel.consumer().get_batch(4).ack()


def test_a_batch_that_does_not_divide_the_stream_flushes_its_tail(make):
    """There: the last items stay for ever."""
    channel = make(granularity=Granularity.micro_batch(4))
    channel.producer().put_many(Put(index) for index in range(6))
    channel.close()
    assert [len(batch) for batch in channel.consumer()] == [4, 2]


def test_there_is_an_end_a_timeout_and_an_acknowledgement(make):
    """There: none of the three."""
    channel = make()
    channel.producer().put(1)
    consumer = channel.consumer()
    consumer.get().ack()
    with pytest.raises(ChannelTimeoutError):
        consumer.get(timeout=0.01)
    channel.close()
    with pytest.raises(EndOfStreamError):
        consumer.get()


def test_the_example_runs():
    example = Path(__file__).parents[3] / "examples" / "channel.py"
    sizes = runpy.run_path(str(example))["main"]()
    assert sum(sizes) == 20
    assert all(sum(sizes[: i + 1]) in (4, 8, 10, 14, 18, 20) for i in range(len(sizes)))
