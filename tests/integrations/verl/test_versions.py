import pytest

from rlinf_plugins.core.errors import UnsupportedVersionError
from rlinf_verl import versions


@pytest.mark.parametrize(
    ("found", "supported", "good"),
    [("0.9.1", ">=0.9.1,<0.9.2", True), ("0.9.2", ">=0.9.1,<0.9.2", False), ("2.14.1+cu130", ">=2.8", True)],
)
def test_ranges(found, supported, good):
    assert versions.in_range(found, supported) is good


def test_the_installed_host_is_supported():
    versions.check_host()


@pytest.mark.parametrize("found", ["0.9.0", "0.10.0", None])
def test_another_host_is_refused_with_the_range(monkeypatch, found):
    monkeypatch.setattr(versions, "installed", lambda _: found)
    with pytest.raises(UnsupportedVersionError, match=rf">=0\.9\.1,<0\.9\.2, found {found or 'none'}"):
        versions.check_host()


def test_the_declared_range_is_the_checked_one():
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    declared = {r.name: r.specifier for r in map(Requirement, requires("rlinf-plugins") or []) if r.marker is None}
    for name in ("verl", "transformers"):
        assert set(str(declared[name]).split(",")) == set(versions.SUPPORTED[name].split(","))
