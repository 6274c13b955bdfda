"""The doctor's lines about search."""

import importlib.util
import subprocess
import sys

from rlinf_plugins.tools.checks import checks


def test_each_package_has_a_line(monkeypatch):
    results = list(checks())
    assert {r.feature for r in results} == {"search"}
    assert {r.status for r in results} <= {"ok", "absent"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    absent = list(checks())
    assert {r.status for r in absent} == {"absent"}
    assert all("rlinf-plugins[search]" in r.fix for r in absent)


def test_the_package_imports_nothing_heavy():
    heavy = "{'ray', 'torch', 'bm25s', 'faiss', 'fastapi'}"
    code = f"import rlinf_plugins.tools, sys; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
