import json

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError, MissingAssetError, RlinfError
from rlinf_verl import preflight
from rlinf_verl.config import M2FlowConfig, VirtualDevicesConfig


def job(**changes):
    config = OmegaConf.create(
        {
            "data": {"train_batch_size": 16},
            "trainer": {
                "n_gpus_per_node": 2,
                "nnodes": 1,
                "device": "cuda",
                "v1": {"trainer_mode": "m2flow", "m2flow": {"virtual_devices": {"count": 2}}},
            },
            "ray_kwargs": {"ray_init": {"num_cpus": None}},
            "actor_rollout_ref": {
                "model": {"path": "somebody/some-model"},
                "actor": {
                    "ppo_mini_batch_size": 8,
                    "ppo_micro_batch_size_per_gpu": 4,
                    "use_dynamic_bsz": False,
                },
                "rollout": {
                    "n": 4,
                    "log_prob_use_dynamic_bsz": False,
                    "log_prob_micro_batch_size_per_gpu": 8,
                    "tensor_model_parallel_size": 1,
                    "data_parallel_size": 1,
                    "agent": {"agent_loop_manager_class": None},
                },
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


OPTIONS = M2FlowConfig(virtual_devices=VirtualDevicesConfig(count=2))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"trainer__n_gpus_per_node": 3}, ["n_gpus_per_node=3", "count is 2"]),
        ({"trainer__nnodes": 2}, ["one machine", "nnodes=2"]),
        ({"data__train_batch_size": 12}, ["train_batch_size=12", "ppo_mini_batch_size=8", "fits is 6"]),
        ({"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 5}, ["32 rows", "=5", "micro-batch of 4 fits"]),
        (
            {"actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 24},
            ["64 rows", "log_prob_micro_batch_size_per_gpu=24", "micro-batch of 16 fits"],
        ),
        ({"actor_rollout_ref__rollout__tensor_model_parallel_size": 4}, ["2 devices", "replicas of 4"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_arithmetic(changes, parts):
    with pytest.raises(ConfigError) as caught:
        preflight.check_sizes(job(**changes), OPTIONS)
    for part in parts:
        assert part in str(caught.value)


def test_sizes_that_fit_pass():
    preflight.check_sizes(job(), OPTIONS)


@pytest.fixture
def model(tmp_path):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(4), "b": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_whole_model_passes(model):
    preflight.check_model(job(actor_rollout_ref__model__path=str(model)))


def test_a_hub_name_is_left_to_verl(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    preflight.check_model(job())


@pytest.mark.parametrize("path", ["nowhere/at/all", "./nowhere", "nowhere"])
def test_a_missing_model_is_named(path):
    with pytest.raises(MissingAssetError, match="is not a folder"):
        preflight.check_model(job(actor_rollout_ref__model__path=path))


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(MissingAssetError, match=r"no config\.json"):
        preflight.check_model(job(actor_rollout_ref__model__path=str(tmp_path)))


def test_a_missing_shard_is_named(model):
    index = {"weight_map": {"a": "model.safetensors", "c": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MissingAssetError, match=r"absent: model-2\.safetensors"):
        preflight.check_model(job(actor_rollout_ref__model__path=str(model)))


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_shard_is_named(model, keep):
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors is (truncated|corrupt)"):
        preflight.check_model(job(actor_rollout_ref__model__path=str(model)))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_corrupt_configuration_is_named(model, text):
    (model / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json is corrupt"):
        preflight.check_model(job(actor_rollout_ref__model__path=str(model)))


@pytest.mark.parametrize("leftover", [{"recipe": "text_grpo_tiny"}, {}])
def test_our_options_without_our_mode_are_refused(leftover):
    config = job(**leftover)
    config.trainer.v1.trainer_mode = "sync"
    with pytest.raises(ConfigError, match="trainer_mode=m2flow"):
        preflight.run(config)


def test_without_our_flags_nothing_is_touched():
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "sync"}}})
    before = OmegaConf.to_container(config)
    preflight.run(config)
    assert OmegaConf.to_container(config) == before


class BlindFactory:
    """A simulator that finds no display driver."""

    def __init__(self, task: str) -> None:
        self.task = task

    def check(self) -> None:
        raise MissingAssetError(f"no Vulkan driver for {self.task}")


@pytest.fixture
def embodied(monkeypatch):
    import sys
    import types

    module = types.ModuleType("blind_simulator")
    module.Factory = BlindFactory
    monkeypatch.setitem(sys.modules, "blind_simulator", module)
    return lambda **envs: job(
        trainer__v1__m2flow__envs={"factory": "blind_simulator:Factory", "kwargs": {"task": "x"}, **envs}
    )


def test_a_simulator_that_cannot_run_is_refused(embodied):
    with pytest.raises(MissingAssetError, match="no Vulkan driver for x"):
        preflight.check_environments(embodied())


@pytest.mark.parametrize(
    ("envs", "parts"),
    [
        ({"num_env": 4}, ["envs.num_env", "did you mean 'num_envs'"]),
        ({"kwargs": {"tusk": 1}}, ["kwargs do not fit", "tusk"]),
        ({"factory": "nowhere:Factory"}, ["nowhere", "cannot be imported"]),
        ({"workers": 9}, ["workers", "num_envs=4", "9"]),
    ],
)
def test_options_of_an_embodied_job_are_checked(embodied, envs, parts):
    with pytest.raises(RlinfError) as caught:
        preflight.check_environments(embodied(**envs))
    for part in parts:
        assert part in str(caught.value)


def test_virtual_devices_refuse_a_running_ray(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:6379.*unset it"):
        preflight.use_virtual_devices(job(), OPTIONS)
