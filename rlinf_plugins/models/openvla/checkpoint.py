"""Read and write the published checkpoint layout, strictly: every key, shape and file is accounted for.

A folder holds ``config.json``, one ``model.safetensors`` or shards with an index, optionally
``dataset_statistics.json``, ``proprio_projector--*_checkpoint.pt`` (OpenVLA-OFT) and, from this library,
``value_head.safetensors``.
"""

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlinf_plugins.core.errors import CheckpointError, MissingAssetError
from rlinf_plugins.models.openvla.config import ActionSpec, OpenVLAConfig
from rlinf_plugins.models.openvla.modeling import OpenVLAForActionPrediction

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VALUE_HEAD = "value_head.safetensors"
_PROPRIO_PATTERN = "proprio_projector--*_checkpoint.pt"
_SHOWN = 12

Weights = dict[str, torch.Tensor]


def load_policy(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    spec: ActionSpec | None = None,
    value_head_seed: int = 0,
) -> OpenVLAForActionPrediction:
    """Load a checkpoint folder; nothing is returned unless everything fits.

    Args:
        path: The folder.
        dtype: Type of the parameters in memory.
        spec: How actions are decoded; what ``config.json`` says where None.
        value_head_seed: Seeds the value head where the folder has none; it starts at random, as PPO expects.

    Returns:
        The policy on the CPU, in evaluation mode.

    Raises:
        MissingAssetError: The folder, ``config.json``, weights, or the proprio projector's file is absent.
        CheckpointError: Missing, unexpected or misshapen keys (listed), or an unreadable file.
        ConfigError: A configuration this implementation does not cover.
    """
    folder = Path(path)
    config = read_config(folder)
    with torch.device("meta"):
        policy = OpenVLAForActionPrediction(config, spec)
    weights = _read_weights(folder)
    weights |= _components(folder, policy, value_head_seed)
    _check(policy, weights, folder)
    policy.load_state_dict({key: value.to(dtype) for key, value in weights.items()}, strict=True, assign=True)
    # Rotary frequencies are derived, not stored: build them outside the meta device.
    policy.language_model.model.rotary_emb = LlamaRotaryEmbedding(config=config.text_config)
    return policy.eval()


def save_policy(
    policy: OpenVLAForActionPrediction,
    path: str | Path,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    statistics: Mapping[str, object] | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a folder that :func:`load_policy` and the upstream loaders read.

    Args:
        policy: The policy.
        path: Folder; created if need be.
        weights: Checkpoint-named tensors to write in place of the policy's own (a gathered or merged state).
        statistics: Content of ``dataset_statistics.json``; not written where None.
        max_shard_bytes: Larger models are split into shards with an index.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    state = dict(weights) if weights is not None else named_weights(policy)
    proprio = _take(state, "proprio_projector.")
    value = _take(state, "value_head.")
    _write_weights(folder, state, max_shard_bytes)
    if proprio:
        torch.save({f"module.{k}": v for k, v in proprio.items()}, folder / "proprio_projector--latest_checkpoint.pt")
    if value:
        save_file(value, folder / VALUE_HEAD, metadata={"format": "pt"})
    if statistics is not None:
        (folder / "dataset_statistics.json").write_text(json.dumps(statistics, indent=2))
    policy.config.architectures = ["OpenVLAForActionPrediction"]
    policy.config.dtype = policy.dtype
    policy.config.save_pretrained(folder)


def named_weights(policy: torch.nn.Module) -> Weights:
    """Return the policy's tensors under checkpoint names, on the CPU, contiguous."""
    return {k: v.detach().cpu().contiguous() for k, v in policy.state_dict().items()}


def read_config(folder: Path) -> OpenVLAConfig:
    """Read ``config.json``.

    Raises:
        MissingAssetError: No such folder or file.
        CheckpointError: The file is not an OpenVLA configuration.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise MissingAssetError(f"{file} does not exist; point at a folder that holds an OpenVLA checkpoint")
    try:
        values = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if values.get("model_type") != "openvla":
        raise CheckpointError(f"{file}: model_type must be 'openvla', got {values.get('model_type')!r}")
    return OpenVLAConfig.from_dict(values)  # type: ignore[no-any-return]


def has_weights(folder: Path) -> bool:
    """Return whether the folder holds weights, single or sharded."""
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def _read_weights(folder: Path) -> Weights:
    index = folder / INDEX
    if not index.is_file():
        return _read_shard(folder / WEIGHTS)
    shard_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
    weights: Weights = {}
    for name in sorted(set(shard_of.values())):
        weights |= _read_shard(folder / name)
    listed = set(shard_of)
    if listed != set(weights):
        raise CheckpointError(
            f"{index} and the shards disagree: {_several('listed but absent', listed - set(weights))}; "
            f"{_several('present but not listed', set(weights) - listed)}"
        )
    return weights


def _read_shard(file: Path) -> Weights:
    if not file.is_file():
        raise MissingAssetError(f"{file} does not exist; the checkpoint is incomplete")
    try:
        return load_file(file)  # type: ignore[no-any-return]
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read, it may be truncated: {error}") from error


def _components(folder: Path, policy: OpenVLAForActionPrediction, value_head_seed: int) -> Weights:
    weights: Weights = {}
    if policy.proprio_projector is not None:
        weights |= {f"proprio_projector.{key}": value for key, value in _read_proprio(folder).items()}
    if policy.value_head is not None:
        file = folder / VALUE_HEAD
        head = _read_shard(file) if file.is_file() else _fresh(policy.value_head, value_head_seed)
        weights |= {f"value_head.{key}": value for key, value in head.items()}
    return weights


def _read_proprio(folder: Path) -> Weights:
    files = sorted(folder.glob(_PROPRIO_PATTERN))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise MissingAssetError(f"{folder} must hold exactly one {_PROPRIO_PATTERN} for this spec, found {found}")
    try:
        stored: Weights = torch.load(files[0], map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{files[0]} cannot be read, it may be truncated: {error}") from error
    return {key.removeprefix("module."): value for key, value in stored.items()}


def _fresh(head: torch.nn.Module, seed: int) -> Weights:
    """Initial weights of the value head: small, so that first values are near 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.zeros(value.shape)
        if value.ndim == 1
        else torch.empty(value.shape).normal_(0, 0.02, generator=generator)
        for key, value in head.state_dict().items()
    }


def _check(policy: torch.nn.Module, weights: Weights, folder: Path) -> None:
    expected = {key: tuple(value.shape) for key, value in policy.state_dict().items()}
    missing = expected.keys() - weights.keys()
    unexpected = weights.keys() - expected.keys()
    misshapen = [
        f"{key} is {tuple(weights[key].shape)}, expected {shape}"
        for key, shape in expected.items()
        if key in weights and tuple(weights[key].shape) != shape
    ]
    problems = [
        _several(label, keys)
        for label, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if keys
    ]
    if problems:
        raise CheckpointError(f"{folder} does not fit its config.json; {'; '.join(problems)}")


def _several(label: str, keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {label}: {', '.join(names[:_SHOWN]) or 'none'}{more}"


def _take(state: Weights, prefix: str) -> Weights:
    return {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}


def _write_weights(folder: Path, state: Weights, max_shard_bytes: int) -> None:
    shards: list[Weights] = [{}]
    size = 0
    for key in sorted(state):
        tensor_bytes = state[key].numel() * state[key].element_size()
        if shards[-1] and size + tensor_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = state[key]
        size += tensor_bytes
    for stale in [*folder.glob("model-*-of-*.safetensors"), folder / INDEX, folder / WEIGHTS]:
        stale.unlink(missing_ok=True)
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(value.numel() * value.element_size() for value in state.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
