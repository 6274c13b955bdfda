"""Arrays that several processes share, without a name that could outlive them.

The memory is an anonymous file: it is passed on as a file descriptor and vanishes with its last user, however that
user ends. Nothing is left behind after SIGKILL, and nothing has to be cleaned up.
"""

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_ALIGNMENT = 64  # a cache line


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """Shape and type of an array.

    Attributes:
        shape: Shape of the array.
        dtype: NumPy name of the element type, e.g. ``"uint8"``.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def rows(self, count: int) -> "Field":
        """Return the field of ``count`` stacked arrays of this kind."""
        return Field(shape=(count, *self.shape), dtype=self.dtype)


class SharedArrays:
    """Named arrays over one shared, zero-initialised memory.

    Args:
        fd: Descriptor from :func:`anonymous_file`; stays the caller's to close. Every process builds its own
            ``SharedArrays`` over the same descriptor and the same fields.
        fields: The arrays, in a fixed order.

    Attributes:
        arrays: Writable views, by name; they keep the memory alive.
        nbytes: Size of the memory.
    """

    def __init__(self, fd: int, fields: Mapping[str, Field]) -> None:
        offsets: dict[str, int] = {}
        end = 0
        for name, field in fields.items():
            offsets[name] = end
            end += -(-field.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = max(end, _ALIGNMENT)
        if os.fstat(fd).st_size < self.nbytes:
            os.ftruncate(fd, self.nbytes)
        memory = mmap.mmap(fd, self.nbytes)
        self.arrays: dict[str, np.ndarray] = {
            name: np.ndarray(field.shape, field.dtype, memory, offsets[name]) for name, field in fields.items()
        }


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new anonymous file in memory; ``name`` shows up only in ``/proc``."""
    return os.memfd_create(name, os.MFD_CLOEXEC)
