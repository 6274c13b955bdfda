"""Whole embodied jobs through veRL's own command: policy server, environments, engine and trainer together."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1300)]

PATCH = "{factory: 'rlinf_plugins.testing.patch_env:PatchFactory', kwargs: {places: 1}}"


@pytest.fixture(scope="module")
def embodied(tmp_path_factory) -> Path:
    """A folder with a policy of one action of two numbers, eight bins each."""
    from rlinf_plugins.models.openvla import ActionSpec, TinySizes, make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("embodied")
    sizes = TinySizes(
        vision_dims=(32, 32), vision_heads=(2, 2), patch_size=56, hidden=64, intermediate=128, action_bins=8
    )
    spec = ActionSpec(decoding="parallel", chunk=1, dim=2)
    make_tiny_checkpoint(folder / "model", variant="openvla-oft", seed=0, sizes=sizes, spec=spec)
    return folder


def overrides(folder: Path, *more: str) -> list[str]:
    return [
        "+recipe=openvla_maniskill_grpo_tiny",
        "trainer.v1.trainer_mode=m2flow",
        "~trainer.v1.m2flow.envs",
        f"+trainer.v1.m2flow.envs={PATCH}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.resume_mode=auto",
        "data.train_files={tasks: [0], trials: 2, source: patch}",
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.actor.optim.lr=2.0e-3",
        *more,
    ]


def test_a_policy_learns_to_look_and_resumes(embodied, run_verl):
    """GRPO from pixels: better than any policy that does not look, then two more steps from the checkpoint."""
    job = overrides(embodied, "trainer.total_training_steps=24", "trainer.save_freq=24")
    first = run_verl(embodied, "learn", *job, timeout=800)
    assert first.returncode == 0, first.tail()
    returns = [step["critic/score/mean"] for step in first.metrics]
    assert len(returns) == 24
    assert returns[0] < 0.6
    assert max(returns[-8:]) > 0.9, returns
    assert all(step["training/rollout_probs_diff_max"] < 1e-5 for step in first.metrics)
    assert all(step["training/off_policy/trajectory_staleness/max"] == 0 for step in first.metrics)

    again = run_verl(embodied, "resume", *overrides(embodied, "trainer.total_training_steps=26"))
    assert again.returncode == 0, again.tail()
    assert [step["training/global_step"] for step in again.metrics] == [25, 26]
    assert again.metrics[0]["critic/score/mean"] > 0.7, json.dumps(again.metrics[0])
