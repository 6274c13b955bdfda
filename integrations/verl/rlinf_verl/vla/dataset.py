"""The prompts of an embodied job: (task, initial state) pairs.

Set with ``data.custom_cls.path=pkg://rlinf_verl.vla.dataset`` and ``data.custom_cls.name=EpisodeDataset``; what
``data.train_files`` and ``data.val_files`` then hold is a mapping of :class:`Episodes`, not files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError, PoolUsageError
from rlinf_plugins.envs import EnvSpec, InitialState
from rlinf_plugins.envs.desk import check_initial


@dataclass(frozen=True, kw_only=True, slots=True)
class Episodes:
    """Which initial states, e.g. ``data.train_files={tasks: [0], trials: 64}``.

    Attributes:
        trials: Initial states of each task.
        tasks: Indices of the environment's tasks.
        first_trial: First of them; keeps validation apart from training.
        source: Name under which veRL reports validation metrics.
    """

    trials: int
    tasks: list[int] = field(default_factory=lambda: [0])
    first_trial: int = 0
    source: str = "episodes"

    def validate(self, where: str) -> None:
        """Refuse an empty set."""
        if self.trials < 1 or not self.tasks:
            raise ConfigError(f"{where}: trials={self.trials} of tasks={self.tasks} is no episode at all")


class EpisodeDataset(Dataset[dict[str, Any]]):
    """One row a (task, initial state); each trial of every task before the next trial.

    Args:
        data_files: Mapping of :class:`Episodes`.
        tokenizer: Not used; instructions come from the environment.
        config: veRL's ``data`` node.
        processor: Not used.
        max_samples: Most rows; -1 keeps all.
    """

    def __init__(
        self,
        data_files: Mapping[str, Any] | DictConfig,
        tokenizer: Any,
        config: DictConfig,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        plain: Any = OmegaConf.to_container(data_files) if OmegaConf.is_config(data_files) else data_files
        if not isinstance(plain, Mapping):
            raise ConfigError(
                f"with EpisodeDataset, data.train_files and data.val_files are mappings such as "
                f"{{tasks: [0], trials: 64}}, got {plain!r}"
            )
        self._episodes = from_mapping(Episodes, plain, "data.train_files (or val_files)")
        count = self._episodes.trials * len(self._episodes.tasks)
        self._count = count if max_samples < 0 else min(count, max_samples)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        tasks = self._episodes.tasks
        trial, which = divmod(index, len(tasks))
        task, trial = tasks[which], self._episodes.first_trial + trial
        return {
            "raw_prompt": [{"role": "user", "content": f"task {task}, initial state {trial}"}],
            "task": task,
            "trial": trial,
            "index": index,
            "data_source": self._episodes.source,
            "reward_model": {"style": "environment", "ground_truth": None},
        }

    def check(self, spec: EnvSpec) -> None:
        """Refuse rows whose initial state the environments do not have.

        Raises:
            PoolUsageError: A task or an initial state that does not exist.
        """
        for index in {*range(min(len(self), len(self._episodes.tasks))), len(self) - 1}:  # all tasks, the last trial
            row = self[index]
            check_initial(spec, InitialState(task=row["task"], trial=row["trial"]))


def check_episodes(config: DictConfig, spec: EnvSpec) -> None:
    """Refuse prompts that name initial states the environments do not have: such episodes would fail at every step.

    Args:
        config: veRL's whole configuration; validation's prompts count only where the job validates.
        spec: What the environments offer.

    Raises:
        ConfigError: A task or an initial state that does not exist.
    """
    validates = bool(config.trainer.val_before_train) or int(config.trainer.test_freq) > 0
    for part in ("train", *(["val"] if validates else [])):
        files, most = config.data[f"{part}_files"], config.data.get(f"{part}_max_samples", -1)
        if not isinstance(files, Mapping | DictConfig):
            continue  # prompts of another data set
        data = EpisodeDataset(files, None, config.data, max_samples=most)
        try:
            data.check(spec)
        except PoolUsageError as error:
            raise ConfigError(f"data.{part}_files={dict(files)}: {error}") from error
