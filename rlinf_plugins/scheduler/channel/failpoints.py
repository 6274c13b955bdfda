"""Named places where a test has this process stopped or killed; they cost one comparison otherwise.

``RLINF_FAILPOINTS="broker.applied=kill@100,producer.packed=stop@3"`` kills or stops the process at the hundredth and
third passage.
"""

import os
import signal

NAMES = (
    "producer.packed",
    "producer.sent",
    "consumer.received",
    "consumer.unpacked",
    "broker.received",
    "broker.applied",
    "broker.journalled",
    "broker.replied",
)
"""Every place, in the order an item passes it."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_armed: dict[str, tuple[int, int]] = {}


def arm(specification: str) -> None:
    """Arm failpoints; replaces what was armed before.

    Args:
        specification: ``name=kill@n`` or ``name=stop@n``, separated by commas.

    Raises:
        ValueError: A name or action that does not exist.
    """
    _armed.clear()
    for part in filter(None, specification.split(",")):
        name, _, action = part.partition("=")
        what, _, count = action.partition("@")
        if name not in NAMES or what not in _SIGNALS:
            raise ValueError(f"unknown failpoint {part!r}; names: {', '.join(NAMES)}; actions: kill@n, stop@n")
        _armed[name] = (int(count or 1), _SIGNALS[what])


def hit(name: str) -> None:
    """Pass a failpoint."""
    if name in _armed:
        left, what = _armed[name]
        if left > 1:
            _armed[name] = (left - 1, what)
            return
        del _armed[name]
        os.kill(os.getpid(), what)


arm(os.environ.get("RLINF_FAILPOINTS", ""))
