"""The contract of an environment, one rule a function: what ``rlinf-plugins check-env`` and our own tests run.

A rule takes a :class:`Subject` and raises :class:`BrokenRuleError` with a sentence that says what the environment does
and what it should do. Third parties run them all with :func:`rlinf_plugins.testing.env_check.check_environment`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rlinf_plugins.core.errors import BlankFrameError, EnvContractError
from rlinf_plugins.envs.protocol import EnvFactory, Environment, InitialState, Observation, Outcome, Snapshotting
from rlinf_plugins.envs.rendering import check_frame

_STEPS = 4
_MOST_TASKS = 3
_LONGEST_EPISODE = 2000


class BrokenRuleError(Exception):
    """The environment breaks a rule; the message says how."""


@dataclass(kw_only=True)
class Subject:
    """An environment under test.

    Attributes:
        factory: Makes it.
        env: The one in use.
        seed: Of the actions.
    """

    factory: EnvFactory
    env: Environment
    seed: int = 0

    def actions(self, steps: int = _STEPS) -> np.ndarray:
        """Return the same random actions at every call, within the bounds: float32 ``[steps, action_dim]``."""
        spec = self.env.spec
        low = np.clip(np.asarray(spec.action_low, np.float32), -1e3, 1e3)
        high = np.clip(np.asarray(spec.action_high, np.float32), -1e3, 1e3)
        return np.random.default_rng(self.seed).uniform(low, high, (steps, spec.action_dim)).astype(np.float32)

    def observe(self) -> dict[str, np.ndarray]:
        """Return a copy of what is seen now."""
        return {name: np.array(array) for name, array in self.env.observe().items()}

    def play(self, initial: InitialState, watch: bool = True) -> tuple[list[dict[str, np.ndarray]], list[Outcome]]:
        """Reset and take the actions until the episode ends; return what was seen, from the reset on, and outcomes."""
        self.env.reset(initial)
        seen, outcomes = [self.observe()], []
        for action in self.actions():
            outcomes.append(self.env.step(action.copy()))
            if watch:
                seen.append(self.observe())
            if outcomes[-1].terminated or outcomes[-1].truncated:
                break
        return (seen if watch else [*seen, self.observe()]), outcomes

    def remake(self) -> None:
        """Close the environment and make a new one."""
        self.env.close()
        self.env = self.factory()


Rule: TypeAlias = Callable[[Subject], None]


def the_specification_is_consistent(subject: Subject) -> None:
    """`spec` names the environment, its actions, what it shows, its tasks and its limits without contradiction."""
    spec = subject.env.spec
    try:
        spec.validate()
    except EnvContractError as error:
        raise BrokenRuleError(str(error)) from error
    if len(set(spec.tasks)) < len(spec.tasks):
        raise BrokenRuleError(f"spec.tasks has names twice: {spec.tasks}")


def a_reset_returns_the_instruction(subject: Subject) -> None:
    """`reset` takes every task and returns its instruction, a string."""
    for task in range(min(len(subject.env.spec.tasks), _MOST_TASKS)):
        said = subject.env.reset(InitialState(task=task, trial=0))
        if not isinstance(said, str) or not said.strip():
            raise BrokenRuleError(f"reset(task={task}) returns {said!r}, it must return the task's instruction as text")


def observations_are_as_specified(subject: Subject) -> None:
    """`observe` gives the arrays that `spec.observation` declares, in shape and type, and finite numbers."""
    subject.env.reset(InitialState())
    _compare_with_spec(subject.env.observe(), subject, "after a reset")
    subject.env.step(subject.actions()[0])
    _compare_with_spec(subject.env.observe(), subject, "after a step")


def images_are_drawn(subject: Subject) -> None:
    """An image of the first observation shows something."""
    subject.env.reset(InitialState())
    seen = subject.env.observe()
    for name in subject.env.spec.images():
        try:
            check_frame(np.asarray(seen[name]), f"observation {name!r}")
        except BlankFrameError as error:
            raise BrokenRuleError(str(error)) from error


def steps_report_outcomes(subject: Subject) -> None:
    """`step` returns an `Outcome` with finite numbers and only the metrics that `spec.metrics` declares."""
    subject.env.reset(InitialState())
    for index, action in enumerate(subject.actions()):
        given = action.copy()
        outcome = subject.env.step(given)
        if not np.array_equal(given, action):
            raise BrokenRuleError(f"step {index} changes the action array it was given; it must copy what it alters")
        if not isinstance(outcome, Outcome):
            raise BrokenRuleError(f"step returns {type(outcome).__name__}, it must return rlinf_plugins.envs.Outcome")
        if not isinstance(outcome.reward, (int, float)) or not math.isfinite(outcome.reward):
            raise BrokenRuleError(f"the reward of step {index} is {outcome.reward!r}, it must be a finite number")
        strange = sorted(set(outcome.metrics) - set(subject.env.spec.metrics))
        if strange:
            raise BrokenRuleError(f"step {index} reports {strange}, which spec.metrics does not declare")
        if not all(math.isfinite(float(value)) for value in outcome.metrics.values()):
            raise BrokenRuleError(f"step {index} reports metrics that are not finite: {dict(outcome.metrics)}")
        if outcome.terminated or outcome.truncated:
            return


def the_start_is_a_function_of_the_ids(subject: Subject) -> None:
    """The same `InitialState` gives the same start, whatever ran before and whatever the global random state is."""
    first, other = InitialState(trial=0), _another(subject)
    np.random.seed(1)
    before, outcomes = subject.play(first)
    if other is not None:
        subject.play(other)
    np.random.seed(2)
    after, again = subject.play(first)
    _same(before[:1], after[:1], 0.0, "two resets to the same initial state differ")
    if subject.env.spec.resets_exactly:
        _same(before, after, 0.0, "spec.resets_exactly says that equal actions give equal episodes, but they differ")
        if [o.reward for o in outcomes] != [o.reward for o in again]:
            raise BrokenRuleError("spec.resets_exactly says that equal actions give equal rewards, but they differ")


def initial_states_differ(subject: Subject) -> None:
    """Another trial is another start."""
    other = _another(subject)
    if other is None:
        return
    subject.env.reset(InitialState(trial=0))
    first = subject.observe()
    subject.env.reset(other)
    second = subject.observe()
    if all(np.array_equal(first[name], second[name]) for name in first):
        raise BrokenRuleError(
            f"trials 0 and {other.trial} look the same; derive the start from the trial, or set spec.trials=1"
        )


def observing_changes_nothing(subject: Subject) -> None:
    """`observe` may be called any number of times, or not at all: the episode is the same."""
    subject.env.reset(InitialState())
    _same([subject.observe()], [subject.observe()], 0.0, "observe() twice in a row gives different arrays")
    watched, _ = subject.play(InitialState(), watch=True)
    blind, _ = subject.play(InitialState(), watch=False)
    if subject.env.spec.resets_exactly:
        _same(watched[-1:], blind[-1:], 0.0, "an episode that is watched ends differently from one that is not")


def the_bounds_may_be_reached(subject: Subject) -> None:
    """Actions on the bounds are executed."""
    spec = subject.env.spec
    for name, bound in (("lowest", spec.action_low), ("highest", spec.action_high)):
        subject.env.reset(InitialState())
        action = np.nan_to_num(np.asarray(bound, np.float32), posinf=1e3, neginf=-1e3)
        outcome = subject.env.step(action)
        if not math.isfinite(outcome.reward):
            raise BrokenRuleError(f"the {name} action gives the reward {outcome.reward}")
        _compare_with_spec(subject.env.observe(), subject, f"after the {name} action")


def the_time_limit_truncates(subject: Subject) -> None:
    """An episode that does not terminate is `truncated` at `spec.max_episode_steps`, and not before."""
    limit = subject.env.spec.max_episode_steps
    if limit is None or limit > _LONGEST_EPISODE:
        return
    subject.env.reset(InitialState())
    middle = subject.actions(1)[0]
    for step in range(1, limit + 1):
        outcome = subject.env.step(middle)
        if outcome.terminated:
            return
        if outcome.truncated != (step == limit):
            what = "truncated" if outcome.truncated else "not truncated"
            raise BrokenRuleError(f"step {step} is {what}, spec.max_episode_steps is {limit}")


def snapshots_replay(subject: Subject) -> None:
    """After `load`, also in another process, the rest of an episode is what it was, within `snapshot_tolerance`."""
    tolerance = subject.env.spec.snapshot_tolerance
    if tolerance is None:
        return
    if not isinstance(subject.env, Snapshotting):
        raise BrokenRuleError("spec.snapshot_tolerance is set, but there are no save() and load()")
    subject.env.reset(InitialState())
    subject.env.step(subject.actions(1)[0])
    state = subject.env.save()
    if not isinstance(state, bytes):
        raise BrokenRuleError(f"save() returns {type(state).__name__}, it must return bytes")
    original = _rest(subject)
    subject.env.reset(_another(subject) or InitialState())
    subject.env.load(state)
    _same(original, _rest(subject), tolerance, "a replay from a snapshot differs")
    subject.remake()
    assert isinstance(subject.env, Snapshotting)
    subject.env.load(state)
    _same(original, _rest(subject), tolerance, "a replay from a snapshot in a new environment differs")


RULES: tuple[Rule, ...] = (
    the_specification_is_consistent,
    a_reset_returns_the_instruction,
    observations_are_as_specified,
    images_are_drawn,
    steps_report_outcomes,
    the_start_is_a_function_of_the_ids,
    initial_states_differ,
    observing_changes_nothing,
    the_bounds_may_be_reached,
    the_time_limit_truncates,
    snapshots_replay,
)


def _another(subject: Subject) -> InitialState | None:
    trials = subject.env.spec.trials
    return None if trials == 1 else InitialState(trial=1)


def _rest(subject: Subject) -> list[dict[str, np.ndarray]]:
    seen = [subject.observe()]
    for action in subject.actions():
        outcome = subject.env.step(action)
        seen.append(subject.observe() | {"reward": np.asarray(outcome.reward)})
        if outcome.terminated or outcome.truncated:
            break
    return seen


def _same(
    first: list[dict[str, np.ndarray]], second: list[dict[str, np.ndarray]], tolerance: float, complaint: str
) -> None:
    if len(first) != len(second):
        raise BrokenRuleError(f"{complaint}: {len(first)} observations against {len(second)}")
    for step, (one, two) in enumerate(zip(first, second, strict=True)):
        for name in one:
            if one[name].dtype == np.uint8 and tolerance > 0:
                continue  # a pixel can change by any amount where an edge moves by 1e-6
            gap = float(np.max(np.abs(one[name].astype(np.float64) - two[name].astype(np.float64)), initial=0.0))
            if not gap <= tolerance:
                raise BrokenRuleError(f"{complaint}: {name!r} is {gap:g} apart at step {step} (allowed: {tolerance:g})")


def _compare_with_spec(seen: Observation, subject: Subject, moment: str) -> None:
    spec = subject.env.spec
    if set(seen) != set(spec.observation):
        raise BrokenRuleError(
            f"{moment} observe() gives {sorted(seen)}, spec.observation has {sorted(spec.observation)}"
        )
    for name, field in spec.observation.items():
        array = seen[name]
        if not isinstance(array, np.ndarray) or array.shape != field.shape or array.dtype != np.dtype(field.dtype):
            found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise BrokenRuleError(
                f"{moment} observation {name!r} is {found}, spec.observation says {field.dtype}{list(field.shape)}"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BrokenRuleError(f"{moment} observation {name!r} has values that are not finite")
