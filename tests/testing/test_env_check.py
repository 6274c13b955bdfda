"""The exported conformance suite: it passes a good environment, and finds each fault in a bad one by its rule."""

import re
import sys
import threading
from dataclasses import replace

import cloudpickle
import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from rlinf_plugins.cli import build_app
from rlinf_plugins.envs import InitialState, Outcome
from rlinf_plugins.testing.env_check import Finding, check_environment
from rlinf_plugins.testing.env_rules import RULES
from rlinf_plugins.testing.envs import Mishap, ToyEnv, ToyFactory


class Sabotaged:
    """A toy whose method ``name`` is replaced by ``fault(env, original, *arguments)``."""

    def __init__(self, name, fault, **options):
        self.name, self.fault, self.options = name, fault, options

    def __call__(self):
        env = ToyEnv(ToyFactory(image=16, **self.options))
        original = getattr(env, self.name)
        setattr(env, self.name, lambda *arguments: self.fault(env, original, *arguments))
        return env


def changed_spec(**changes):
    def make():
        env = ToyFactory(image=16)()
        env.spec = replace(env.spec, **changes)
        return env

    return make


def after(change):
    """A fault that lets the original run and then alters its result."""
    return lambda env, original, *arguments: change(env, original(*arguments))


def remember(env, original, initial):
    env.resets = getattr(env, "resets", 0) + 1
    return original(InitialState(task=initial.task, trial=env.resets))


def global_noise(env, original, initial):
    said = original(initial)
    env._position = np.random.uniform(-1, 1, 3)
    return said


def drift(env, original):
    env._position = env._position + 0.01
    return original()


def forgetful(env, original, state):
    original(state)
    env._position = env._position * 0.99


def overwrite(env, original, action):
    action[:] = 0
    return original(action)


FAULTS = {
    "bounds": (changed_spec(action_low=(2.0,) * 3), "specification is consistent", "bounds"),
    "twins": (changed_spec(tasks=("a", "a")), "specification is consistent", "names twice"),
    "mute": (Sabotaged("reset", after(lambda env, said: None)), "returns the instruction", "returns None"),
    "dtype": (
        Sabotaged("observe", after(lambda env, seen: seen | {"states": seen["states"].astype(float)})),
        "observations are as specified",
        r"float64\[4\].*float32\[4\]",
    ),
    "missing": (
        Sabotaged("observe", after(lambda env, seen: {"states": seen["states"]})),
        "observations are as specified",
        "main_images",
    ),
    "nan seen": (
        Sabotaged("observe", after(lambda env, seen: seen | {"states": seen["states"] * np.float32(np.nan)})),
        "observations are as specified",
        "not finite",
    ),
    "blank": (
        Sabotaged("observe", after(lambda env, seen: seen | {"main_images": seen["main_images"] * 0})),
        "images are drawn",
        "blank",
    ),
    "nan reward": (
        Sabotaged("step", after(lambda env, outcome: replace(outcome, reward=float("nan")))),
        "steps report outcomes",
        "nan",
    ),
    "old style": (Sabotaged("step", after(lambda env, outcome: (0.0, False))), "steps report outcomes", "tuple"),
    "undeclared": (
        Sabotaged("step", after(lambda env, outcome: Outcome(reward=0.0, metrics={"speed": 1.0}))),
        "steps report outcomes",
        "speed",
    ),
    "takes the array": (Sabotaged("step", overwrite), "steps report outcomes", "changes the action array"),
    "counts resets": (Sabotaged("reset", remember), "function of the ids", "two resets"),
    "global random state": (Sabotaged("reset", global_noise), "function of the ids", "two resets"),
    "one start": (
        Sabotaged("reset", lambda env, original, initial: original(InitialState(task=initial.task))),
        "initial states differ",
        "look the same",
    ),
    "observing moves": (Sabotaged("observe", drift), "observing changes nothing", "twice in a row"),
    "limit": (changed_spec(max_episode_steps=3), "time limit truncates", "step 3 is not truncated"),
    "lossy load": (Sabotaged("load", forgetful), "snapshots replay", "apart at step 0"),
    "no bytes": (Sabotaged("save", after(lambda env, state: [state])), "snapshots replay", "list"),
    "close": (Sabotaged("close", lambda env, original: 1 / 0), "closes", "ZeroDivisionError"),
}


def broken(findings: list[Finding]) -> dict[str, str]:
    return {finding.rule: finding.explanation for finding in findings if finding.verdict == "broken"}


def test_a_sound_environment_keeps_every_rule(seed):
    findings = list(check_environment(ToyFactory(image=16), seed=seed))
    assert len(findings) == len(RULES) + 2
    assert broken(findings) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_its_rule(fault):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    factory, rule, says = FAULTS[fault]
    found = broken(list(check_environment(factory)))
    (explanation,) = [text for name, text in found.items() if rule in name]
    assert re.search(says, explanation), explanation


@pytest.mark.parametrize(
    ("poison", "says"), [("kill", "SIGKILL"), ("exit", "SystemExit: 3"), ("hang", "no answer"), ("ask", "question")]
)
def test_an_environment_may_crash_hang_or_ask(poison, says):
    mishap = Mishap(poison=poison, where="step", step=1)
    findings = list(check_environment(ToyFactory(mishaps={-1: mishap}), timeout=3.0))
    assert says in next(iter(broken(findings).values()))
    if poison in ("kill", "hang"):
        assert findings[-1].verdict == "unknown"


def test_what_cannot_be_made_says_why():
    (finding,) = check_environment(ToyFactory(mishaps={-1: Mishap(poison="raise", where="build")}))
    assert finding.verdict == "broken"
    assert "out of sorts" in finding.explanation


def test_what_cannot_be_sent_says_why():
    lock = threading.Lock()
    (finding,) = check_environment(lambda: lock)
    assert "cannot be sent" in finding.explanation


def test_nothing_is_left_running():
    list(check_environment(ToyFactory(mishaps={-1: Mishap(poison="hang", where="step")}), timeout=1.0))
    assert not [child for child in psutil.Process().children() if "run_target" in " ".join(child.cmdline())]


def run(*words):
    return CliRunner().invoke(build_app(), ["check-env", *words])


def test_the_command_takes_a_factory_with_options_and_says_what_is_wrong(tmp_path, monkeypatch):
    good = run("rlinf_plugins.testing.envs:ToyFactory", "--option", "image=16", "--option", "trials=2")
    assert good.exit_code == 0, good.output
    assert "keeps the contract" in good.output
    (tmp_path / "mine.py").write_text(
        "from rlinf_plugins.testing.envs import ToyFactory\n"
        "class Mine:\n"
        "    def __init__(self, speed=1):\n"
        "        self._toy = ToyFactory()()\n"
        "        self.spec = self._toy.spec\n"
        "    def reset(self, initial): self._toy.reset(initial)\n"
        "    def step(self, action): return self._toy.step(action)\n"
        "    def observe(self): return self._toy.observe()\n"
        "    def close(self): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    bad = run("mine:Mine", "--option", "speed=2")
    assert bad.exit_code == 1
    assert "must return the task's instruction" in bad.output
    assert "there are no save() and load()" in bad.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "MODULE:FACTORY"),
        (["no.such:Thing"], "cannot be imported"),
        (["rlinf_plugins.testing.envs:Nothing"], "cannot be imported"),
        (["rlinf_plugins.testing.envs:ToyFactory", "--option", "colour=1"], "do not fit"),
        (["rlinf_plugins.testing.envs:_POISONS"], "cannot be called"),
    ],
)
def test_a_wrong_target_is_named(words, says):
    result = run(*words)
    assert result.exit_code == 1
    assert says in str(result.exception)
