import sys
import types

import pytest

from rlinf_plugins.core.errors import PatchRefusedError
from rlinf_verl import patches
from rlinf_verl.patches import PatchSpec


def answer() -> int:
    return 41


def other_answer() -> int:
    return 7


def build(original):
    def patched() -> int:
        return original() + 1

    return patched


@pytest.fixture
def target(monkeypatch):
    module = types.ModuleType("patch_target")
    module.answer = answer
    monkeypatch.setitem(sys.modules, "patch_target", module)
    monkeypatch.setattr(patches, "_originals", {})
    monkeypatch.setattr(patches, "installed", lambda _: "0.9.1")
    return module


def spec(**changes) -> PatchSpec:
    values = {
        "name": "plus-one",
        "module": "patch_target",
        "attribute": "answer",
        "fingerprint": patches.fingerprint(answer),
        "versions": ">=0.9.1,<0.9.2",
        "needed_when": "testing",
        "reason": "41 is wrong",
        "upstream": "nowhere",
        "remove_when": "it says 42",
        "build": build,
    }
    return PatchSpec(**{**values, **changes})


def test_applies_once_and_reverts(target):
    assert patches.apply(spec())
    assert target.answer() == 42
    assert not patches.apply(spec())
    assert target.answer() == 42
    assert patches.in_force(spec())
    assert patches.revert(spec())
    assert target.answer is answer
    assert not patches.revert(spec())
    assert not patches.in_force(spec())


@pytest.mark.parametrize("version", ["0.9.0", "0.9.2", "1.0", None])
def test_refuses_other_versions(target, monkeypatch, version):
    monkeypatch.setattr(patches, "installed", lambda _: version)
    with pytest.raises(PatchRefusedError, match=r"plus-one.*41 is wrong"):
        patches.apply(spec())
    assert target.answer is answer


def test_refuses_another_source(target):
    target.answer = other_answer
    with pytest.raises(PatchRefusedError, match=patches.fingerprint(answer)):
        patches.apply(spec())
    assert target.answer is other_answer
    assert "source differs" in patches.would_apply(spec())


def test_refuses_when_somebody_wrapped_after_us(target):
    patches.apply(spec())
    target.answer = other_answer
    with pytest.raises(PatchRefusedError, match="replaced after"):
        patches.apply(spec())
    with pytest.raises(PatchRefusedError, match="revert that change first"):
        patches.revert(spec())
    assert target.answer is other_answer


def test_fingerprint_follows_the_named_source(target):
    target.Holder = type("Holder", (), {"method": other_answer})
    changed = spec(source_of="Holder.method", fingerprint=patches.fingerprint(other_answer))
    assert patches.apply(changed)
    assert target.answer() == 42


@pytest.mark.slow
def test_the_shipped_patches_match_the_installed_verl():
    import verl  # noqa: F401

    from rlinf_verl.cpu.patches import CPU_PATCHES

    assert {spec.name: patches.would_apply(spec) for spec in CPU_PATCHES} == {
        "single-gloo-backend": "",
        "unpinned-offload": "",
        "value-head-attention": "",
    }
