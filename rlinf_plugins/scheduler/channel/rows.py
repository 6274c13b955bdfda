"""Batches as rows: a batch that was put as a whole is delivered in other sizes without copying what stays together."""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def length(batch: Any) -> int:
    """Number of rows of a mapping of columns, a TensorDict, or anything with a length.

    Raises:
        ValueError: Columns differ in length, or there are none.
    """
    if not _is_plain_mapping(batch):
        return len(batch)
    lengths = {name: len(column) for name, column in batch.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"the columns of a batch must have one length, got {lengths}")
    return next(iter(lengths.values()))


def cut(batch: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` (excluded), as views where the columns are tensors or arrays."""
    if _is_plain_mapping(batch):
        return {name: column[start:stop] for name, column in batch.items()}
    return batch[start:stop]


def join(parts: Sequence[Any]) -> Any:
    """Put parts of batches of one type together; a single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if _is_plain_mapping(first):
        return {name: join([part[name] for part in parts]) for name in first}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and (isinstance(first, torch.Tensor) or _is_tensordict(first)):
        return torch.cat(list(parts))
    if numpy is not None and isinstance(first, numpy.ndarray):
        return numpy.concatenate(parts)
    return [row for part in parts for row in part]


def gather(places: Sequence[tuple[int, int, Any]]) -> Any:
    """Put rows together from where they are, cutting each run of neighbours once.

    Args:
        places: Identity of the batch, row number and batch, for each row wanted, in order.
    """
    ends = [i + 1 for i, (a, b) in enumerate(pairwise(places)) if a[0] != b[0] or a[1] + 1 != b[1]]
    bounds = [0, *ends, len(places)]
    return join([cut(places[i][2], places[i][1], places[j - 1][1] + 1) for i, j in pairwise(bounds)])


def _is_plain_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and not _is_tensordict(value)


def _is_tensordict(value: Any) -> bool:
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(value, tensordict.TensorDictBase)
