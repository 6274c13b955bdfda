"""What can be said of a model's folder before Ray starts, without reading its weights."""

import json
import os
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlinf_plugins.core.errors import ConfigError, MissingAssetError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_model(config: DictConfig) -> None:
    """Check that the model's folder holds a readable configuration and complete weights.

    Raises:
        MissingAssetError: The folder, its ``config.json`` or a weight file is absent.
        ConfigError: A file is corrupt.
    """
    text = str(config.actor_rollout_ref.model.path)
    path = Path(os.path.expanduser(text))
    if "://" in text or (not path.exists() and _is_hub_name(text)):
        return  # remote storage or a hub name: veRL fetches it
    if not path.is_dir():
        raise MissingAssetError(
            f"actor_rollout_ref.model.path={text} is not a folder (looked in {Path.cwd()}); give a folder in Hugging "
            "Face's layout"
        )
    if text.endswith("/"):  # as shells complete it; veRL refuses that, after Ray has started
        config.actor_rollout_ref.model.path = text.rstrip("/")
    if not (path / "config.json").is_file():
        raise MissingAssetError(f"{path} holds no config.json; it is not a Hugging Face model folder")
    _read_json(path / "config.json")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise MissingAssetError(f"{index} lists weight files that are absent: {', '.join(missing)}; copy them too")
    for shard in sorted(path.glob("*.safetensors")):
        _check_safetensors(shard)


def _is_hub_name(text: str) -> bool:
    """Whether a name is a model hub's; one below a folder that exists here is a mistyped path."""
    online = os.environ.get("HF_HUB_OFFLINE") != "1"
    return online and _HUB_NAME.fullmatch(text) is not None and not Path(text).parent.is_dir()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is corrupt: {error}; copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is corrupt: expected a mapping, found {type(value).__name__}")
    return value


def _check_safetensors(path: Path) -> None:
    """A safetensors file is an 8-byte header length, the header, then exactly the bytes the header describes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            raise ConfigError(f"{path} is truncated: {size} bytes do not hold its header; copy the checkpoint again")
        try:
            header = json.loads(file.read(header_size))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is corrupt: unreadable header; copy the checkpoint again") from error
    expected = 8 + header_size + max(ends, default=0)
    if size != expected:
        raise ConfigError(f"{path} is truncated: {size} of {expected} bytes; copy the checkpoint again")
