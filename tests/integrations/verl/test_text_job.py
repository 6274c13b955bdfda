"""Whole jobs on the tiny text task, through veRL's own command."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

RECIPE = "+recipe=text_grpo_tiny"
M2FLOW = "trainer.v1.trainer_mode=m2flow"


def replay(steps: int, checkpoints: str) -> list[str]:
    """Record the rollouts of the first job and replay them in the later ones, saving after every step."""
    return [
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={checkpoints}",
        "skip.rollout_tq.enable=true",
        "skip.rollout_tq.dump_dir=recorded",
        "skip.rollout_tq.steps=[1,2]",
    ]


APART = (
    "trainer.v1.m2flow.granularity=3",
    "trainer.v1.m2flow.virtual_devices.count=2",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
)

REFERENCE = (
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    # With Adam's usual 1e-8 a gradient of rounding errors alone moves a parameter by the whole learning rate.
    "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-4",
)


@pytest.fixture(scope="module")
def parity(tiny_text, run_verl, write_profile):
    """The same two recorded steps under veRL's ``sync``, and under every mode of ``m2flow``; ``auto`` takes hybrid."""
    from rlinf_verl.profiling import composed

    auto = ("trainer.v1.m2flow.mode=auto", "trainer.v1.m2flow.virtual_devices.count=2")
    profile = write_profile(tiny_text / "given.json", composed([RECIPE, M2FLOW, *REFERENCE, *auto]))
    jobs = {
        name: run_verl(tiny_text, name, RECIPE, *REFERENCE, *mode, *replay(2, f"checkpoints-{name}"))
        for name, mode in {
            "sync": ("trainer.v1.trainer_mode=sync",),
            "m2flow": (M2FLOW,),
            "spatial": (M2FLOW, "trainer.v1.m2flow.mode=spatial", *APART),
            "hybrid": (M2FLOW, *auto, profile),
        }.items()
    }
    for job in jobs.values():
        assert job.returncode == 0, job.tail()
    return tiny_text, jobs


@pytest.mark.parametrize("mode", ["m2flow", "spatial"])
def test_m2flow_takes_the_steps_sync_takes(parity, mode, read_actor, largest_relative_difference):
    folder, _ = parity
    for step in (1, 2):
        difference = largest_relative_difference(
            read_actor(folder / f"checkpoints-{mode}", step), read_actor(folder / "checkpoints-sync", step)
        )
        assert difference <= 1e-5, f"step {step}"
    moved = largest_relative_difference(
        read_actor(folder / "checkpoints-sync", 1), read_actor(folder / "checkpoints-sync", 2)
    )
    assert moved > 1e-3, "the steps changed nothing, so equality proves nothing"


@pytest.mark.parametrize("mode", ["m2flow", "spatial"])
@pytest.mark.parametrize("name", ["actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy"])
def test_m2flow_reports_the_numbers_sync_reports(parity, mode, name):
    _, jobs = parity
    ours, theirs = ([step[name] for step in jobs[job].metrics] for job in (mode, "sync"))
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(("mode", "granularity"), [("spatial", 3), ("hybrid", 1)])
def test_a_job_on_devices_apart_says_what_it_does_and_streams(parity, mode, granularity):
    _, jobs = parity
    assert f"mode={mode}: training takes {granularity} prompts at a time" in jobs[mode].output
    assert [step["m2flow/streamed_share"] for step in jobs[mode].metrics] == [1.0, 1.0]


def test_auto_says_what_it_chose_and_reports_predicted_beside_actual(parity):
    _, jobs = parity
    assert "mode=auto chose hybrid (rollout 1 | training 1, 1 prompts at a time, lent until" in jobs["hybrid"].output
    for step in jobs["hybrid"].metrics:
        predicted = {name for name in step if name.startswith("m2flow/predicted_s/")}
        assert predicted == {
            f"m2flow/predicted_s/{n}" for n in ("step", "rollout", "old_log_prob", "reference", "actor")
        }
        for name in ("step", "old_log_prob", "reference", "actor"):
            assert step[f"m2flow/actual_s/{name}"] > 0.0


def test_a_resumed_job_takes_the_same_next_step(parity, run_verl, read_actor, largest_relative_difference):
    folder, _ = parity
    (folder / "resumed").mkdir()
    start = folder / "checkpoints-m2flow" / "global_step_1"
    job = run_verl(
        folder,
        "resumed",
        RECIPE,
        M2FLOW,
        *REFERENCE,
        *replay(2, "resumed"),
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={start}",
    )
    assert job.returncode == 0, job.tail()
    assert [step["training/global_step"] for step in job.metrics] == [2]
    difference = largest_relative_difference(
        read_actor(folder / "resumed", 2), read_actor(folder / "checkpoints-m2flow", 2)
    )
    assert difference <= 1e-5


def test_grpo_learns_the_task(tiny_text, run_verl):
    job = run_verl(tiny_text, "learn", RECIPE, M2FLOW, "trainer.total_training_steps=50")
    assert job.returncode == 0, job.tail()
    scores = [step["critic/score/mean"] for step in job.metrics]
    assert sum(scores[:3]) / 3 < 0.3, scores
    assert sum(scores[-5:]) / 5 > 0.9, scores


def test_a_raising_agent_loop_is_reported_and_the_step_completes(tiny_text, run_verl):
    (tiny_text / "loops.yaml").write_text("- {name: fragile, _target_: rlinf_verl_fragile.FragileLoop}\n")
    (tiny_text / "rlinf_verl_fragile.py").write_text(
        """
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

class FragileLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        if kwargs["index"] % 16 == 3 and kwargs["session_id"] == 2:
            raise ConnectionResetError("the tool hung up")
        return await super().run(sampling_params, **kwargs)
"""
    )
    fragile = [
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=fragile",
        "data.shuffle=false",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        "trainer.total_training_steps=2",
    ]
    job = run_verl(tiny_text, "fragile", RECIPE, M2FLOW, *fragile, env={"PYTHONPATH": str(tiny_text)})
    assert job.returncode == 0, job.tail()
    assert [step["training/rollout_failure/ConnectionResetError"] for step in job.metrics[:1]] == [1]
    assert "1 of 64 rollouts failed and were left out: 1 x ConnectionResetError at" in job.output
    assert "the tool hung up" in job.output


def test_too_many_failures_stop_the_job(tiny_text, run_verl):
    (tiny_text / "broken.yaml").write_text("- {name: broken, _target_: rlinf_verl_broken.BrokenLoop}\n")
    (tiny_text / "rlinf_verl_broken.py").write_text(
        """
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

class BrokenLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        raise ConnectionResetError("the tool hung up")
"""
    )
    job = run_verl(
        tiny_text,
        "broken",
        RECIPE,
        M2FLOW,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=broken.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=broken",
        "trainer.total_training_steps=2",
        env={"PYTHONPATH": str(tiny_text)},
    )
    assert job.returncode != 0
    assert "RolloutFailedError: 128 of 128 rollouts failed" in job.output, job.tail()
