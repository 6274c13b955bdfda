import subprocess
import sys
import textwrap

import pytest

from rlinf_plugins.core.errors import PluginNotLoadedError
from rlinf_verl import handshake


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def test_require_names_the_switch_when_nothing_attached(monkeypatch):
    monkeypatch.setattr(handshake, "_attached", False)
    monkeypatch.setattr(handshake, "_failure", None)
    with pytest.raises(PluginNotLoadedError, match="VERL_USE_EXTERNAL_PLUGINS"):
        handshake.require()


def test_require_carries_the_recorded_cause(monkeypatch, capsys):
    monkeypatch.setattr(handshake, "_failure", None)
    handshake.record_failure(OSError("disk on fire"))
    assert "disk on fire" in capsys.readouterr().err
    with pytest.raises(PluginNotLoadedError, match="OSError: disk on fire") as caught:
        handshake.require()
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.slow
def test_verl_loads_the_plugin():
    done = run("import verl; from rlinf_verl import handshake; print(handshake.attached())")
    assert done.stdout.strip().endswith("True"), done.stderr


@pytest.mark.slow
def test_a_broken_plugin_is_loud_and_its_first_use_fails():
    done = run(
        """
        import sys
        import types
        broken = types.ModuleType("rlinf_verl.attach")
        def attach():
            raise RuntimeError("half installed")
        broken.attach = attach
        sys.modules["rlinf_verl.attach"] = broken
        import rlinf_verl
        rlinf_verl.attach = broken
        import verl
        from omegaconf import OmegaConf
        from verl.utils.config import validate_config
        config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "m2flow"}}})
        validate_config(config=config, use_reference_policy=False, use_critic=False)
        """
    )
    assert done.returncode != 0
    assert "[rlinf-plugins] the veRL plugin failed to load: RuntimeError: half installed" in done.stderr
    assert "PluginNotLoadedError" in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_disabled_plugin_leaves_our_trainer_unknown():
    done = run(
        "from verl.trainer.ppo.v1 import get_trainer_cls; get_trainer_cls('m2flow')",
        VERL_USE_EXTERNAL_PLUGINS="none",
        VERL_PLATFORM="",
    )
    assert done.returncode != 0
    assert "Unknown trainer 'm2flow'" in done.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_the_plugin_is_loaded_in_a_ray_worker(ray_session):
    @ray_session.remote(num_cpus=0)
    def attached() -> bool:
        import verl  # noqa: F401

        from rlinf_verl import handshake

        return handshake.attached()

    assert ray_session.get(attached.remote(), timeout=120)
