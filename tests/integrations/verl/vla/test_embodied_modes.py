"""An embodied job whose policy server has a device of its own takes the steps of one that shares it."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

JOB = [
    "+recipe=openvla_maniskill_grpo_tiny",
    "trainer.v1.trainer_mode=m2flow",
    "~trainer.v1.m2flow.envs",
    "+trainer.v1.m2flow.envs={factory: 'rlinf_plugins.testing.reach_env:ReachFactory', kwargs: {steps: 1}}",
    "actor_rollout_ref.model.path=model",
    "data.train_files={tasks: [0], trials: 4, source: reach}",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    # With Adam's usual 1e-8 a gradient of rounding errors alone moves a parameter by the whole learning rate, and a
    # random policy's vision blocks have no larger ones.
    "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-4",
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.resume_mode=disable",
    # An episode is one row here. veRL's recorder keeps one row of a trajectory, so longer ones would be cut.
    "skip.rollout_tq.enable=true",
    "skip.rollout_tq.dump_dir=recorded",
    "skip.rollout_tq.steps=[1,2]",
]
APART = [
    "trainer.v1.m2flow.mode=spatial",
    "trainer.v1.m2flow.granularity=1",
    "trainer.v1.m2flow.virtual_devices.count=2",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
]


def test_apart_and_streaming_it_takes_the_same_steps(tmp_path, run_verl, read_actor, largest_relative_difference):
    from rlinf_plugins.models.openvla import ActionSpec, TinySizes, make_tiny_checkpoint

    spec = ActionSpec(decoding="parallel", chunk=1, dim=2)
    make_tiny_checkpoint(tmp_path / "model", variant="openvla-oft", seed=0, sizes=TinySizes.learner(), spec=spec)
    jobs = {
        name: run_verl(tmp_path, name, *JOB, f"trainer.default_local_dir={name}-checkpoints", *more)
        for name, more in {"together": [], "apart": APART}.items()
    }
    for job in jobs.values():
        assert job.returncode == 0, job.tail()
        assert [step["training/rollout_failure/count"] for step in job.metrics] == [0, 0]
    assert [step["m2flow/streamed_share"] for step in jobs["apart"].metrics] == [1.0, 1.0]
    for step in (1, 2):
        ours, theirs = (read_actor(tmp_path / f"{name}-checkpoints", step) for name in ("apart", "together"))
        assert largest_relative_difference(ours, theirs) <= 1e-5, f"step {step}"
    first, second = (read_actor(tmp_path / "together-checkpoints", step) for step in (1, 2))
    assert largest_relative_difference(first, second) > 1e-3, "the steps changed nothing, so equality proves nothing"
    for name in ("critic/score/mean", "actor/grad_norm", "actor/entropy"):
        ours, theirs = ([step[name] for step in jobs[job].metrics] for job in ("apart", "together"))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7), name
