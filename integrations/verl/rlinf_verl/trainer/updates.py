"""The optimizer steps of one training step, with the first one's gradients summed while rollouts still run."""

from collections.abc import Mapping
from typing import Any, Protocol

from rlinf_verl.trainer.accumulate import Denominator


class Group(Protocol):
    """A worker group whose gradients can be summed in parts; see :mod:`rlinf_verl.trainer.workers`."""

    def begin_mini_batch(self) -> Any:
        """Start a mini-batch."""
        ...

    def accumulate(self, data: Any) -> Any:
        """Add the gradients of a chunk."""
        ...

    def apply_gradients(self, denominator: Denominator, rows: int, last: bool) -> Any:
        """Apply them; returns one metrics mapping per rank, or one mapping."""
        ...


class StreamedUpdate:
    """Mini-batches of one worker group.

    The first mini-batch of the first epoch is summed as its chunks come. The others are kept and run in order once
    :meth:`finish` says that everything is there: before the first optimizer step every row has its old log-prob, value
    and advantage, as in veRL's own step.

    Args:
        group: The actor's or the critic's worker group.
        mini_batches: Number of mini-batches.
        epochs: veRL's ``ppo_epochs``; only the first is streamed.
        denominator: What the loss is divided by.
        settings: veRL's settings of a batch (``calculate_entropy``, ``temperature``, ...).
    """

    def __init__(
        self,
        group: Group,
        *,
        mini_batches: int,
        epochs: int,
        denominator: Denominator,
        settings: Mapping[str, Any],
    ) -> None:
        self._group = group
        self.mini_batches = mini_batches
        self._chunks: list[list[Any]] = [[] for _ in range(mini_batches)]
        self._epochs = epochs
        self._denominator = denominator
        self._settings = settings
        self.streamed_rows = 0

    def add(self, mini_batch: int, chunk: Any) -> bool:
        """Take a chunk (a ``KVBatchMeta``, or rows) of mini-batch number ``mini_batch``.

        Returns:
            Whether its gradients were summed now.
        """
        self._chunks[mini_batch].append(chunk)
        if mini_batch:
            return False
        if len(self._chunks[0]) == 1:
            self._group.begin_mini_batch()
        self._group.accumulate(self._with_settings(chunk))
        self.streamed_rows += len(chunk)
        return True

    def finish(self, rows: int) -> list[dict[str, Any]]:
        """Take all optimizer steps.

        Args:
            rows: Rows of one mini-batch as veRL counts them, failed trajectories included.

        Returns:
            The metrics of each.
        """
        steps = [(epoch, number) for epoch in range(self._epochs) for number in range(len(self._chunks))]
        metrics = []
        for position, (epoch, number) in enumerate(steps):
            if epoch or number or not self._chunks[0]:
                self._group.begin_mini_batch()
                for chunk in self._chunks[number]:
                    self._group.accumulate(self._with_settings(chunk))
            applied = self._group.apply_gradients(self._denominator, rows, position == len(steps) - 1)
            metrics.append(next(part for part in applied if part) if isinstance(applied, list) else applied)
        return metrics

    def _with_settings(self, chunk: Any) -> Any:
        if hasattr(chunk, "extra_info"):
            chunk.extra_info = dict(self._settings)
        else:
            from verl.utils import tensordict_utils as tu

            chunk = chunk.clone()
            tu.assign_non_tensor(chunk, **self._settings)
        return chunk
