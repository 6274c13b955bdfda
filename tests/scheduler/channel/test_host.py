"""The host of a channel: what it tells of its calls."""

from rlinf_plugins.scheduler.channel import Channel, ChannelConfig, Put


def test_every_call_is_a_span_with_the_items_it_moved():
    channel = Channel.local("traced", ChannelConfig(trace=True))
    producer, consumer = channel.producer(), channel.consumer()
    producer.put_many([Put(1), Put(2), Put(3)])
    consumer.get_batch(2).ack()
    spans = {span.name: span for span in channel.spans()}
    assert spans["put"].attributes == {"items": 3}
    assert spans["get"].attributes == {"items": 2}
    assert spans["ack"].attributes == {}
    assert spans["put"].actor == "channel/traced"
    assert 0 < spans["put"].start <= spans["put"].end <= spans["get"].end
    assert [span.name for span in channel.spans()] == ["spans"], "each is told once"
    channel.destroy()


def test_nothing_is_traced_unless_asked():
    channel = Channel.local("untraced")
    channel.producer().put(1)
    assert channel.spans() == []
    channel.destroy()
