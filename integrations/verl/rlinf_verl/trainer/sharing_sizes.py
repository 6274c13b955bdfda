"""How much of a device each stage takes: estimated from the configuration before Ray starts, declared from it later."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rlinf_plugins.core.errors import ExceedsCapacityError
from rlinf_verl.config import NODE, M2FlowConfig

TRAINED_COPIES = 4
"""A trained parameter, its gradient and the two moments of Adam."""

_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "half": 2, "bf16": 2, "bfloat16": 2, "auto": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes of one device.

    Attributes:
        rollout: Weights and KV cache of the rollout replica's share.
        stages: What each other stage takes while it works.
        sync: What the actor takes beside the rollout while weights go over.
    """

    rollout: int
    stages: Mapping[str, int]
    sync: int


def estimate(config: DictConfig, options: M2FlowConfig) -> Sizes | None:
    """Estimate from the checkpoint's files and the options; None where the checkpoint is not on this machine.

    Args:
        config: veRL's configuration.
        options: Options of the trainer mode.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    model = config.actor_rollout_ref.model
    parameters = count_parameters(str(model.path))
    if parameters is None:
        return None
    devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    working = int((options.sharing.working_gb or 0) * 2**30)
    lora = _lora(config)
    actor = parameters * _itemsize(config, "actor_rollout_ref.actor.fsdp_config.model_dtype", "fp32")
    stages = {"actor": actor * (1 if lora else TRAINED_COPIES) // devices + working}
    if need_reference_policy(config) and not lora:
        ref = parameters * _itemsize(config, "actor_rollout_ref.ref.fsdp_config.model_dtype", "fp32")
        stages["ref"] = ref // devices + working
    if need_critic(config):
        critic = count_parameters(str(config.critic.model.path)) or parameters
        itemsize = _itemsize(config, "critic.fsdp.model_dtype", "fp32")
        stages["critic"] = critic * itemsize * TRAINED_COPIES // devices + working
    sync = actor // devices if sync_fetches_actor(config) else 0
    return Sizes(rollout=rollout_bytes(config, options, parameters), stages=stages, sync=sync)


def rollout_bytes(
    config: DictConfig, options: M2FlowConfig, parameters: int | None, capacity: int | None = None
) -> int:
    """Bytes of a rollout replica on each of its devices.

    Args:
        config: veRL's configuration.
        options: Options of the trainer mode; ``sharing.rollout_gb`` is believed where it is given.
        parameters: Parameters of the model; None: unknown.
        capacity: Bytes of a device. An engine that reserves a share of the device (vLLM, SGLang) has that share.
    """
    if options.sharing.rollout_gb is not None:
        return int(options.sharing.rollout_gb * 2**30)
    rollout = config.actor_rollout_ref.rollout
    if capacity is not None and not options.virtual_devices.count:
        return int(rollout.gpu_memory_utilization * capacity)
    itemsize = _itemsize(config, "actor_rollout_ref.rollout.dtype", "bfloat16")
    parallel = rollout.tensor_model_parallel_size * rollout.get("pipeline_model_parallel_size", 1)
    return ((parameters or 0) * itemsize + _cache_bytes(config, itemsize)) // parallel


def check_plan(config: DictConfig, options: M2FlowConfig, capacity: int) -> None:
    """Refuse a job with a stage that a device can never hold, with the numbers.

    Args:
        config: veRL's configuration.
        options: Options of the trainer mode.
        capacity: Bytes of a device.

    Raises:
        ExceedsCapacityError: A stage, or the weight sync, does not fit.
    """
    sizes = estimate(config, options)
    if sizes is None:
        return
    fixed = 0 if config.actor_rollout_ref.rollout.free_cache_engine else sizes.rollout
    wanted = {"rollout": sizes.rollout} | {stage: nbytes + fixed for stage, nbytes in sizes.stages.items()}
    if sizes.sync:
        wanted["weight sync (rollout and actor)"] = sizes.rollout + sizes.sync
    for stage, nbytes in wanted.items():
        if nbytes > capacity:
            beside = " beside the rollout, which free_cache_engine=False keeps there" if fixed else ""
            raise ExceedsCapacityError(
                f"{stage} can never run{beside}: it takes {_amount(nbytes)} of a device that has {_amount(capacity)} "
                f"({', '.join(f'{name} {_amount(size)}' for name, size in wanted.items())}); raise "
                f"{NODE}.virtual_devices.memory_gb, use more devices or a smaller model, or correct {NODE}.sharing"
            )


def count_parameters(path: str) -> int | None:
    """Count the parameters of a checkpoint folder by its safetensors headers; None where there are none to read."""
    folder = Path(os.path.expanduser(path))
    total = 0
    for shard in sorted(folder.glob("*.safetensors")):
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total or None


def sync_fetches_actor(config: DictConfig) -> bool:
    """Whether the weight sync brings the actor's shard to the device; FSDP2 sends it tensor by tensor instead."""
    return _lora(config) or str(config.actor_rollout_ref.actor.strategy) != "fsdp2"


def _lora(config: DictConfig) -> bool:
    model = config.actor_rollout_ref.model
    rank = OmegaConf.select(model, "lora.rank") or model.get("lora_rank", 0)
    return bool(rank) or model.get("lora_adapter_path") is not None


def _cache_bytes(config: DictConfig, itemsize: int) -> int:
    """Bytes of the KV cache when every row is as long as it may become."""
    rollout = config.actor_rollout_ref.rollout
    path = Path(os.path.expanduser(str(config.actor_rollout_ref.model.path))) / "config.json"
    if not path.is_file():
        return 0
    whole = json.loads(path.read_text())
    text = whole.get("text_config") or whole
    heads = text.get("num_attention_heads")
    if not heads or not text.get("num_hidden_layers"):
        return 0
    width = text.get("head_dim") or text.get("hidden_size", 0) // heads
    length = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
    replicas = max(1, config.trainer.n_gpus_per_node * config.trainer.nnodes // rollout.tensor_model_parallel_size)
    rows = min(rollout.max_num_seqs, -(-config.data.train_batch_size * rollout.n // replicas))
    return int(
        2 * text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads) * width * itemsize * length * rows
    )


def _itemsize(config: DictConfig, key: str, default: str) -> int:
    return _BYTES.get(str(OmegaConf.select(config, key) or default), 4)


def _amount(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.3g} MiB"
