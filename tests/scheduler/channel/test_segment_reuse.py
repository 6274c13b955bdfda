"""Files of shared memory that are written again: only when nobody reads them, and nobody may notice."""

import gc
import os
import random
from pathlib import Path

import pytest
import torch

from rlinf_plugins.scheduler.channel import Channel, ChannelConfig, segments

SIZE = 2 << 20


def free(path, name):
    """Do as the broker does when an item was committed."""
    (path / segments.FREE).mkdir(exist_ok=True)
    os.rename(path / name, path / segments.FREE / name)


def write(path, name, fill, size=SIZE):
    return segments.write(str(path / name), [bytes([fill]) * size])


def test_a_free_file_is_written_again(tmp_path):
    write(tmp_path, "a", 1)
    inode = (tmp_path / "a").stat().st_ino
    free(tmp_path, "a")
    layout = write(tmp_path, "b", 2, SIZE - 1000)
    assert (tmp_path / "b").stat().st_ino == inode
    (back,) = segments.read(str(tmp_path / "b"), layout)
    assert bytes(back) == bytes([2]) * (SIZE - 1000)
    assert (tmp_path / "b").stat().st_size < SIZE, "nothing of the earlier item stays behind"


def test_a_file_that_is_mapped_is_not(tmp_path):
    layout = write(tmp_path, "a", 1)
    mapped = segments.read(str(tmp_path / "a"), layout)
    inode = (tmp_path / "a").stat().st_ino
    free(tmp_path, "a")
    write(tmp_path, "b", 2)
    assert (tmp_path / "b").stat().st_ino != inode
    assert bytes(mapped[0]) == bytes([1]) * SIZE
    del mapped
    gc.collect()
    write(tmp_path, "c", 3)
    assert (tmp_path / "c").stat().st_ino == inode


def test_files_of_another_size_are_left(tmp_path):
    write(tmp_path, "a", 1)
    free(tmp_path, "a")
    write(tmp_path, "small", 2, SIZE // 4)
    write(tmp_path, "large", 2, SIZE * 4)
    assert os.listdir(tmp_path / segments.FREE) == ["a"]


@pytest.mark.parametrize("again", [False, True])
def test_a_reader_that_comes_too_late_is_told(tmp_path, monkeypatch, again):
    """Between opening and locking, the item is committed, and perhaps its file is written again."""
    layout = write(tmp_path, "a", 1)
    real = os.open

    def slow_open(path, flags, *mode):
        file = real(path, flags, *mode)
        if path == str(tmp_path / "a"):
            monkeypatch.setattr(os, "open", real)
            free(tmp_path, "a")
            if again:
                write(tmp_path, "b", 2)
        return file

    monkeypatch.setattr(os, "open", slow_open)
    with pytest.raises(FileNotFoundError):
        segments.read(str(tmp_path / "a"), layout)


def test_free_files_give_way_when_there_is_no_space(tmp_path, monkeypatch):
    write(tmp_path, "a", 1)
    free(tmp_path, "a")
    real = os.writev

    def full(file, parts):
        if os.listdir(tmp_path / segments.FREE):
            raise OSError(28, "No space left on device")
        return real(file, parts)

    monkeypatch.setattr(os, "writev", full)
    write(tmp_path, "b", 2, SIZE * 4)
    assert (tmp_path / "b").stat().st_size == SIZE * 4


def test_nobody_notices(seed):
    """Values are kept for a while after they were acknowledged, and changed; each keeps what it had."""
    rng = random.Random(seed)
    channel = Channel.local("reuse", ChannelConfig(max_bytes=64 << 20))
    folder = Path(channel._call("directory"))
    try:
        producer, consumer = channel.producer(), channel.consumer()
        kept, inodes = [], set()
        for number in range(150):
            producer.put(torch.full((rng.randrange(SIZE, 2 * SIZE),), number % 251, dtype=torch.uint8))
            inodes |= {path.stat().st_ino for path in folder.iterdir() if path.is_file()}
            with consumer.get(timeout=60) as delivery:
                kept.append((delivery.value, number % 251))
            del delivery
            if rng.random() < 0.3:
                kept[-1][0][:] = 251
                kept[-1] = (kept[-1][0], 251)
            while len(kept) > rng.randrange(6):
                value, expected = kept.pop(rng.randrange(len(kept)))
                assert bool((value == expected).all())
                del value
        assert len(inodes) < 75, "files were used again"
        spare = sum(path.stat().st_size for path in (folder / segments.FREE).iterdir())
        assert spare <= 16 << 20
    finally:
        channel.destroy()
    assert not folder.exists()
