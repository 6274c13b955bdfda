"""Finished trajectories on disk, so that a step which is killed does not generate them again.

veRL's checkpoints are taken between steps; a step that is resumed begins with the weights it began with before. What
its agent loops had finished is then still on-policy and is taken over. That holds for the one step after a checkpoint,
under the same model, data, reward and sampling; everything else is deleted.
"""

import hashlib
import os
import pickle
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlinf_verl.say import say

_DEFINING = ("actor_rollout_ref.model", "actor_rollout_ref.rollout", "data", "reward")


def folder_of(config: Any) -> Path:
    """Return where a job keeps finished trajectories."""
    return Path(str(config.trainer.default_local_dir)) / "m2flow" / "finished"


class KeepsFinished:
    """A base of trainers: opens a folder for the trajectories of each step that could be resumed."""

    config: Any
    global_steps: int
    _resumed = False

    def on_step_begin(self) -> None:
        """Delete what no resumed step could use, and open this step's folder if it could be resumed."""
        super().on_step_begin()  # type: ignore[misc]
        folder, trainer = folder_of(self.config), self.config.trainer
        mine = folder / f"step_{self.global_steps}-{_digest(self.config)}"
        first, self._resumed = not self._resumed, True
        for other in folder.glob("step_*"):
            if other != mine or (first and trainer.resume_mode == "disable"):
                shutil.rmtree(other, ignore_errors=True)
        if trainer.save_freq <= 0 or _last_checkpoint(trainer.default_local_dir) != self.global_steps - 1:
            return
        mine.mkdir(parents=True, exist_ok=True)
        kept = sum(1 for _ in mine.glob("*.pickle"))
        if kept:
            say(f"step {self.global_steps} was interrupted: {kept} finished trajectories are taken over")


class FinishedStore:
    """A worker's access to the trajectories of the step that runs.

    Equal prompts in one batch are told apart by the order in which this worker meets them.

    Args:
        folder: Where the job keeps them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uids: dict[tuple[int, str], list[str]] = defaultdict(list)

    def load(self, row: dict[str, Any]) -> Any | None:
        """Return the trajectory that an interrupted run finished for this row of the data and session, if any."""
        path = self._path(row)
        if path is None or not path.exists():
            return None
        return pickle.loads(path.read_bytes())

    def save(self, row: dict[str, Any], outputs: Any) -> None:
        """Keep a finished trajectory, where its step could be resumed."""
        path = self._path(row)
        if path is not None:
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(pickle.dumps(outputs))
            partial.replace(path)  # never half written

    def _path(self, row: dict[str, Any]) -> Path | None:
        step = int(row["global_steps"])
        found = next(self._folder.glob(f"step_{step}-*"), None)
        if found is None:
            return None
        prompt = repr((row.get("raw_prompt"), row.get("index"), row.get("data_source")))
        digest = hashlib.sha1(prompt.encode(), usedforsecurity=False).hexdigest()[:20]
        uids = self._uids[step, digest]
        if row["uid"] not in uids:
            uids.append(row["uid"])
        return found / f"{digest}-{uids.index(row['uid'])}-{row['session_id']}.pickle"


def _digest(config: Any) -> str:
    """Identify what trajectories depend on beside the weights."""
    text = "".join(OmegaConf.to_yaml(OmegaConf.select(config, key), resolve=True) for key in _DEFINING)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12]


def _last_checkpoint(folder: str) -> int:
    """Return the step of the last checkpoint; 0: there is none, and a resumed job starts from the beginning."""
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0
