"""Plans of whole jobs: what the trainer can run is compared, and applied to veRL's configuration."""

import time

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import InfeasiblePlanError, PlanError, ProfileError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.planning.profile import Fingerprint, Profile, Sample, StageProfile, SyncSample
from rlinf_verl.config import M2FlowConfig
from rlinf_verl.job_flow import job_flow
from rlinf_verl.placement import apply
from rlinf_verl.planned import plan_job

CLUSTER = Cluster.uniform(4, kind="1-core", memory_gib=8.0)
STAGES = ("rollout", "old_log_prob", "actor")

pytestmark = pytest.mark.slow  # imports veRL


def config(mini=16):
    return OmegaConf.create(
        {
            "trainer": {"nnodes": 1, "n_gpus_per_node": 4, "v1": {"trainer_mode": "sync"}},
            "data": {"train_batch_size": 16, "max_response_length": 400},
            "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
            "critic": {"enable": False},
            "reward": {"reward_model": {"enable": False}},
            "actor_rollout_ref": {
                "model": {"path": "runs/tiny/model"},
                "actor": {"use_kl_loss": False, "ppo_mini_batch_size": mini},
                "rollout": {"n": 4, "tensor_model_parallel_size": 1, "nnodes": 0, "n_gpus_per_node": 0},
            },
        }
    )


def profile(fixed, shared, lengths=(), memory=1.0):
    """Stage times ``fixed + shared * items / 16 / devices``."""
    stages = {
        name: StageProfile(
            samples=tuple(
                Sample(
                    devices=n,
                    items=m,
                    seconds=fixed[name] + shared[name] * m / 16 / n,
                    memory_gib=memory,
                    device_kind="1-core",
                )
                for n in (1, 2, 4)
                for m in ((16,) if name == "rollout" else (2, 4, 8, 16))
            ),
            lengths=lengths if name == "rollout" else (),
        )
        for name in STAGES
    }
    return Profile(
        flow=job_flow(config()).name,
        fingerprint=Fingerprint.of(CLUSTER),
        created=time.time(),
        stages=stages,
        syncs=(
            SyncSample(source="actor", target="rollout", seconds=0.1, shared=True),
            SyncSample(source="actor", target="rollout", seconds=0.3, shared=False),
        ),
    )


# A rollout whose long tail no device shortens leaves devices idle under temporal mode.
TAIL = ({"rollout": 4.0, "old_log_prob": 0.0, "actor": 0.0}, {"rollout": 0.5, "old_log_prob": 2.0, "actor": 8.0})
EVEN = ({"rollout": 0.0, "old_log_prob": 0.1, "actor": 0.1}, {"rollout": 8.0, "old_log_prob": 2.0, "actor": 8.0})
LENGTHS = tuple([10.0] * 15 + [100.0]) * 4


def test_a_long_tail_is_hidden_by_rollout_on_devices_of_its_own():
    job = config()
    chosen = plan_job(job, M2FlowConfig(), profile(*TAIL, lengths=LENGTHS), cluster=CLUSTER)
    assert chosen.mode == "spatial"
    assert any(other.reason.startswith("temporal") for other in chosen.alternatives)
    apply(chosen, job, CLUSTER)
    assert job.trainer.v1.trainer_mode == "m2flow"
    assert job.trainer.v1.m2flow.mode == "spatial"
    assert 1 <= job.trainer.v1.m2flow.granularity < 16
    assert job.trainer.n_gpus_per_node == len(chosen.numbers_of("actor"))
    assert job.actor_rollout_ref.rollout.n_gpus_per_node == len(chosen.numbers_of("rollout"))
    assert job.actor_rollout_ref.rollout.nnodes == 1


def test_work_that_scales_takes_turns_on_all_devices():
    job = config()
    chosen = plan_job(job, M2FlowConfig(), profile(*EVEN), cluster=CLUSTER)
    assert chosen.mode == "temporal"
    assert {len(chosen.numbers_of(stage)) for stage in STAGES} == {4}
    apply(chosen, job, CLUSTER)
    assert (job.trainer.v1.m2flow.mode, job.trainer.v1.m2flow.granularity) == ("temporal", 0)
    assert job.trainer.n_gpus_per_node == 4


def test_the_trainers_size_can_be_held():
    chosen = plan_job(config(), M2FlowConfig(), profile(*EVEN), cluster=CLUSTER, actor_devices=2)
    assert len(chosen.numbers_of("actor")) == 2


def test_a_chunk_never_spans_two_mini_batches():
    job = config(mini=4)
    chosen = plan_job(job, M2FlowConfig(), profile(*TAIL, lengths=LENGTHS), cluster=CLUSTER)
    apply(chosen, job, CLUSTER)
    assert job.trainer.v1.m2flow.granularity <= 4


def test_what_cannot_be_planned_is_named():
    empty = Profile(flow=job_flow(config()).name, fingerprint=Fingerprint.of(CLUSTER), created=time.time(), stages={})
    with pytest.raises(ProfileError, match="is empty"):
        plan_job(config(), M2FlowConfig(), empty, cluster=CLUSTER)
    with pytest.raises(InfeasiblePlanError, match="memory"):
        plan_job(config(), M2FlowConfig(), profile(*EVEN, memory=9.0), cluster=CLUSTER)
    chosen = plan_job(config(), M2FlowConfig(), profile(*EVEN), cluster=CLUSTER)
    with pytest.raises(PlanError, match="plan for this cluster"):
        apply(chosen, config(), Cluster.uniform(8, kind="1-core"))
