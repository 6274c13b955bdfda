import pytest

from rlinf_plugins.core.errors import MissingExtraError
from rlinf_plugins.core.extras import require


def test_returns_the_module():
    assert require("json", "any").loads("1") == 1


def test_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"rlinf-plugins\[search\]"):
        require("surely_not_a_module", "search")


def test_a_broken_module_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import also_missing_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="also_missing_module"):
        require("half_installed", "search")
