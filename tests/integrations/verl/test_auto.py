import sys

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError, PlanError, ProfileError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.planning.capture import flow_from_roles
from rlinf_plugins.scheduler.planning.ranges import plan_from_ranges
from rlinf_verl import auto, preflight
from rlinf_verl.config import m2flow_config

PROMPTS = 16


@pytest.fixture(scope="module")
def base():
    """veRL's configuration of the tiny text recipe."""
    from hydra import compose, initialize_config_module

    import rlinf_verl.plugin  # noqa: F401  stores the recipes

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", ["+recipe=text_grpo_tiny", "trainer.v1.trainer_mode=m2flow"])


@pytest.fixture
def job(base, tmp_path):
    """Makes a job on two virtual devices under ``mode=auto`` from further values."""

    def make(*changes):
        config = base.copy()
        OmegaConf.set_struct(config, False)
        entries = [
            "trainer.v1.m2flow.mode=auto",
            "trainer.v1.m2flow.virtual_devices.count=2",
            "trainer.v1.m2flow.virtual_devices.cores_per_device=1",
            f"trainer.default_local_dir={tmp_path}",
            *changes,
        ]
        config.merge_with(OmegaConf.from_dotlist(entries))
        return config

    return make


def choose(config, check=lambda config: None):
    auto.choose(config, m2flow_config(config), check)
    return config


def test_the_fastest_mode_is_written_into_the_configuration(job, tmp_path, capsys, write_profile):
    config = choose(job(write_profile(tmp_path / "p.json", job())))
    options = m2flow_config(config)
    assert (options.mode, options.granularity) == ("hybrid", 1)
    assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.n_gpus_per_node) == (1, 1)
    assert (config.trainer.nnodes, config.actor_rollout_ref.rollout.nnodes) == (1, 1)
    assert options.predicted["step"] > options.predicted["rollout"] > 0
    said = capsys.readouterr().out
    assert "mode=auto chose hybrid (rollout 1 | training 1, 1 prompts at a time, lent until" in said
    assert "rather than spatial" in said
    assert "rather than temporal" in said


def test_short_generation_takes_turns(job, tmp_path, write_profile):
    config = choose(job(write_profile(tmp_path / "p.json", job(), rollout=(0.2, 0.1), train=(8.0, 4.0))))
    assert m2flow_config(config).mode == "temporal"
    assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.nnodes) == (2, 0)


def test_devices_that_the_user_placed_stay(job, tmp_path, write_profile):
    rollout = "actor_rollout_ref.rollout"
    placed = ["trainer.n_gpus_per_node=1", f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=1"]
    slow_training = write_profile(tmp_path / "p.json", job(), rollout=(0.2, 0.1), train=(8.0, 4.0))
    assert m2flow_config(choose(job(slow_training, *placed))).mode in ("spatial", "hybrid")


def test_a_mode_that_cannot_run_is_passed_over_and_named(job, tmp_path, capsys, write_profile):
    def no_hybrid(config):
        if config.trainer.v1.m2flow.mode == "hybrid":
            raise ConfigError("the memory is short")

    config = choose(job(write_profile(tmp_path / "p.json", job())), no_hybrid)
    assert m2flow_config(config).mode == "spatial"
    said = capsys.readouterr().out
    assert "impossible: hybrid" in said
    assert "the memory is short" in said


def test_the_checks_judge_each_choice_not_what_was_left_open(job, tmp_path, write_profile, capsys):
    """The recipe's micro-batch of 128 rows fits one trainer device, not the two that turns would take."""
    config = job(write_profile(tmp_path / "p.json", job(), rollout=(0.2, 0.1), train=(8.0, 4.0)))
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 128
    config.trainer.v1.m2flow.sharing = {"rollout_gb": 0.1}
    assert m2flow_config(choose(config, preflight.check_runnable)).mode in ("spatial", "hybrid", "temporal")
    assert config.trainer.n_gpus_per_node == 1
    assert "impossible: temporal (2 device(s) in turn)" in capsys.readouterr().out


def test_no_mode_that_can_run_is_an_error_with_every_reason(job, tmp_path, write_profile):
    def nothing(config):
        raise ConfigError(f"no {config.trainer.v1.m2flow.mode} here")

    with pytest.raises(ConfigError, match=r"finds no mode.*no hybrid here.*no spatial here.*no temporal here"):
        choose(job(write_profile(tmp_path / "p.json", job())), nothing)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("algorithm.adv_estimator=gae", "adv_estimator=gae"),
        ("algorithm.filter_groups.enable=true", "filter_groups"),
        ("trainer.v1.m2flow.virtual_devices.count=1", "one device"),
    ],
)
def test_what_cannot_overlap_takes_turns_without_a_trial(job, capsys, change, reason):
    assert m2flow_config(choose(job(change))).mode == "temporal"
    assert f"chose temporal: nothing could overlap ({reason}" in capsys.readouterr().out.replace(
        "the actor's update waits for the whole batch: algorithm.", ""
    ).replace("algorithm.", "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["trainer.v1.m2flow.virtual_devices.count=1"], "foreign profile"),
        (["actor_rollout_ref.rollout.n=4"], "is of flow"),
    ],
)
def test_a_profile_of_something_else_is_refused(job, tmp_path, write_profile, changes, message):
    with pytest.raises(ProfileError, match=message):
        choose(job(write_profile(tmp_path / "p.json", job(*changes))))


FLOW = flow_from_roles(name="tiny", items=PROMPTS, mini_batch=PROMPTS)
KIND = "1-core"
PAIR = Cluster.uniform(2, kind=KIND)


def write_plan(path, plan):
    path.write_bytes(plan.to_json())
    return f"trainer.v1.m2flow.plan={path}"


def test_a_plan_is_followed(job, tmp_path):
    apart = plan_from_ranges(FLOW, PAIR, {"rollout": "0", "old_log_prob,actor": "1"}, items=4)
    one_phase = type(apart)(
        flow=apart.flow,
        items=apart.items,
        devices=apart.devices,
        seconds=1.0,
        phases=(
            type(apart.phases[0])(pools=tuple(p for phase in apart.phases for p in phase.pools), items=4, seconds=1.0),
        ),
    )
    config = choose(job(write_plan(tmp_path / "plan.json", one_phase)))
    options = m2flow_config(config)
    assert (options.mode, options.granularity) == ("spatial", 4)
    in_turn = plan_from_ranges(FLOW, PAIR, {"rollout,old_log_prob,actor": "all"})
    assert m2flow_config(choose(job(write_plan(tmp_path / "turn.json", in_turn)))).mode == "temporal"


def test_a_plan_for_another_cluster_is_refused_with_the_way_out(job, tmp_path):
    eight = plan_from_ranges(FLOW, Cluster.uniform(8, kind=KIND), {"rollout,old_log_prob,actor": "all"})
    with pytest.raises(
        ConfigError, match=r"is for 8 1-core device\(s\), this job has 2 1-core device\(s\); plan for this"
    ):
        choose(job(write_plan(tmp_path / "plan.json", eight)))


def test_a_plan_verl_cannot_follow_is_refused(job, tmp_path):
    half = plan_from_ranges(FLOW, PAIR, {"rollout": "0", "old_log_prob,actor": "all"})
    with pytest.raises(PlanError, match="cannot follow"):
        choose(job(write_plan(tmp_path / "plan.json", half)))


def test_a_plan_under_another_mode_is_refused(job):
    with pytest.raises(ConfigError, match="plan is followed under mode=auto only, got mode=spatial; set mode=auto"):
        m2flow_config(job("trainer.v1.m2flow.mode=spatial", "trainer.v1.m2flow.plan=x.json"))


def test_without_a_profile_trials_measure_the_job(job, tmp_path, monkeypatch, write_profile):
    asked = []

    def measure(path, overrides, *, repeats, report):
        asked.extend(overrides)
        write_profile(path, job())

    monkeypatch.setattr(auto, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["main_ppo", "+recipe=text_grpo_tiny"])
    config = choose(job())
    assert asked[:2] == ["+recipe=text_grpo_tiny", "++trainer.v1.m2flow.mode=temporal"]
    assert m2flow_config(config).profile.path == str(tmp_path / "m2flow" / "profile.json")
    choose(job())
    assert len(asked) == 3  # the second job found the profile


@pytest.mark.parametrize("how", ["latest", "path"])
def test_a_resumed_job_keeps_the_trainers_devices(job, tmp_path, write_profile, capsys, how):
    actor = tmp_path / "global_step_7" / "actor"
    actor.mkdir(parents=True)
    (actor / "model_world_size_2_rank_0.pt").touch()
    more = [f"trainer.resume_from_path={actor.parent}", "trainer.resume_mode=resume_path"] if how == "path" else []
    if how == "latest":
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    config = choose(job(write_profile(tmp_path / "p.json", job()), *more))
    assert m2flow_config(config).mode == "temporal"
    assert "the checkpoint to resume from was written by 2 trainer device(s)" in capsys.readouterr().out


def test_splits_are_whole_replicas(job):
    config = job("actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert auto.splits_of(config, Cluster.uniform(8)) == [(2, 6), (4, 4), (6, 2)]
    assert auto.splits_of(config, Cluster.uniform(12, per_node=4)) == [(4, 8), (8, 4)]


def test_granularities_divide_the_mini_batch(job):
    assert auto.granularities_of(job("actor_rollout_ref.actor.ppo_mini_batch_size=12")) == (3, 6, 12)
