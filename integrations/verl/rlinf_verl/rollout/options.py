"""Options of the in-process engine, and the engine they and veRL's rollout and model configs describe."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.rollout.engine import EngineLimits, HFEngine
from rlinf_verl.rollout.sampling import LOGPROB_MODES
from rlinf_verl.rollout.weights import ResidentWeights

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_LOADED = frozenset({"auto", "hf", "safetensors"})


@dataclass(frozen=True, kw_only=True, slots=True)
class HFOptions:
    """``actor_rollout_ref.rollout.engine_kwargs.hf``.

    Attributes:
        threads: Threads of the engine's tensor operations; None leaves what ``OMP_NUM_THREADS`` says.
        bucket_mb: Size of the pieces weights travel in; two of them are in memory at once.
        discard_weights: Sleeping frees the weights as well as the KV cache. veRL's trainers sync before waking, so
            this is safe with them; leave it off if you wake replicas without a sync.
        device: Where the model runs.
    """

    threads: int | None = None
    bucket_mb: int = 64
    discard_weights: bool = False
    device: str = "cpu"

    def validate(self, where: str) -> None:
        """Refuse sizes below one."""
        for name in ("threads", "bucket_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{where}.{name} must be >= 1, got {value}")


def options(rollout: Any, name: str = "hf", cls: type[Any] = HFOptions) -> Any:
    """Read ``rollout.engine_kwargs.<name>`` as ``cls``."""
    given = rollout.engine_kwargs.get(name) or {}
    plain: Mapping[str, Any] = {str(k): given[k] for k in given}
    return from_mapping(cls, plain, f"actor_rollout_ref.rollout.engine_kwargs.{name}")


def check_single_process(rollout: Any) -> None:
    """Refuse parallelism inside a replica: the engine is one process; use more replicas.

    Raises:
        ConfigError: A parallel size above one.
    """
    for size in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        if getattr(rollout, size) != 1:
            raise ConfigError(
                f"rollout.name={rollout.name} runs a replica in one process, so rollout.{size} must be 1, "
                f"got {getattr(rollout, size)}; more devices give more replicas"
            )


def limits(rollout: Any, model_config: Any, replica_rank: int) -> EngineLimits:
    """Bounds of the engine from veRL's configs."""
    if rollout.logprobs_mode not in LOGPROB_MODES:
        raise ConfigError(f"rollout.logprobs_mode={rollout.logprobs_mode!r}; valid: {', '.join(LOGPROB_MODES)}")
    longest = _text(model_config.hf_config).max_position_embeddings
    return EngineLimits(
        max_rows=rollout.max_num_seqs,
        max_prefill_tokens=rollout.max_num_batched_tokens,
        max_length=min(rollout.max_model_len or longest, longest),
        eos_ids=frozenset() if rollout.ignore_eos else eos_ids(model_config),
        raw_log_probs=rollout.logprobs_mode == "raw_logprobs",
        seed=rollout.seed + replica_rank,
    )


def eos_ids(model_config: Any) -> frozenset[int]:
    """End-of-sequence ids of the model: those of its generation config and of its tokenizer."""
    found: set[int] = set()
    for source in (model_config.generation_config, model_config.hf_config, model_config.tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found |= set(ids) if isinstance(ids, Iterable) else {ids}
    return frozenset(found)


def build_engine(rollout: Any, model_config: Any, replica_rank: int) -> HFEngine:
    """Build the model and its engine.

    Args:
        rollout: veRL's ``RolloutConfig``.
        model_config: veRL's ``HFModelConfig``.
        replica_rank: Makes the seeds of replicas differ.

    Raises:
        ConfigError: An option is unknown or impossible, or the architecture cannot be batched here.
    """
    chosen: HFOptions = options(rollout)
    check_single_process(rollout)
    bounds = limits(rollout, model_config, replica_rank)
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    model, loaded = _model(rollout, model_config)
    tokenizer = model_config.tokenizer

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    weights = ResidentWeights(model, loaded=loaded)
    return HFEngine(model.to(chosen.device), bounds, weights, decode if tokenizer is not None else None)


def _model(rollout: Any, model_config: Any) -> tuple[torch.nn.Module, bool]:
    from transformers import AutoModelForCausalLM

    config = model_config.hf_config
    layers = set(getattr(_text(config), "layer_types", None) or ()) - _ATTENTION_LAYERS
    if layers:
        raise ConfigError(
            f"rollout.name=hf batches attention layers only, and {config.model_type} has {', '.join(sorted(layers))}; "
            "use rollout.name=vllm or sglang"
        )
    if rollout.load_format != "dummy" and rollout.load_format not in _LOADED:
        raise ConfigError(
            f"rollout.load_format={rollout.load_format!r}; valid with rollout.name=hf: dummy (weights come with the "
            f"first sync), {', '.join(sorted(_LOADED))} (from the checkpoint)"
        )
    kwargs = {
        "dtype": getattr(torch, rollout.dtype),
        "attn_implementation": "sdpa",
        "trust_remote_code": model_config.trust_remote_code,
    }
    if rollout.load_format in _LOADED:
        return AutoModelForCausalLM.from_pretrained(model_config.local_path, config=config, **kwargs), True
    return AutoModelForCausalLM.from_config(config, **kwargs), False


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True)
