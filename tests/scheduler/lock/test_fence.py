"""The fence: old tokens are refused, whoever shows them and from whichever process."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from rlinf_plugins.core.clock import ManualClock, monotonic
from rlinf_plugins.core.errors import NotFreedError, StaleTokenError
from rlinf_plugins.scheduler.lock.fence import FileFence, MemoryFence, Permit


@pytest.fixture(params=["memory", "file"])
def fence(request, tmp_path):
    clock = ManualClock(50.0)
    made = MemoryFence(clock) if request.param == "memory" else FileFence(tmp_path / "fence", clock=clock)
    return made, clock


def test_a_newer_token_shuts_out_the_older_for_good(fence):
    fence, _ = fence
    old, new = Permit({"gpu:0": 5}, "old"), Permit({"gpu:0": 6}, "new")
    with fence.admit(old, ["gpu:0"]):
        pass
    fence.seal(new)
    with pytest.raises(StaleTokenError, match="old comes to gpu:0 with token 5, but 6"):
        fence.admit(old, ["gpu:0"]).__enter__()
    with fence.admit(new, ["gpu:0"]):
        pass


def test_a_permit_covers_only_its_devices(fence):
    fence, _ = fence
    with pytest.raises(StaleTokenError, match="holds no lease on gpu:1; its permit is for gpu:0"):
        fence.admit(Permit({"gpu:0": 5}, "a"), ["gpu:0", "gpu:1"]).__enter__()


def test_a_refusal_on_one_device_leaves_the_others_untouched(fence):
    fence, _ = fence
    fence.seal(Permit({"gpu:1": 9}, "b"))
    with pytest.raises(StaleTokenError):
        fence.seal(Permit({"gpu:0": 7, "gpu:1": 7}, "a"))
    fence.seal(Permit({"gpu:0": 6}, "c"))


def test_a_lease_that_ran_out_is_refused_even_before_its_successor_comes(fence):
    fence, clock = fence
    permit = Permit({"gpu:0": 5}, "a", not_after=60.0, host=socket.gethostname())
    fence.seal(permit)
    clock.advance(10.0)
    with pytest.raises(StaleTokenError, match="ran out 0 s ago"):
        fence.seal(permit)
    fence.seal(Permit({"gpu:0": 5}, "a", not_after=60.0, host="another machine, another clock"))


def test_moves_of_two_threads_do_not_overlap(tmp_path):
    fence = FileFence(tmp_path)
    inside, entered = [], threading.Event()

    def move():
        with fence.admit(Permit({"b": 2, "a": 2}, "second"), ["b", "a"]):
            inside.append("second")

    with fence.admit(Permit({"a": 1, "b": 1}, "first"), ["a", "b"]):
        thread = threading.Thread(target=lambda: (entered.set(), move()))
        thread.start()
        entered.wait()
        inside.append("first")
    thread.join()
    assert inside == ["first", "second"]


MOVER = """
import sys, time
from pathlib import Path
from rlinf_plugins.scheduler.lock.fence import FileFence, Permit
with FileFence(Path(sys.argv[1])).admit(Permit({"gpu/0": 3}, "mover"), ["gpu/0"]):
    print("moving", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def mover(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", MOVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "moving\n"
    yield process
    process.kill()
    process.wait()


def test_a_process_stopped_in_the_middle_of_a_move_is_named(mover, tmp_path):
    os.kill(mover.pid, signal.SIGSTOP)
    with pytest.raises(NotFreedError, match=f"process {mover.pid} has been moving bytes on gpu/0"):
        FileFence(tmp_path, patience_s=0.2).seal(Permit({"gpu/0": 4}, "next"))


def test_a_process_killed_in_the_middle_of_a_move_blocks_nobody(mover, tmp_path):
    mover.kill()
    mover.wait()
    start = monotonic()
    FileFence(tmp_path, patience_s=5.0).seal(Permit({"gpu/0": 4}, "next"))
    assert monotonic() - start < 5.0
    with pytest.raises(StaleTokenError):
        FileFence(tmp_path).seal(Permit({"gpu/0": 3}, "mover"))
