"""The closed loop: a step's stages against the plan's prediction, and another plan when they drift apart."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.drift import Drift, DriftDetector
from rlinf_plugins.scheduler.planning.profile import Profile
from rlinf_verl.auto import choices_of
from rlinf_verl.config import M2FlowConfig
from rlinf_verl.forecast import Choice
from rlinf_verl.job_flow import job_cluster
from rlinf_verl.say import say

_NOT_THE_STEP = ("save_checkpoint",)
"""Timers inside veRL's step that no plan predicts."""


class FollowsPlan:
    """A base of trainers, before all others: compares each step with the plan, and re-plans on sustained drift.

    Devices keep their places while a job runs; what changes at a step boundary is how finely training takes the batch
    and how long the trainer's devices are lent.
    """

    options: M2FlowConfig
    config: Any
    step_calls: Sequence[Span]
    granularity: int
    _loop: "ClosedLoop | None" = None

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        if self.options.predicted:
            self._loop = ClosedLoop(self.options, self.config)

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, *args, **kwargs)  # type: ignore[misc]
        if self._loop is None:
            return
        seconds = timing_raw["step"] - sum(timing_raw.get(name, 0.0) for name in _NOT_THE_STEP)
        stages = seconds_by_stage(self.step_calls)
        metrics.update(self._loop.metrics(stages, seconds))
        choice = self._loop.observe(stages, seconds)
        if choice is not None:
            self.granularity = choice.granularity
            self.options = replace(self.options, lend_until=choice.lend_until)
        metrics["m2flow/replans"] = self._loop.replans


def seconds_by_stage(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of every stage of a step."""
    found: dict[str, float] = defaultdict(float)
    for span in spans:
        found[span.attributes["stage"]] += span.attributes["seconds"]
    return dict(found)


class ClosedLoop:
    """Compares steps with what was predicted.

    Args:
        options: The options, with a prediction.
        config: veRL's whole configuration.
    """

    def __init__(self, options: M2FlowConfig, config: Any) -> None:
        self._options, self._config = options, config
        self._predicted = dict(options.predicted)
        self._detector = DriftDetector(self._predicted["step"])
        self._recent: list[Mapping[str, float]] = []
        self.replans = 0

    def metrics(self, stages: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return predicted and actual seconds of the step and of each stage."""
        actual = {"step": seconds, **stages}
        found = {f"m2flow/actual_s/{name}": actual[name] for name in self._predicted if name in actual}
        return found | {f"m2flow/predicted_s/{name}": value for name, value in self._predicted.items()}

    def observe(self, stages: Mapping[str, float], seconds: float) -> Choice | None:
        """Take a step; after a sustained drift return what to change, if anything can be."""
        self._recent = [*self._recent[1 - self._detector.config.window :], stages]
        drift = self._detector.observe(seconds)
        if drift is None:
            return None
        self.replans += 1
        choice = self._replanned(drift)
        if choice is not None:
            self._predicted = {"step": choice.seconds, **choice.stages}
            self._detector.replanned(choice.seconds)
        return choice

    def _replanned(self, drift: Drift) -> Choice | None:
        options, config = self._options, self._config
        moved = f"steps take {drift.ratio:.2f} times what was predicted, as of step {drift.step + 1} of this run"
        if options.profile.path is None:
            say(f"{moved}; there is no profile to plan again by: resume with mode=auto and no plan")
            return None
        if options.mode == "temporal":
            say(f"{moved}; under mode=temporal nothing can change while the job runs: resume it with mode=auto")
            return None
        cluster = job_cluster(config, options)
        profile = Profile.read(Path(options.profile.path)).scaled(self._factors())
        choices = choices_of(config, cluster, profile)
        mine = next((choice for choice in choices if choice.mode == options.mode), None)
        say(f"{moved}; planned again: {mine or 'nothing else can run'}")
        return mine

    def _factors(self) -> dict[str, float]:
        """Actual over predicted seconds of each stage, over the later half of the window."""
        later = self._recent[len(self._recent) // 2 :]
        found = {}
        for name, predicted in self._predicted.items():
            actual = sorted(step[name] for step in later if name in step)
            if actual and predicted > 0 and actual[len(actual) // 2] > 0:
                found[name] = actual[len(actual) // 2] / predicted
        return found
