from types import SimpleNamespace

import pytest

from rlinf_verl.trainer.updates import StreamedUpdate


class Group:
    """Records what a worker group is asked to do."""

    def __init__(self):
        self.calls = []

    def begin_mini_batch(self):
        self.calls.append("begin")

    def accumulate(self, chunk):
        assert chunk.extra_info == {"temperature": 1.0}
        self.calls.append(chunk.name)

    def apply_gradients(self, denominator, rows, last):
        self.calls.append(("apply", denominator, rows, last))
        return [{}, {"grad_norm": 1.0}]


class Chunk(SimpleNamespace):
    def __len__(self):
        return 4


def chunk(name):
    return Chunk(name=name, extra_info={})


def update(group, **options):
    settings = {"mini_batches": 1, "epochs": 1, "denominator": "tokens", "settings": {"temperature": 1.0}}
    return StreamedUpdate(group, **{**settings, **options})


def test_the_first_mini_batch_is_summed_as_it_comes_and_the_others_after_everything_is_there():
    group = Group()
    streamed = update(group, mini_batches=2)
    assert [streamed.add(*part) for part in ((0, chunk("a")), (1, chunk("b")), (0, chunk("c")))] == [True, False, True]
    assert group.calls == ["begin", "a", "c"]
    assert streamed.streamed_rows == 8
    assert streamed.finish(16) == [{"grad_norm": 1.0}] * 2
    assert group.calls[3:] == [("apply", "tokens", 16, False), "begin", "b", ("apply", "tokens", 16, True)]


def test_only_the_first_epoch_is_streamed():
    group = Group()
    streamed = update(group, epochs=2)
    streamed.add(0, chunk("a"))
    streamed.finish(4)
    apply = ("apply", "tokens", 4)
    assert group.calls == ["begin", "a", (*apply, False), "begin", "a", (*apply, True)]


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_mini_batch_whose_rollouts_all_failed_still_takes_its_place(mini_batches):
    group = Group()
    assert len(update(group, mini_batches=mini_batches).finish(4)) == mini_batches
    assert [call for call in group.calls if call == "begin"] == ["begin"] * mini_batches
