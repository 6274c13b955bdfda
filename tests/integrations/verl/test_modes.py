import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.config import m2flow_config
from rlinf_verl.modes import check_mode

BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"


def job(*changes):
    config = OmegaConf.create(
        {
            "trainer": {
                "nnodes": 1,
                "n_gpus_per_node": 1,
                "v1": {"m2flow": {"mode": "spatial", "virtual_devices": {"count": 2}}},
            },
            "actor_rollout_ref": {
                "actor": {"ppo_mini_batch_size": 8},
                "rollout": {
                    "nnodes": 1,
                    "n_gpus_per_node": 1,
                    "tensor_model_parallel_size": 1,
                    "data_parallel_size": 1,
                    "pipeline_model_parallel_size": 1,
                    "checkpoint_engine": {"backend": "naive"},
                },
            },
            "reward": {"reward_model": {"enable": False}},
        }
    )
    return OmegaConf.merge(config, OmegaConf.from_dotlist(list(changes)))


def check(config):
    check_mode(config, m2flow_config(config))
    return config


@pytest.mark.parametrize("mode", ["spatial", "hybrid"])
def test_virtual_devices_get_a_transport_that_reaches_other_processes(mode):
    assert OmegaConf.select(check(job(f"trainer.v1.m2flow.mode={mode}")), BACKEND) == "gloo"


def test_a_transport_that_was_chosen_is_kept():
    assert OmegaConf.select(check(job(f"{BACKEND}=nccl")), BACKEND) == "nccl"
    assert OmegaConf.select(check(job("trainer.v1.m2flow.mode=temporal")), BACKEND) == "naive"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["trainer.v1.m2flow.granularity=9"], r"granularity=9 prompts cannot form a mini-batch.*at most 8"),
        (["actor_rollout_ref.rollout.nnodes=0"], r"none are set; set actor_rollout_ref\.rollout\.nnodes"),
        (["trainer.n_gpus_per_node=2"], r"needs 2 device\(s\) for training and 1 for rollout.*count is 2"),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], r"1 rollout device\(s\).*replicas of 2"),
        (["reward.reward_model.enable=true"], "enable_resource_pool=True"),
        (["trainer.v1.m2flow.virtual_devices.count=0"], "naive reaches replicas in the trainer's own processes only"),
    ],
)
def test_impossible_modes_are_refused_with_the_way_out(changes, message):
    with pytest.raises(ConfigError, match=message):
        check(job(*changes))


@pytest.mark.parametrize("change", ["mode=auto-ish", "granularity=-1", "lend_until=1.5"])
def test_values_out_of_range_are_refused(change):
    with pytest.raises(ConfigError, match=change.split("=")[0]):
        m2flow_config(job(f"trainer.v1.m2flow.{change}"))
