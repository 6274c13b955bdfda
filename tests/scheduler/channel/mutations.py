"""Known-bad one-line changes of the channel; the suite must fail on each.

    python tests/scheduler/channel/mutations.py

Copies the package, applies one change at a time and runs the fast tests on the copy. Exits non-zero if a mutant
survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CHANNEL = "rlinf_plugins/scheduler/channel"
TESTS = ["test_core.py", "test_journal.py", "test_payload.py", "test_peer_faults.py", "test_direct.py", "test_model.py"]

MUTATIONS = [
    ("a repeated put is admitted again", "intake.py", "if base < producer.claimed:", "if False:"),
    (
        "the bound on items is off by one",
        "intake.py",
        "state.items >= config.max_items",
        "state.items > config.max_items",
    ),
    ("the bound on bytes is not checked", "intake.py", "state.bytes + entry.nbytes > config.max_bytes", "False"),
    (
        "a refused put is confirmed when repeated",
        "intake.py",
        "for low, high in producer.refused:",
        "for low, high in ():",
    ),
    ("a stale acknowledgement is accepted", "leases.py", "if number in state.committed:", "if True:"),
    ("what a dead consumer held is dropped", "leases.py", "queue.give_back(keep)", "queue.give_back([])"),
    ("what comes back goes to the end", "queue.py", "if not self.ready or (back", "if True or (back"),
    ("a heavy head is never delivered", "queue.py", "if over and size:", "if over:"),
    ("tails are not flushed", "outlet.py", "flush = stuck or bool(self._state.closed)", "flush = stuck"),
    ("the stream ends too early", "outlet.py", "if all(holder.waiting for holder in holders):", "if True:"),
    (
        "small batches overtake large ones",
        "outlet.py",
        "key=lambda w: (w.consumer.load, w.ticket)",
        "key=lambda w: -w.ticket",
    ),
    ("keys are not reclaimed", "state.py", "del self.queues[queue.key]", "pass"),
    ("alarms of answered gets stay", "outlet.py", "self._state.alarms.cancel(waiter.alarm)", "pass"),
    (
        "groups are delivered before they are complete",
        "queue.py",
        "if group.arrived < group.size:",
        "if group.arrived < 1:",
    ),
    ("stale items are delivered", "outlet.py", "if flush or queue.may_fill(granularity):", "if False:"),
    ("a batch crosses the end of a step", "queue.py", "fresh > room or unit.step", "False or unit.step"),
    ("payloads are not released", "state.py", "self.released.append(item.payload)", "pass"),
    (
        "a stopped broker declares everybody dead",
        "members.py",
        "if due is not None and now - due > lease / 4:",
        "if False:",
    ),
    ("a cancelled get keeps its batch", "outlet.py", "if d.request == request]:", "if False]:"),
    ("the journal's checksum is not checked", "journal.py", "or zlib.crc32(body) != checksum", ""),
    ("readers cannot write", "segments.py", "mmap.ACCESS_COPY", "mmap.ACCESS_READ"),
    ("a segment goes with its first row", "files.py", "if left > 0:", "if False:"),
    ("tensors are never let go", "host.py", "self._errands.drop(held.owner, held.number)", "pass"),
    ("what a dead producer held is waited for", "host.py", "member is None or member.lapsed", "member is None"),
    (
        "the original is kept, not a copy",
        "shelf.py",
        "tensor.detach().clone(",
        "torch.Tensor.contiguous(tensor.detach(), ",
    ),
    ("nobody is named", "outlet.py", 'self._state.report("stuck"', 'str("stuck"'),
]


def copy_to(folder: Path) -> None:
    for part in ("rlinf_plugins", "tests/scheduler/channel", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, folder / file)


def survives(folder: Path, file: str, old: str, new: str) -> bool:
    """Whether the suite passes on the mutant."""
    path = folder / CHANNEL / file
    original = path.read_text()
    if original.count(old) != 1:
        raise SystemExit(f"{file} has {original.count(old)} places that read {old!r}; correct the list")
    path.write_text(original.replace(old, new))
    tests = [str(folder / "tests/scheduler/channel" / name) for name in TESTS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not slow",
        "--timeout",
        "60",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "RLINF_TEST_SEED": "1"}
    try:
        run = subprocess.run(
            [*command, *tests], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
        )
        passed = run.returncode == 0
    except subprocess.TimeoutExpired:
        passed = False
    finally:
        path.write_text(original)
    return passed


def main() -> None:
    chosen = [m for m in MUTATIONS if not sys.argv[1:] or any(word in m[0] for word in sys.argv[1:])]
    alive = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_to(folder)
        for what, *change in chosen:
            if survives(folder, *change):
                alive.append(what)
            print(f"{'SURVIVES' if what in alive else 'killed':9} {what}", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} killed")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
