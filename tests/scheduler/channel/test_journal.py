"""Durability: a channel made from a journal promises what the one before did."""

import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from rlinf_plugins.core.clock import ManualClock
from rlinf_plugins.core.errors import JournalError, StaleDeliveryError
from rlinf_plugins.scheduler.channel import Channel, ChannelConfig, Granularity, JournalConfig, Put
from rlinf_plugins.scheduler.channel.core import ChannelCore
from rlinf_plugins.scheduler.channel.journal import Journal
from rlinf_plugins.scheduler.channel.model import Entry, Request
from rlinf_plugins.scheduler.channel.recovery import held_items


@pytest.fixture
def config(tmp_path):
    return ChannelConfig(journal=JournalConfig(directory=str(tmp_path / "journal")), inline_bytes=1000)


def reopen(config, clock=None):
    journal = Journal(config.journal)
    core = ChannelCore("j", config, clock or ManualClock(), journal.append, journal.incarnation)
    journal.recover(core)
    return journal, core


def test_what_was_not_committed_is_there_after_a_restart(config):
    first = Channel.local("j", config)
    producer, consumer = first.producer("p"), first.consumer("c")
    producer.put_many([Put(index) for index in range(5)])
    producer.put(torch.arange(10_000), key="big", version=3)
    with consumer.get_batch(2):
        pass
    held = consumer.get()
    first.set_version(4)
    first.destroy()
    second = Channel.local("j", config)
    consumer = second.consumer("c")
    assert consumer.get_batch(3).values == [2, 3, 4], "what was on lease is delivered again"
    assert torch.equal(consumer.get(key="big").value, torch.arange(10_000))
    assert second.stats()["version"] == 4
    with pytest.raises(StaleDeliveryError):
        consumer.ack(held)
    second.destroy()


def test_a_put_whose_answer_was_lost_is_not_admitted_twice(config):
    journal, core = reopen(config)
    producer = core.attach_producer("p")
    core.put(1, producer.handle, 0, [Entry("k", b"a"), Entry("k", b"b")])
    journal.commit(core)
    journal.close()
    journal, core = reopen(config)
    again = core.attach_producer("p", resume=0)
    assert (again.epoch, again.claimed) == (0, 2)
    core.put(1, again.handle, 0, [Entry("k", b"a"), Entry("k", b"b"), Entry("k", b"c")])
    assert [item.payload for item in held_items(core)] == [b"a", b"b", b"c"]
    assert core.attach_producer("p").epoch == 1, "without resuming it is another producer"
    journal.close()


def test_an_acknowledgement_whose_answer_was_lost_counts(config):
    journal, core = reopen(config)
    producer, consumer = core.attach_producer("p"), core.attach_consumer("c")
    core.put(1, producer.handle, 0, [Entry("k", b"a")])
    core.get(2, consumer.handle, Request("k", 1, 1))
    number = core.state.replies[-1][1].number
    core.ack(consumer.handle, [(number, None)])
    journal.commit(core)
    journal.close()
    journal, core = reopen(config)
    assert core.ack(core.attach_consumer("c").handle, [(number, None)]) == {}
    assert core.ack(core.attach_consumer("d").handle, [(number + 1, None)])
    journal.close()


def test_groups_and_failures_survive(config):
    config = replace(config, granularity=Granularity.group())
    journal, core = reopen(config)
    producer = core.attach_producer("p")
    core.put(1, producer.handle, 0, [Entry("k", b"a", group=("g", 3)), Entry("k", b"", group=("g", 3), failure="x")])
    journal.commit(core)
    journal.close()
    journal, core = reopen(config)
    producer, consumer = core.attach_producer("p", resume=0), core.attach_consumer("c")
    core.get(2, consumer.handle, Request("k", 1))
    core.put(3, producer.handle, 2, [Entry("k", b"b", group=("g", 3))])
    (unit,) = dict(core.state.replies)[2].units
    assert [item.payload for item in unit.items] == [b"a", b"b"]
    assert [failure.reason for failure in unit.failed] == ["x"]
    core.ack(consumer.handle, [(dict(core.state.replies)[2].number, None)])
    journal.commit(core)
    journal.close()
    journal, core = reopen(config)
    assert not core.state.queues, "failures are forgotten with their group"
    journal.close()


@pytest.mark.parametrize("cut", [1, 7, 9, 30])
def test_a_torn_tail_is_cut_off(config, cut):
    journal, core = reopen(config)
    producer = core.attach_producer("p")
    core.put(1, producer.handle, 0, [Entry("k", b"whole")])
    journal.commit(core)
    size = os.path.getsize(journal._path)
    core.put(2, producer.handle, 1, [Entry("k", b"torn")])
    journal.commit(core)
    journal.close()
    os.truncate(journal._path, size + cut)
    journal, core = reopen(config)
    assert [item.payload for item in held_items(core)] == [b"whole"]
    core.put(3, core.attach_producer("p", resume=0).handle, 1, [Entry("k", b"again")])
    journal.commit(core)
    journal.close()
    _, core = reopen(config)
    assert [item.payload for item in held_items(core)] == [b"whole", b"again"]


def test_a_flipped_bit_ends_the_journal_there(config):
    journal, core = reopen(config)
    producer = core.attach_producer("p")
    for index in range(2):
        core.put(index, producer.handle, index, [Entry("k", b"payload%d" % index)])
        journal.commit(core)
    journal.close()
    data = bytearray(journal._path.read_bytes())
    data[data.index(b"payload1")] ^= 1
    journal._path.write_bytes(data)
    _, core = reopen(config)
    assert [item.payload for item in held_items(core)] == [b"payload0"]


def test_the_file_is_rewritten_when_most_of_it_is_obsolete(config):
    config = replace(config, journal=replace(config.journal, compact_bytes=5000))
    journal, core = reopen(config)
    producer, consumer = core.attach_producer("p"), core.attach_consumer("c")
    for index in range(500):
        core.put(index, producer.handle, index, [Entry("k", b"x" * 20)])
        if index % 100:
            core.get(1000 + index, consumer.handle, Request("k", index, 1))
            core.ack(consumer.handle, [(core.state.replies[-1][1].number, None)])
        journal.commit(core)
    # The numbers of deliveries that were acknowledged are kept for a while, so it does not shrink to nothing.
    assert os.path.getsize(journal._path) < 60_000
    held = [item.identity for item in held_items(core)]
    journal.close()
    _, core = reopen(config)
    assert [item.identity for item in held_items(core)] == held
    assert core.attach_producer("p", resume=0).claimed == 500


def test_two_brokers_cannot_share_a_journal(config):
    journal, _ = reopen(config)
    with pytest.raises(JournalError, match="in use"):
        Journal(config.journal)
    journal.close()


def test_another_file_is_not_taken_for_a_journal(config):
    os.makedirs(config.journal.directory)
    with open(os.path.join(config.journal.directory, "journal"), "w") as file:
        file.write("somebody's notes, which must not be overwritten")
    with pytest.raises(JournalError, match="not a channel's journal"):
        Journal(config.journal)


def test_segments_without_an_item_are_removed(config):
    channel = Channel.local("j", config)
    channel.producer("p").put(bytes(5000))
    directory = channel.producer("q").attached.directory
    with open(os.path.join(directory, "99-0"), "wb") as file:
        file.write(b"written by a producer that died before it put the item")
    channel.destroy()
    again = Channel.local("j", config)
    assert len(os.listdir(directory)) == 1
    assert again.consumer().get().value == bytes(5000)
    again.destroy()


WRITER = """
import sys
from rlinf_plugins.scheduler.channel import Channel, ChannelConfig, JournalConfig
channel = Channel.local("j", ChannelConfig(journal=JournalConfig(directory=sys.argv[1], sync="disk"), max_items=10**6))
producer = channel.producer("p")
for index in range(10**6):
    producer.put(index)
    print(index, flush=True)
"""


@pytest.mark.slow
def test_everything_confirmed_before_a_kill_is_there(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    confirmed = -1
    for line in process.stdout:
        confirmed = int(line)
        if confirmed == 300:
            process.send_signal(signal.SIGKILL)
    process.wait()
    journal = Journal(JournalConfig(directory=str(tmp_path)))
    core = ChannelCore("j", ChannelConfig(), ManualClock(), journal.append, 1)
    journal.recover(core)
    values = [pickle.loads(item.payload) for item in held_items(core)]
    assert values == list(range(len(values)))
    assert len(values) > confirmed
