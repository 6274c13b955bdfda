"""What travels: nested objects, tensors and rows, without pickling their buffers and without sharing by mistake."""

import gc
import os
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlinf_plugins.core.errors import ChannelError, ItemTooLargeError, UndecodableItemError, UnserialisableItemError
from rlinf_plugins.scheduler.channel import Channel, codec, segments
from rlinf_plugins.scheduler.channel.config import ChannelConfig
from rlinf_plugins.scheduler.channel.files import Files
from rlinf_plugins.scheduler.channel.model import Entry
from rlinf_plugins.scheduler.channel.payload import Inline, Packer, Relayed, Rows, Segment, Unpacker
from rlinf_plugins.scheduler.channel.rows import gather, length


@pytest.fixture
def ends(tmp_path):
    """A packer and an unpacker that share a folder."""

    def make(inline=100, transport="auto"):
        return Packer(str(tmp_path), "p", inline, transport, False), Unpacker(str(tmp_path))

    return make


def same(a, b):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            same(left, right)
    else:
        assert a == b


VALUES = {
    "none": None,
    "text": "x" * 5000,
    "nested": {"a": [torch.arange(100), (np.arange(50.0), {"b": torch.randn(3, 4)})], "c": "text", "n": np.float32(2)},
    "bfloat16": torch.randn(7, 3).bfloat16(),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(4, dtype=torch.complex64),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 5, dtype=torch.int16),
    "float8": torch.randn(16).to(torch.float8_e4m3fn).view(torch.uint8),
    "transposed": torch.arange(20).view(4, 5).t(),
    "strided": torch.arange(20)[::3],
    "conjugate": torch.randn(3, dtype=torch.complex64).conj().resolve_conj(),
    "many": [torch.full((10,), i) for i in range(300)],
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("transport", ["inline", "segment", "relay"])
def test_a_value_arrives_as_it_was(ends, name, transport):
    packer, unpacker = ends(inline=100, transport=transport)
    wire, size = packer.pack(VALUES[name])
    assert size > 0
    same(VALUES[name], unpacker.unpack(pickle.loads(pickle.dumps(wire))))


def test_buffers_are_not_in_the_pickle(ends):
    packer, _ = ends()
    value = {"weights": [torch.zeros(1000, 100) for _ in range(20)], "image": np.zeros((224, 224, 3), np.uint8)}
    wire, size = packer.pack(value)
    assert isinstance(wire, Segment)
    assert size > 8_000_000
    assert len(pickle.dumps(wire)) < 8_000
    assert len(wire.layout) == 22, "one per buffer, and the head"


def test_tensordict_with_ragged_and_nested_parts(ends):
    packer, unpacker = ends()
    ragged = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    batch = TensorDict({"ids": ragged, "more": TensorDict({"x": torch.randn(2, 3)}, [2])}, [2])
    back = unpacker.unpack(packer.pack(batch)[0])
    assert back.batch_size == batch.batch_size
    same(list(ragged.unbind()), list(back["ids"].unbind()))
    same(batch["more", "x"], back["more", "x"])


def test_gradients_and_parameters(ends):
    packer, unpacker = ends()
    leaf = torch.ones(100, requires_grad=True)
    value = {"leaf": leaf, "made": leaf * 2, "parameter": torch.nn.Parameter(torch.ones(50))}
    back = unpacker.unpack(packer.pack(value)[0])
    assert back["leaf"].requires_grad
    assert not back["made"].requires_grad, "a graph does not travel"
    assert isinstance(back["parameter"], torch.nn.Parameter)


def test_readers_may_write_without_others_seeing_it(ends):
    packer, unpacker = ends()
    wire, _ = packer.pack(torch.zeros(1000))
    first, second = unpacker.unpack(wire), unpacker.unpack(wire)
    first += 1
    assert second.sum() == 0
    assert unpacker.unpack(wire).sum() == 0
    wire, _ = packer.pack(np.zeros(1000))
    array = unpacker.unpack(wire)
    array += 1
    assert unpacker.unpack(wire).sum() == 0


def test_a_value_outlives_its_file(ends, tmp_path):
    packer, unpacker = ends()
    wire, _ = packer.pack(torch.arange(100_000))
    value = unpacker.unpack(wire)
    os.unlink(tmp_path / wire.name)
    gc.collect()
    assert torch.equal(value, torch.arange(100_000))


def test_the_sender_may_change_its_tensor_afterwards(ends):
    packer, unpacker = ends()
    for size in (5, 100_000):
        value = torch.zeros(size)
        wire, _ = packer.pack(value)
        value += 1
        assert unpacker.unpack(wire).sum() == 0


def test_classes_of_main_travel_by_value():
    namespace = {"__name__": "__main__"}
    exec("class Local:\n    def __init__(self, x): self.x = x\n", namespace)
    head, buffers = codec.encode({"here": namespace["Local"](torch.zeros(100)), "function": lambda x: x + 1})
    assert len(buffers) == 1
    back = codec.decode(head, [bytearray(b) for b in buffers])
    assert back["function"](1) == 2
    assert back["here"].x.shape == (100,)


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(UnserialisableItemError, match=r"type dict .*generator"):
        codec.encode({"a": (i for i in range(3))})


def test_what_cannot_be_rebuilt_is_named():
    with pytest.raises(UndecodableItemError, match="ModuleNotFoundError"):
        codec.decode(b"cno_such_module\nThing\n.")


def test_a_full_file_system_is_an_error_with_the_numbers(tmp_path, monkeypatch):
    def full(file, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(ChannelError, match=r"no space for an item of 1024 bytes"):
        segments.write(str(tmp_path / "s"), [bytes(1000)])
    assert not (tmp_path / "s").exists()


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: real(file, [parts[0][:7]]))
    buffers = [bytes(range(200)), b"", bytes(range(100))]
    layout = segments.write(str(tmp_path / "s"), buffers)
    assert [bytes(b) for b in segments.read(str(tmp_path / "s"), layout)] == buffers


def test_more_buffers_than_one_call_takes(tmp_path):
    buffers = [os.urandom(10) for _ in range(3000)]
    layout = segments.write(str(tmp_path / "s"), buffers)
    assert [bytes(b) for b in segments.read(str(tmp_path / "s"), layout)] == buffers
    assert all(offset % segments.ALIGN == 0 for offset, _ in layout)


def test_folders_of_dead_brokers_are_removed(tmp_path):
    mine = tmp_path / f"rlinf-channel-{os.getpid()}-{segments._started(os.getpid())}-mine-1"
    dead = tmp_path / "rlinf-channel-999999999-1-dead-1"
    reused = tmp_path / f"rlinf-channel-{os.getpid()}-1-reused-1"
    for path in (mine, dead, reused):
        path.mkdir()
        (path / "0-0").write_bytes(b"x")
    assert sorted(segments.sweep(tmp_path)) == sorted([dead.name, reused.name])
    assert mine.exists()


# --- rows -------------------------------------------------------------------------------------------------------


def test_rows_of_one_batch_that_stay_together_are_a_view():
    batch = {"x": torch.arange(20).view(10, 2), "y": np.arange(10), "z": [str(i) for i in range(10)]}
    merged = gather([("s", i, batch) for i in range(3, 7)])
    assert merged["x"].data_ptr() == batch["x"][3:].data_ptr()
    assert merged["y"].base is not None
    assert merged["z"] == ["3", "4", "5", "6"]


def test_rows_of_several_batches_are_joined_in_order():
    one, two = ({"x": torch.arange(4) + base, "y": [base] * 4} for base in (0, 100))
    merged = gather([("1", 2, one), ("1", 3, one), ("2", 0, two), ("1", 0, one)])
    assert merged["x"].tolist() == [2, 3, 100, 0]
    assert merged["y"] == [0, 0, 100, 0]


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"one length.*'x': 3, 'y': 4"):
        length({"x": torch.zeros(3), "y": [0] * 4})


def test_a_segment_lives_as_long_as_one_of_its_rows(tmp_path):
    files = Files(str(tmp_path), ChannelConfig(inline_bytes=10))
    (tmp_path / "s").write_bytes(b"x")
    segment = Segment("s", b"", ((0, 1),))
    for row in range(3):
        assert (tmp_path / "s").exists()
        files.release(Rows(segment, row, 3))
    assert not (tmp_path / "s").exists()


def test_what_was_packed_and_can_never_fit_leaves_no_file(tmp_path):
    channel = Channel.local("tight", ChannelConfig(max_bytes=10_000, inline_bytes=10))
    producer = channel.producer()
    for put in (lambda: producer.put(bytes(20_000)), lambda: producer.put_rows({"x": np.zeros((1, 20_000))})):
        with pytest.raises(ItemTooLargeError):
            put()
    assert os.listdir(producer.attached.directory) == []
    channel.destroy()


def test_rows_that_come_over_the_network_are_stored_once(tmp_path):
    files = Files(str(tmp_path), ChannelConfig(inline_bytes=10))
    relayed = Relayed(b"head", (bytes(100),))
    landed = files.land([Entry("k", Rows(relayed, i, 2)) for i in range(2)])
    assert landed[0].payload.batch is landed[1].payload.batch
    assert isinstance(landed[0].payload.batch, Segment)
    assert len(list(tmp_path.iterdir())) == 1


def test_small_items_stay_in_the_message(ends):
    packer, _ = ends(inline=1000)
    assert type(packer.pack({"reward": 1.0})[0]) is bytes
    assert type(packer.pack(torch.zeros(5))[0]) is Inline
