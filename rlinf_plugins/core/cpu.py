"""What this machine's processor computes fast."""

import functools
from pathlib import Path

_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""As Linux names them: x86 with tiles, x86 without, Arm."""


@functools.cache
def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Say whether the processor multiplies bfloat16 matrices itself.

    Where it does not, they are emulated: on a Zen 3 core seven times slower than float32, where a core with tiles is
    many times faster. Machines without ``/proc/cpuinfo`` count as not.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return not _BF16_FLAGS.isdisjoint(next(flags, []))
