import random
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.spans import Span
from rlinf_verl.config import M2FlowConfig, m2flow_config
from rlinf_verl.profiling import composed
from rlinf_verl.trainer.follows_plan import ClosedLoop, seconds_by_stage

PREDICTED = {"step": 6.0, "rollout": 5.0, "old_log_prob": 1.0, "actor": 3.0}


def calls(rollout=5.0, log_prob=1.0, actor=3.0):
    seconds = [("rollout", rollout), ("old_log_prob", log_prob), ("actor", actor / 2), ("actor", actor / 2)]
    spans = [
        Span(name="call", actor="trainer", start=0.0, end=1.0, attributes={"stage": stage, "seconds": value})
        for stage, value in seconds
    ]
    return seconds_by_stage(spans)


class Planned(ClosedLoop):
    """Counts re-plans without planning: the detector alone decides."""

    def _replanned(self, drift):
        return None


def test_predicted_and_actual_stand_side_by_side():
    found = Planned(M2FlowConfig(predicted=PREDICTED), None).metrics(calls(rollout=7.0), 8.0)
    assert found["m2flow/predicted_s/rollout"] == 5.0
    assert found["m2flow/actual_s/rollout"] == 7.0
    assert found["m2flow/actual_s/step"] == 8.0
    assert len(found) == 8


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_ten_per_cent_plans_again_at_most_once_in_a_thousand_steps(seed):
    draw = random.Random(seed)
    loop = Planned(M2FlowConfig(predicted=PREDICTED), None)
    for _ in range(1000):
        loop.observe(calls(), 6.0 * draw.uniform(0.9, 1.1))
    assert loop.replans <= 1


@pytest.mark.parametrize("factor", [1.5, 0.5])
@pytest.mark.parametrize("seed", range(10))
def test_a_change_by_half_plans_again_exactly_once_within_twenty_steps(factor, seed):
    draw = random.Random(seed)
    loop = Planned(M2FlowConfig(predicted=PREDICTED), None)
    for _ in range(100):
        loop.observe(calls(), 6.0 * draw.uniform(0.9, 1.1))
    before = loop.replans
    for step in range(400):
        loop.observe(calls(), factor * 6.0 * draw.uniform(0.9, 1.1))
        if step == 20:
            assert loop.replans == before + 1
    assert loop.replans == before + 1


@pytest.fixture
def drifting(tmp_path, write_profile):
    """Makes a loop whose rollout takes twice as long as predicted; planning sees the corrected profile."""

    def make(mode, profile=True):
        config = composed(["+recipe=text_grpo_tiny", "trainer.v1.trainer_mode=m2flow"])
        OmegaConf.set_struct(config, False)
        OmegaConf.update(config, "trainer.v1.m2flow", {"mode": mode, "virtual_devices": {"count": 2}})
        if mode != "temporal":
            config.trainer.n_gpus_per_node = 1
            config.actor_rollout_ref.rollout.nnodes = config.actor_rollout_ref.rollout.n_gpus_per_node = 1
        if profile:
            OmegaConf.update(config, *write_profile(tmp_path / "p.json", config).split("="))
        options = replace(m2flow_config(config), predicted=PREDICTED)
        return ClosedLoop(options, config)

    return make


def run_slow(loop, steps=30):
    return [found for _ in range(steps) if (found := loop.observe(calls(rollout=10.0), 11.0)) is not None]


@pytest.mark.parametrize("mode", ["spatial", "hybrid"])
def test_a_slower_rollout_is_planned_around_once_with_devices_in_place(drifting, mode, capsys):
    loop = drifting(mode)
    (choice,) = run_slow(loop)
    assert (choice.mode, choice.rollout, choice.trainer) == (mode, 1, 1)
    assert choice.stages["rollout"] > PREDICTED["rollout"] * 1.2
    assert loop.metrics(calls(), 11.0)["m2flow/predicted_s/step"] == choice.seconds
    assert "steps take 1.83 times what was predicted" in capsys.readouterr().out


def test_in_turn_nothing_can_change_and_the_job_says_so(drifting, capsys):
    assert run_slow(drifting("temporal")) == []
    assert (
        "under mode=temporal nothing can change while the job runs: resume it with mode=auto" in capsys.readouterr().out
    )


def test_without_a_profile_the_drift_is_said(drifting, capsys):
    assert run_slow(drifting("spatial", profile=False)) == []
    assert "no profile to plan again by" in capsys.readouterr().out
