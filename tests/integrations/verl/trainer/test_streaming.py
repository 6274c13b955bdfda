"""The streamed step against veRL's own, on gloo without Ray: one and two ranks, every case of ``streaming_job.py``."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("streaming_job.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def cases():
    spec = importlib.util.find_spec("verl")
    assert spec, "veRL is not installed"
    text = SCRIPT.read_text()
    scope: dict = {}
    exec(text[text.index("PROMPTS, ") : text.index("\n\ndef make_rows")], scope)
    return list(scope["CASES"])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Number of ranks -> what ``streaming_job.py`` wrote."""
    from rlinf_verl import tiny_text

    folder = tmp_path_factory.mktemp("streaming")
    tiny_text.make(folder, train_rows=1, test_rows=1)
    found = {}
    for ranks in (1, 2):
        out = folder / str(ranks)
        out.mkdir()
        run(folder / "model", out, ranks)
        found[ranks] = json.loads((out / "result.json").read_text())
    return found


def run(model: Path, out: Path, ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "VERL_PLATFORM": "cpu",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-W", "ignore", str(SCRIPT), str(model), str(out)],
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", cases())
def test_a_streamed_step_is_verls_own(results, case, ranks):
    found = results[ranks][case]
    assert found["moved"] > 1e-3, "the step changed nothing, so equality proves nothing"
    assert found["actor"] <= 1e-5
    assert found["critic"] <= 1e-5
    mine, theirs = found["norms"]
    assert mine == pytest.approx(theirs, rel=1e-5)
