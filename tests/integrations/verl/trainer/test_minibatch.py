import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rlinf_verl.trainer.minibatch import rows_per_update, sized_for


@given(st.integers(1, 5000), st.integers(1, 16), st.integers(1, 64))
def test_the_updates_hold_all_rows_with_less_than_a_multiple_each_to_spare(rows, updates, multiple):
    share = rows_per_update(rows, updates=updates, multiple=multiple)
    assert share % multiple == 0
    assert share * updates >= rows
    assert (share - multiple) * updates < rows


def job(mini=2, micro=8, critic=False, dynamic=False):
    return OmegaConf.create(
        {
            "data": {"train_batch_size": 4},
            "critic": {"enable": critic},
            "actor_rollout_ref": {
                "actor": {
                    "ppo_mini_batch_size": mini,
                    "ppo_micro_batch_size_per_gpu": micro,
                    "use_dynamic_bsz": dynamic,
                },
                "rollout": {"n": 4},
            },
        }
    )


def rows_seen(config, rows, devices=1):
    actor = config.actor_rollout_ref.actor
    before = actor.ppo_mini_batch_size
    with sized_for(config, rows, devices):
        seen = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    assert actor.ppo_mini_batch_size == before
    return seen


@pytest.mark.parametrize(
    ("rows", "options", "devices", "expected"),
    [
        (16, {}, 1, 8),  # one row a trajectory: as veRL counts
        (10, {}, 1, 8),  # failed trajectories: likewise
        (400, {}, 1, 200),  # 25 rows a trajectory, still two updates
        (401, {}, 1, 208),
        (400, {"mini": 4}, 1, 400),
        (400, {}, 3, 216),  # whole micro-batches on every device
        (401, {"dynamic": True}, 1, 204),
        (400, {"critic": True}, 1, 8),
    ],
)
def test_rows_of_a_mini_batch(rows, options, devices, expected):
    assert rows_seen(job(**options), rows, devices) == expected


def test_the_size_is_restored_after_an_error():
    config = job()
    with pytest.raises(OSError, match="boom"), sized_for(config, 400, 1):
        raise OSError("boom")
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 2
