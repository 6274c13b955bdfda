"""Evaluation of a random policy in environments of known outcome, some of which break."""

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from rlinf_plugins.cli import build_app
from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError, MissingAssetError
from rlinf_plugins.testing.envs import Mishap, ToyFactory
from rlinf_verl.vla.evaluate import evaluate, load_engine
from rlinf_verl.vla.evaluate_report import Verdict, by_task, rate_of, table, write_json
from rlinf_verl.vla.suites import Suite


def toys(mishaps=None):
    """Task 0 is solved after two steps, task 1 never; what breaks is given by trial."""
    return ToyFactory(image=32, length=lambda task, trial: 2 if task == 0 else 10_000, mishaps=mishaps or {}, trials=4)


def suite(monkeypatch, mishaps=None, **options):
    monkeypatch.setattr(Suite, "make_factory", lambda self: toys(mishaps))
    pool = {"episode": {"max_steps": 6}, "out_of_range": "clip", "restart": {"first_delay_s": 0.01}}
    values = {"factory": "m:f", "num_envs": 2, "pool": pool, "trials": None} | options
    return from_mapping(Suite, values, "suite")


@pytest.mark.slow
def test_every_pair_is_judged_once_and_what_broke_is_apart(monkeypatch, vla_folder, tmp_path):
    mishaps = {1: Mishap(poison="kill", where="step"), 2: Mishap(poison="raise", where="reset")}
    chosen = suite(monkeypatch, mishaps)
    seen = []
    verdicts, names = evaluate(load_engine(vla_folder, chosen), chosen, lambda verdict, total: seen.append(total))
    assert [(v.task, v.trial) for v in verdicts] == [(task, trial) for task in (0, 1) for trial in range(4)]
    assert seen == [8] * 8
    assert [v.success for v in verdicts] == [True, None, None, True, False, None, None, False]
    assert [v.length for v in verdicts if v.success is not None] == [2, 2, 6, 6]
    assert Counter(v.failure for v in verdicts) == {"": 4, "crashed": 2, "raised": 2}
    rates = by_task(verdicts)
    assert (rates[0].successes, rates[0].episodes, rates[0].rate) == (2, 2, 1.0)
    assert (rates[1].successes, rates[1].episodes, rates[1].rate) == (0, 2, 0.0)
    write_json(tmp_path / "out" / "result.json", verdicts, names, {"suite": "toy"})
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["tasks"]["move 0"]["failures"] == {"crashed": 1, "raised": 1}
    assert len(written["episodes"]) == 8


@pytest.mark.slow
def test_the_result_does_not_depend_on_how_many_run_side_by_side(monkeypatch, vla_folder):
    def returns(num_envs):
        chosen = suite(monkeypatch, tasks=[1], num_envs=num_envs, temperature=1.0)
        verdicts, _ = evaluate(load_engine(vla_folder, chosen), chosen)
        return [verdict.ret for verdict in verdicts]

    alone = returns(1)
    assert alone == pytest.approx(returns(3), abs=1e-5)
    assert len(set(alone)) == 4


def verdicts(successes, failures, unjudged=0):
    kinds = [True] * successes + [False] * failures + [None] * unjudged
    return [
        Verdict(task=0, trial=i, success=kind, failure="" if kind is not None else "hung")
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("successes", "failures", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 0, 0.7225, 1.0), (81, 19, 0.7222, 0.8749)],
)
def test_the_interval_is_wilsons(successes, failures, low, high):
    rate = rate_of(verdicts(successes, failures, unjudged=3))
    z, n = 1.959964, successes + failures
    p = successes / n
    centre, half = (p + z**2 / (2 * n)), z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
    assert (rate.low, rate.high) == pytest.approx(
        ((centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n)), abs=1e-6
    )
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=1e-3)
    assert rate.failures == {"hung": 3}


def test_nothing_judged_says_nothing():
    rate = rate_of(verdicts(0, 0, unjudged=2))
    assert rate.rate != rate.rate
    assert (rate.low, rate.high) == (0.0, 1.0)
    assert table(verdicts(0, 0, 2), ["a task"], "t").row_count == 2


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Function that runs the command line in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(build_app(), [str(argument) for argument in arguments])


def test_a_folder_without_weights_says_where_they_are(monkeypatch, vla_folder, tmp_path):
    chosen = suite(monkeypatch)
    step = tmp_path / "global_step_3"
    (step / "actor" / "huggingface").mkdir(parents=True)
    with pytest.raises(MissingAssetError, match=r"holds no model.*give a folder in the published layout"):
        load_engine(tmp_path, chosen)
    for folder in (step, step / "actor", step / "actor" / "huggingface"):
        with pytest.raises(MissingAssetError, match=r"save_contents=\[model,optimizer,extra,hf_model\]"):
            load_engine(folder, chosen)
    (step / "actor" / "huggingface" / "model.safetensors").symlink_to(vla_folder / "model.safetensors")
    for folder in (step, step / "actor"):
        with pytest.raises(MissingAssetError, match=f"of this training checkpoint is {step}/actor/huggingface"):
            load_engine(folder, chosen)


@pytest.mark.slow
def test_the_command_evaluates_a_tiny_checkpoint_and_films_it(command, tmp_path):
    made = command("make-tiny-openvla", "model", "--variant", "openvla-oft", "--chunk", 1, "--dim", 2)
    assert made.exit_code == 0, made.output
    (tmp_path / "patch.yaml").write_text(
        "factory: rlinf_plugins.testing.patch_env:PatchFactory\nnum_envs: 2\npool: {out_of_range: clip}\n"
    )
    done = command("evaluate", "model", "patch.yaml", "--videos", "films", "--output", "result.json")
    assert done.exit_code == 0, done.output
    assert "/ 6" in done.output
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["all"]["episodes"] == 6
    assert list((tmp_path / "films").glob("Patch-task0-trial*.mp4"))
    wrong = command("evaluate", "model", "patch.yaml", "trails=3")
    assert isinstance(wrong.exception, ConfigError)
    assert "unknown option suite patch.yaml.trails" in str(wrong.exception)
