"""Tensors that stay with their producer: by gloo between processes here, by CUDA IPC and NCCL where there are GPUs."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from rlinf_plugins.core.errors import ConfigError, ItemLostError, ItemTooLargeError
from rlinf_plugins.scheduler.channel import Channel, ChannelConfig, Granularity, JournalConfig, Put
from rlinf_plugins.scheduler.channel.peers import GLOO, IPC, NCCL, choose

DIRECT = {"direct": ("cpu",)}


@pytest.fixture
def make():
    made = []

    def build(**options):
        made.append(Channel.local("direct", ChannelConfig(**{**DIRECT, **options})))
        return made[-1]

    yield build
    for channel in made:
        channel.destroy()


def shelf_of(producer):
    return producer._shelf


def held(producer, count):
    """Wait until the producer holds so many tensors; it is told by its own thread."""
    end = time.monotonic() + 30
    while len(shelf_of(producer)) != count:
        assert time.monotonic() < end, f"{len(shelf_of(producer))} held"
        time.sleep(0.005)


def test_a_nested_item_arrives_whole_and_is_let_go_when_it_is_committed(make):
    channel = make()
    producer, consumer = channel.producer(), channel.consumer()
    whole = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    leaf = torch.ones(5, requires_grad=True)
    producer.put(
        {"a": whole.t(), "b": [leaf, "text"], "c": torch.nn.Parameter(torch.ones(2)), "d": torch.empty(0), "e": whole}
    )
    whole += 1  # the item is what was put
    held(producer, 4)
    delivery = consumer.get(timeout=30)
    value = delivery.value
    assert torch.equal(value["a"], torch.arange(12, dtype=torch.bfloat16).view(3, 4).t())
    assert torch.equal(value["b"][0], torch.ones(5))
    assert value["b"][0].requires_grad
    assert value["b"][1] == "text"
    assert isinstance(value["c"], torch.nn.Parameter)
    assert value["d"].shape == (0,)
    assert torch.equal(value["e"], value["a"].t())
    held(producer, 4)
    delivery.ack()
    held(producer, 0)


def test_what_comes_back_can_be_fetched_again(make):
    channel = make()
    producer, first, second = channel.producer(), channel.consumer("first"), channel.consumer("second")
    producer.put_many([Put(torch.full((4,), float(i))) for i in range(6)])
    assert [d.value[0].item() for d in (first.get(), first.get())] == [0, 1]
    first.detach()
    batch = second.get_batch(6, timeout=30)
    assert [value[0].item() for value in batch.values] == [0, 1, 2, 3, 4, 5]
    batch.ack()
    held(producer, 0)


def test_threads_of_one_consumer_get_their_own(make):
    channel = make()
    producer, consumer = channel.producer(), channel.consumer()
    for i in range(40):
        producer.put((i, torch.full((1000,), float(i))))
    wrong = []

    def take():
        for _ in range(10):
            with consumer.get(timeout=30) as delivery:
                number, tensor = delivery.value
                wrong.extend([number] if tensor.unique().tolist() != [number] else [])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    producer.detach()
    assert channel.stats()["committed"] == 40


def test_their_bytes_count_against_the_bound(make):
    channel = make(max_bytes=10_000)
    producer = channel.producer()
    with pytest.raises(ItemTooLargeError, match=r"\d{5} bytes.*max_bytes=10000"):
        producer.put(torch.zeros(20_000, dtype=torch.uint8))
    assert len(shelf_of(producer)) == 0
    producer.put(torch.zeros(6000, dtype=torch.uint8))
    assert channel.stats()["bytes"] > 6000


def test_items_of_a_producer_that_is_gone_are_set_aside_and_the_others_delivered(make):
    channel = make(lease_seconds=0.5, granularity=Granularity.micro_batch(3))
    gone, stays = channel.producer("gone"), channel.producer("stays")
    gone.put(torch.ones(3))
    stays.put_many([Put(torch.full((3,), 2.0)), Put("plain")])
    gone._heart.remove(gone.attached.handle)
    consumer = channel.consumer()
    end = time.monotonic() + 30
    while not any(report.kind == "producer-lost" for report in channel.reports()):
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(ItemLostError, match="gone"):
        consumer.get_batch(3, timeout=30)
    channel.close()
    (batch,) = list(consumer)
    assert torch.equal(batch.values[0], torch.full((3,), 2.0))
    assert batch.values[1] == "plain"
    assert [row.producer for row, _ in channel.dead_letters()] == ["gone"]


def test_a_journal_cannot_be_asked_to_keep_them(tmp_path):
    with pytest.raises(ConfigError, match="journal"):
        Channel.local("x", ChannelConfig(journal=JournalConfig(directory=str(tmp_path)), **DIRECT))
    with pytest.raises(ConfigError, match="'tpu'"):
        Channel.local("x", ChannelConfig(direct=("tpu",)))


@pytest.mark.parametrize(
    ("device", "same_node", "here", "way"),
    [
        ("", True, ["GPU-a"], GLOO),
        ("GPU-a", True, [], GLOO),
        ("GPU-a", True, ["GPU-b", "GPU-a"], IPC),
        ("GPU-a", True, ["GPU-b"], NCCL),
        ("GPU-a", False, ["GPU-a"], NCCL),
    ],
)
def test_the_way_follows_from_where_the_ends_are(monkeypatch, device, same_node, here, way):
    from rlinf_plugins.scheduler.channel import peers

    monkeypatch.setattr(peers, "_has_gpu", lambda: bool(here))
    monkeypatch.setattr(peers, "_local_index", lambda uuid: here.index(uuid) if uuid in here else None)
    assert choose(device, same_node) == way


@pytest.mark.slow
@pytest.mark.ray
def test_between_processes_and_when_the_producer_is_killed(ray_session):
    class Maker:
        def put(self, channel, count):
            self.producer = channel.producer("maker")
            for i in range(count):
                self.producer.put((i, torch.full((1 << 16,), float(i))))
            return os.getpid()

    class Taker:
        def take(self, channel, count):
            consumer, found = channel.consumer("taker"), []
            for _ in range(count):
                with consumer.get(timeout=120) as delivery:
                    number, tensor = delivery.value
                    found.append((number, tensor.unique().tolist()))
            return found

    channel = Channel.create("direct-ray", ChannelConfig(lease_seconds=2.0, **DIRECT))
    maker, taker = (ray_session.remote(kind).options(num_cpus=0).remote() for kind in (Maker, Taker))
    pid = ray_session.get(maker.put.remote(channel, 8))
    assert ray_session.get(taker.take.remote(channel, 5)) == [(i, [float(i)]) for i in range(5)]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ItemLostError):
        channel.consumer("late").get(timeout=60)
    channel.destroy()


def _gpus(count):
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")


@pytest.mark.gpu
@_gpus(1)
def test_on_one_device_by_ipc(ray_session):
    _on_devices(ray_session, "cuda:0", "cuda:0")


@pytest.mark.gpu
@_gpus(2)
def test_between_devices_by_nccl(ray_session):
    _on_devices(ray_session, "cuda:0", "cuda:1")


def _on_devices(ray_session, there, here):
    channel = Channel.create(f"direct-{here[-1]}", ChannelConfig(direct=("cuda",)))
    address = ray_session.get_runtime_context().gcs_address
    command = [sys.executable, str(Path(__file__).with_name("direct_taker.py")), address, channel.name, here, "4"]
    taker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    producer = channel.producer()
    for i in range(4):
        producer.put((i, torch.full((1 << 16,), float(i), device=there)))
    output, _ = taker.communicate(timeout=120)
    assert output.splitlines() == [f"{i} [{float(i)}] {here}" for i in range(4)]
    producer.detach()
    channel.destroy()
