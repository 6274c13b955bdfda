"""What stages take of a device, from the checkpoint's files and the options alone."""

import json

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError, ExceedsCapacityError
from rlinf_verl import tiny_text
from rlinf_verl.config import M2FlowConfig, SharingConfig, VirtualDevicesConfig, m2flow_config
from rlinf_verl.trainer.sharing_sizes import check_plan, count_parameters, estimate, rollout_bytes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder / "model", tiny_text.make(folder)


def job(path, **changes):
    config = OmegaConf.create(
        {
            "data": {"train_batch_size": 4},
            "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
            "algorithm": {"use_kl_in_reward": False, "adv_estimator": "grpo"},
            "critic": {"enable": False, "model": {"path": str(path)}},
            "actor_rollout_ref": {
                "model": {"path": str(path)},
                "actor": {"strategy": "fsdp2", "use_kl_loss": True, "fsdp_config": {"model_dtype": "fp32"}},
                "ref": {"fsdp_config": {"model_dtype": "fp32"}},
                "rollout": {
                    "n": 8, "dtype": "float32", "max_num_seqs": 8, "max_model_len": None, "prompt_length": 16,
                    "response_length": 2, "tensor_model_parallel_size": 1, "free_cache_engine": True,
                    "gpu_memory_utilization": 0.5,
                },
            },
        }
    )  # fmt: skip
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


OPTIONS = M2FlowConfig(virtual_devices=VirtualDevicesConfig(count=2))


def test_parameters_are_counted_without_loading_them(checkpoint, tmp_path):
    path, parameters = checkpoint
    assert count_parameters(str(path)) == parameters
    assert count_parameters(str(tmp_path)) is None


def test_sizes_by_hand(checkpoint):
    path, parameters = checkpoint
    sizes = estimate(job(path), OPTIONS)
    assert sizes.stages == {"actor": parameters * 4 * 4 // 2, "ref": parameters * 4 // 2}
    text = json.loads((path / "config.json").read_text())
    a_token = 2 * text["num_hidden_layers"] * text["hidden_size"] * 4
    assert sizes.rollout == parameters * 4 + 8 * 18 * a_token, "8 rows at once, 18 tokens long"
    assert sizes.sync == 0, "FSDP2 sends tensor by tensor"
    critic = estimate(job(path, critic__enable=True), OPTIONS)
    assert critic.stages["critic"] == parameters * 4 * 4 // 2


def test_lora_trains_little_and_its_sync_needs_the_shard(checkpoint):
    path, parameters = checkpoint
    sizes = estimate(job(path, actor_rollout_ref__model__lora_rank=8), OPTIONS)
    assert sizes.stages == {"actor": parameters * 4 // 2}
    assert sizes.sync == parameters * 4 // 2


def test_declared_sizes_are_believed_and_reserved_shares_taken(checkpoint):
    path, _ = checkpoint
    declared = M2FlowConfig(sharing=SharingConfig(rollout_gb=2, working_gb=1))
    assert rollout_bytes(job(path), declared, 1000, 80 << 30) == 2 << 30
    assert estimate(job(path), declared).stages["ref"] > 1 << 30
    assert rollout_bytes(job(path), M2FlowConfig(), 1000, 80 << 30) == 40 << 30
    with pytest.raises(ConfigError, match=r"sharing\.working_gb must not be negative, got -1"):
        m2flow_config(OmegaConf.create({"trainer": {"v1": {"m2flow": {"sharing": {"working_gb": -1}}}}}))


def test_a_plan_that_cannot_fit_is_refused_with_the_numbers(checkpoint):
    path, _ = checkpoint
    sizes = estimate(job(path), OPTIONS)
    check_plan(job(path), OPTIONS, max(sizes.rollout, *sizes.stages.values()))
    with pytest.raises(ExceedsCapacityError, match=r"actor can never run: it takes 0\.639 MiB of a device that has"):
        check_plan(job(path), OPTIONS, sizes.stages["actor"] - 1)
    kept = job(path, actor_rollout_ref__rollout__free_cache_engine=False)
    with pytest.raises(ExceedsCapacityError, match="beside the rollout, which free_cache_engine=False keeps there"):
        check_plan(kept, OPTIONS, sizes.rollout + sizes.stages["actor"] - 1)
    check_plan(kept, OPTIONS, sizes.rollout + sizes.stages["actor"])
    lora = job(path, actor_rollout_ref__model__lora_rank=8)
    sizes = estimate(lora, OPTIONS)
    with pytest.raises(ExceedsCapacityError, match="weight sync"):
        check_plan(lora, OPTIONS, sizes.rollout + sizes.sync - 1)


def test_a_model_that_is_not_here_is_not_judged(tmp_path):
    check_plan(job(tmp_path / "elsewhere"), OPTIONS, 1)
