"""Gradients of one mini-batch, summed chunk by chunk on a training worker.

veRL normalises the loss by what it is handed: the tokens of a batch (``token-mean``) or the rows of the mini-batch
(``seq-mean-*``). A chunk knows neither for the whole mini-batch, so every chunk is given the denominator 1 and the sum
of the gradients is divided once, before they are clipped and applied. That is veRL's own step up to rounding.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from codetiming import Timer
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.utils.py_functional import append_to_dict

Denominator = Literal["tokens", "rows", "none"]
"""What a loss is divided by: the mini-batch's tokens (``token-mean``), its rows (``seq-mean-*``), nothing."""


def per_unit(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a veRL loss function that divides by one token and one row whatever the batch holds."""

    def unit_loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        tu.assign_non_tensor(data, batch_num_tokens=1, global_batch_size=1)
        return loss_function(model_output=model_output, data=data, dp_group=dp_group)

    return unit_loss


class GradientSum:
    """Sums the gradients of chunks in a veRL engine and applies them once.

    All ranks of the engine's process groups call each method together.

    Args:
        engine: veRL's training engine; FSDP2 is what this was proven with.
        loss_function: veRL's loss (``ppo_loss``, ``value_loss``).
    """

    def __init__(self, engine: Any, loss_function: Callable[..., Any]) -> None:
        self._engine = engine
        self._loss = per_unit(loss_function)
        self._clear()

    def _clear(self) -> None:
        self._tokens = 0.0
        self._losses: list[float] = []
        self._metrics: dict[str, Any] = {}
        self._lengths: list[int] = []
        self.seconds = 0.0

    def begin(self) -> None:
        """Start a mini-batch: forget gradients and metrics of an unfinished one."""
        self._clear()
        with self._engine.train_mode(zero_grad_on_exit=True):
            pass

    def add(self, data: Any) -> None:
        """Add the gradients of a chunk.

        Args:
            data: This rank's rows with veRL's batch settings; ranks hold equally many rows.
        """
        with self._engine.train_mode(zero_grad_on_exit=False), Timer(name="forward_backward", logger=None) as timer:
            output = self._engine.forward_backward_batch(data, loss_function=self._loss, forward_only=False)
        self._tokens += tu.get(data, key="batch_num_tokens")  # summed over ranks by the engine
        self._losses += output["loss"]
        append_to_dict(self._metrics, output["metrics"])
        if "input_ids" in data:
            self._lengths += data["input_ids"].offsets().diff().tolist()
        self.seconds += timer.last

    def apply(self, denominator: Denominator, rows: int) -> dict[str, Any]:
        """Divide, clip and apply the gradients.

        Args:
            denominator: What the loss is divided by.
            rows: Rows of the mini-batch over all ranks.

        Returns:
            ``loss`` (one number per micro-batch), ``metrics`` and ``lengths`` (tokens of each of this rank's rows), as
            veRL's engine reports them for a mini-batch.
        """
        total = {"tokens": self._tokens, "rows": rows, "none": 1}[denominator]
        # veRL divides by zero where nothing counts, finds the gradients not finite and leaves the parameters alone.
        scale = 1.0 / total if total else math.nan
        with self._engine.train_mode(zero_grad_on_exit=True):
            for parameter in self._engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            grad_norm = self._engine.optimizer_step()
        for metric in self._metrics.values():
            if isinstance(metric, Metric) and metric.aggregation is AggregationType.SUM:
                metric.values = [value * scale for value in metric.values]
        output = {
            "loss": [loss * scale for loss in self._losses],
            "metrics": {**self._metrics, "grad_norm": grad_norm},
            "lengths": self._lengths,
        }
        self._clear()
        return output


def fitting_micro_batch(rows: int, limit: int) -> int:
    """Return the largest micro-batch of at most ``limit`` rows into which ``rows`` rows of a rank divide evenly."""
    return next(size for size in range(min(rows, limit), 0, -1) if rows % size == 0)


def total_over_ranks(lengths: list[int], group: Any) -> list[int]:
    """Gather the row lengths of all data-parallel ranks."""
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, lengths, group)
    return [length for part in gathered for length in part]
