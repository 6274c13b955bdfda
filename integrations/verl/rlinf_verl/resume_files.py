"""What can be said of the checkpoint a job resumes from before Ray starts, without reading its tensors."""

import os
import re
import zipfile
from pathlib import Path

from omegaconf import DictConfig

from rlinf_plugins.core.errors import ConfigError, MissingAssetError

_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_STEP = re.compile(r"global_step_(\d+)")


def check_resume(config: DictConfig) -> None:
    """Check that the checkpoint the job will resume from is complete and fits its devices.

    Raises:
        MissingAssetError: The checkpoint or one of its files is absent.
        ConfigError: A file is truncated, or the checkpoint was written by another number of devices.
    """
    folder = _folder(config)
    if folder is None or not (folder / "actor").is_dir():
        return  # nothing to resume, or a layout that is not FSDP's
    shards = {path.name: _SHARD.fullmatch(path.name) for path in (folder / "actor").glob("model_world_size_*.pt")}
    worlds = sorted({int(match[1]) for match in shards.values() if match})
    devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if worlds and devices not in worlds:
        raise ConfigError(
            f"{folder} was written by {worlds[0]} device(s) and this job trains on {devices}; set "
            f"trainer.n_gpus_per_node x trainer.nnodes to {worlds[0]}{_others(folder)}"
        )
    if worlds and config.trainer.nnodes == 1:
        names = [f"model_world_size_{devices}_rank_{rank}.pt" for rank in range(devices)]
        absent = [name for name in names if name not in shards]
        if absent:
            raise MissingAssetError(f"{folder / 'actor'} lacks {', '.join(absent)}{_others(folder)}")
    for path in sorted(folder.rglob("*.pt")):
        if not zipfile.is_zipfile(path):
            raise ConfigError(
                f"{path} is truncated or no file of torch.save ({path.stat().st_size} bytes); copy the checkpoint "
                f"again{_others(folder)}"
            )


def _folder(config: DictConfig) -> Path | None:
    """Return the checkpoint's folder, found as veRL finds it; None where the job starts anew."""
    trainer = config.trainer
    mode = trainer.get("resume_mode", "disable")
    if mode == "resume_path":
        folder = Path(str(trainer.resume_from_path))
        if not folder.is_dir():
            raise MissingAssetError(
                f"trainer.resume_from_path={trainer.resume_from_path} is not a folder; give a global_step_N folder"
            )
        return folder
    saved = Path(os.path.expanduser(str(trainer.get("default_local_dir") or "")))
    latest = saved / "latest_checkpointed_iteration.txt"
    if mode != "auto" or not latest.is_file():
        return None
    step = latest.read_text().strip()
    folder = saved / f"global_step_{step}"
    if not step.isdigit() or not folder.is_dir():
        raise MissingAssetError(f"{latest} names step {step!r}, and {folder} is not there{_others(folder)}")
    return folder


def _others(folder: Path) -> str:
    """Say how to go on without this checkpoint."""
    names = {path: _STEP.fullmatch(path.name) for path in folder.parent.glob("global_step_*") if path != folder}
    steps = {int(match[1]): path for path, match in names.items() if match}
    if not steps:
        return ", or start anew with trainer.resume_mode=disable"
    return f", or resume from another: trainer.resume_mode=resume_path trainer.resume_from_path={steps[max(steps)]}"
