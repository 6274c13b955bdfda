"""A whole veRL job with memory for everybody and with memory for one at a time: the same steps, other switches."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

AMPLE_GB, TIGHT_GB = 1.0, 0.0028
"""Replica and actor take 2.6 and 1.3 MiB by the estimate; both are 3.9 MiB, the tight device has 2.9."""


@pytest.fixture(scope="module")
def jobs(tiny_text, run_verl):
    found = {}
    for name, memory_gb in (("ample", AMPLE_GB), ("tight", TIGHT_GB)):
        found[name] = run_verl(
            tiny_text,
            name,
            "+recipe=text_grpo_tiny",
            "trainer.v1.trainer_mode=m2flow",
            f"trainer.v1.m2flow.virtual_devices.memory_gb={memory_gb}",
            "trainer.total_training_steps=2",
            "trainer.save_freq=1",
            f"trainer.default_local_dir=checkpoints-{name}",
            # With Adam's usual 1e-8 a gradient of rounding errors alone moves a parameter by the whole learning rate.
            "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-4",
            # The first job records its rollouts, the second one replays them.
            "skip.rollout_tq.enable=true",
            "skip.rollout_tq.dump_dir=recorded-sharing",
            "skip.rollout_tq.steps=[1,2]",
        )
        assert found[name].returncode == 0, found[name].tail()
    return found


def test_with_ample_memory_nothing_is_switched(jobs):
    for step in jobs["ample"].metrics:
        assert step["sharing/switches"] == 0
        assert step["sharing/bytes_in"] == step["sharing/bytes_out"] == 0


def test_with_tight_memory_they_take_turns_and_say_so(jobs):
    assert len(jobs["tight"].metrics) == 2
    for step in jobs["tight"].metrics:
        assert step["sharing/switches"] == 2
        for who in ("rollout", "actor"):
            assert step[f"sharing/{who}/onloads"] == step[f"sharing/{who}/offloads"] == 1
        assert step["sharing/rollout/left_for/actor"] == step["sharing/actor/left_for/rollout"] == 1
        assert step["sharing/bytes_in"] == step["sharing/bytes_out"] > 3.5e6
        assert 0 < step["sharing/switch_s"] <= step["sharing/waited_s"]


def test_turns_change_no_parameter(jobs, tiny_text, read_actor):
    for step in (1, 2):
        ample, tight = (read_actor(tiny_text / f"checkpoints-{name}", step) for name in ("ample", "tight"))
        assert ample.keys() == tight.keys()
        for name, value in ample.items():
            assert (value - tight[name]).norm() <= 1e-5 * value.norm(), f"step {step}: {name}"


def test_what_can_never_fit_is_refused_before_ray_starts(tiny_text, run_verl):
    job = run_verl(
        tiny_text,
        "never",
        "+recipe=text_grpo_tiny",
        "trainer.v1.trainer_mode=m2flow",
        "trainer.v1.m2flow.virtual_devices.memory_gb=0.002",
    )
    assert job.returncode != 0
    assert "rollout can never run: it takes 2.57 MiB of a device that has 2.05 MiB" in job.output, job.tail()
    assert "Started a local Ray instance" not in job.output
