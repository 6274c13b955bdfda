import json

import pytest
from typer.testing import CliRunner

from rlinf_plugins.cli import build_app
from rlinf_plugins.core import doctor
from rlinf_plugins.core.doctor import CheckResult


def result(**changes) -> CheckResult:
    return CheckResult(**{"feature": "x", "name": "n", "status": "ok", "detail": "d", **changes})


@pytest.fixture
def report(monkeypatch):
    def install(*results):
        class Entry:
            name = "fake"

            def load(self):
                return lambda: iter(results)

        monkeypatch.setattr(doctor.importlib.metadata, "entry_points", _only_checks(Entry()))

    real = doctor.importlib.metadata.entry_points

    def _only_checks(entry):
        return lambda group: [entry] if group == doctor.CHECK_GROUP else real(group=group)

    return install


def run(*arguments: str):
    return CliRunner().invoke(build_app(), ["doctor", *arguments])


def test_all_good(report):
    report(result(), result(status="absent"), result(status="warn"))
    assert run().exit_code == 0


def test_a_failure_fails_and_shows_its_fix(report):
    report(result(status="fail", fix="pip install 'x[y]'"))
    done = run()
    assert done.exit_code == 1
    assert "pip install 'x[y]'" in done.output
    assert "1 failing" in done.output


def test_an_absent_feature_fails_only_where_required(report):
    report(result(feature="maniskill", status="absent"))
    assert run().exit_code == 0
    assert run("--require", "libero").exit_code == 0
    assert run("--require", "maniskill").exit_code == 1


def test_json(report):
    report(result(fix="f", status="fail"))
    done = run("--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == [{"feature": "x", "name": "n", "status": "fail", "detail": "d", "fix": "f"}]


def test_a_check_that_breaks_is_a_failing_line(report, monkeypatch):
    class Broken:
        name = "broken"

        def load(self):
            raise OSError("no such thing")

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [Broken()])
    (line,) = doctor.run_checks()
    assert line.status == "fail"
    assert "no such thing" in line.detail
