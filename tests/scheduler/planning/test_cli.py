import pytest
import typer
import yaml
from typer.testing import CliRunner

from rlinf_plugins.core.errors import PlanError, RlinfError
from rlinf_plugins.scheduler.commands import register
from rlinf_plugins.scheduler.planning.cli import parse_pin
from rlinf_plugins.scheduler.planning.constraints import Pin
from rlinf_plugins.scheduler.planning.plan import Plan
from rlinf_plugins.scheduler.planning.profile import Profile

PROBES = """
class Probe:
    def __init__(self, devices):
        self.devices = devices

    def run(self, items):
        sum(range(items * 1000 // self.devices))

    def close(self):
        pass
"""


@pytest.fixture
def cli(tmp_path):
    app = typer.Typer()
    register(app)

    def invoke(*words):
        result = CliRunner().invoke(app, [str(w) for w in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def files(golden):
    def of(name):
        folder = golden.folder / name
        return (folder / "flow.yaml", "--cluster", folder / "cluster.yaml", "--profile", folder / "profile.json")

    return of


def test_plan_prints_and_writes(cli, files, tmp_path):
    result = cli("plan", *files("maniskill"), "--max-age-days", 1e6, "--out", tmp_path / "p", "--html", tmp_path / "h")
    assert result.exit_code == 0
    for words in ("hybrid", "rollout", "1-3", "predicted step", "not chosen"):
        assert words in result.output
    assert Plan.read(tmp_path / "p").mode == "hybrid"
    assert "<svg" in (tmp_path / "h").read_text()


def test_plan_as_json_is_a_plan(cli, files):
    result = cli("plan", *files("libero"), "--max-age-days", 1e6, "--json")
    assert Plan.from_json(result.output).mode == "temporal"


def test_plan_takes_pins_modes_and_objectives(cli, files):
    pinned = cli("plan", *files("math-7b"), "--max-age-days", 1e6, "--pin", "actor=32", "--json")
    assert len(Plan.from_json(pinned.output).numbers_of("actor")) == 32
    mode = cli("plan", *files("math-7b"), "--max-age-days", 1e6, "--mode", "temporal", "--json")
    assert Plan.from_json(mode.output).mode == "temporal"
    words = ("--max-age-days", 1e6, "--mode", "spatial", "--together", "inference, actor", "--json")
    shared = Plan.from_json(cli("plan", *files("math-7b"), *words).output)
    assert shared.numbers_of("inference") == shared.numbers_of("actor")
    hours = cli("plan", *files("libero"), "--max-age-days", 1e6, "--objective", "gpu-hours", "--robust")
    assert "knee" in hours.output
    assert "holds while" in hours.output
    with pytest.raises(PlanError, match="did you mean 'energy'"):
        cli("plan", *files("libero"), "--max-age-days", 1e6, "--objective", "enegry")


def test_stale_profiles_are_refused(cli, files):
    with pytest.raises(RlinfError, match="stale"):
        cli("plan", *files("libero"), "--max-age-days", -1e6)


def test_simulate_replays_on_another_cluster(cli, files, golden, tmp_path):
    cli("plan", *files("math-7b"), "--max-age-days", 1e6, "--pin", "inference=16", "--out", tmp_path / "p")
    flow, _, cluster, _, profile = files("math-7b")
    values = yaml.safe_load(cluster.read_text())
    values["nodes"][0]["count"] = 8
    (tmp_path / "c").write_text(yaml.safe_dump(values))
    words = ("--cluster", tmp_path / "c", "--profile", profile, "--plan", tmp_path / "p", "--repeats", 2)
    result = cli("simulate", flow, *words, "--failures-per-device-hour", 0.5, "--html", tmp_path / "h")
    assert "simulated 2 steps" in result.output
    assert (tmp_path / "h").exists()


def test_profile_runs_probes_and_appends(cli, tmp_path):
    (tmp_path / "planner_test_probes.py").write_text(PROBES)
    (tmp_path / "flow.yaml").write_text(yaml.safe_dump({"name": "f", "items": 8, "stages": [{"name": "a"}]}))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"nodes": [{"name": "n", "devices": 2}]}))
    probes = {"probes": {"a": "planner_test_probes:Probe"}, "devices": [1, 2], "items": [4, 8], "repeats": 2}
    (tmp_path / "probes.yaml").write_text(yaml.safe_dump(probes))
    words = (tmp_path / "flow.yaml", "--cluster", tmp_path / "cluster.yaml", "--probes", tmp_path / "probes.yaml")
    for count, more in ((8, ()), (16, ("--append",))):
        result = cli("profile", *words, "--out", tmp_path / "profile.json", *more)
        assert f"wrote {count} samples" in result.output
    assert len(Profile.read(tmp_path / "profile.json").stages["a"].samples) == 16
    words = (tmp_path / "flow.yaml", "--cluster", tmp_path / "cluster.yaml", "--profile", tmp_path / "profile.json")
    assert cli("plan", *words).exit_code == 0


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        ("a=8", Pin(stage="a", devices=8)),
        ("a=8:cpu", Pin(stage="a", devices=8, kind="cpu")),
        ("a=spatial", Pin(stage="a", mode="spatial")),
    ],
)
def test_pins_are_read(text, pin):
    assert parse_pin(text) == pin


@pytest.mark.parametrize("text", ["a", "=8", "a=", "a=x", "a=0", "a=-1"])
def test_bad_pins_are_named(text):
    with pytest.raises(PlanError, match="cannot read the pin"):
        parse_pin(text)


def test_trainers_bring_their_profilers_by_entry_point(cli, tmp_path, monkeypatch):
    asked = {}

    def measure(out, overrides, *, devices, repeats, report):
        asked.update(out=out, overrides=overrides, devices=devices, repeats=repeats)
        report("measured")

    class Entry:
        name = "mine"

        def load(self):
            return measure

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Entry()] if "profilers" in group else [])
    out = tmp_path / "p.json"
    out.write_text("old")
    words = ("--out", out, "--devices", 1, "--devices", 2, "--", "+recipe=x", "a.b=1")
    assert "measured" in cli("profile", "--trainer", "mine", *words).output
    assert asked == {"out": out, "overrides": ["+recipe=x", "a.b=1"], "devices": [1, 2], "repeats": 3}
    assert not out.exists(), "without --append the profile starts afresh"
    with pytest.raises(RlinfError, match="no profiler for trainer 'yours'"):
        cli("profile", "--trainer", "yours", *words)
    assert cli("profile", "flow.yaml", "--out", out).exit_code == 2


def test_trainers_write_their_overrides_by_entry_point(cli, files, tmp_path, monkeypatch):
    class Entry:
        name = "mine"

        def load(self):
            return lambda plan, path, cluster: f"{plan.mode} on {cluster.size} from {path.name}"

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Entry()] if "plan_writers" in group else [])
    result = cli("plan", *files("libero"), "--max-age-days", 1e6, "--out", tmp_path / "p")
    assert "mine: temporal on 4 from p" in result.output
