"""One episode as the worker sees it: rewards, the two ends, and the numbers that are kept of it."""

import math
from dataclasses import dataclass
from typing import Any

from rlinf_plugins.core.errors import EnvContractError
from rlinf_plugins.envs.config import EpisodeConfig, RewardConfig
from rlinf_plugins.envs.protocol import InitialState, Outcome


@dataclass(kw_only=True, slots=True)
class Episode:
    """The state of an episode beside the simulator's; part of every snapshot.

    Attributes:
        initial: Where it started.
        steps: Steps taken.
        ret: Sum of the rewards given.
        success_once: Whether the task was solved at any step.
        success: Whether it is solved now.
        terminated: Whether its end was reached.
        truncated: Whether it was cut off.
        done: Whether it is over; differs from the two above where terminations are ignored.
        previous: The reward before ``relative`` and ``step_penalty`` at the last step.
    """

    initial: InitialState
    steps: int = 0
    ret: float = 0.0
    success_once: bool = False
    success: bool = False
    terminated: bool = False
    truncated: bool = False
    done: bool = False
    previous: float = 0.0

    def advance(self, outcome: Outcome, rules: EpisodeConfig, rewards: RewardConfig) -> float:
        """Take one step's outcome in and return the reward the learner gets for it.

        Raises:
            EnvContractError: The reward is not finite.
        """
        if not math.isfinite(outcome.reward):
            raise EnvContractError(f"the reward of step {self.steps} is {outcome.reward}; the simulation has diverged")
        self.steps += 1
        self.success = bool(outcome.metrics.get("success", outcome.terminated))
        reward = _base_reward(outcome, self.success, rewards)
        given = (reward - self.previous if rewards.relative else reward) - rewards.step_penalty
        self.previous = reward
        self.ret += given
        self.success_once |= self.success
        self.terminated = outcome.terminated
        self.truncated = outcome.truncated or (rules.max_steps is not None and self.steps >= rules.max_steps)
        self.done = self.truncated or (self.terminated and not rules.ignore_terminations)
        return given

    def state(self) -> dict[str, Any]:
        """Return the values of all attributes."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _base_reward(outcome: Outcome, success: bool, rewards: RewardConfig) -> float:
    if rewards.mode == "raw":
        return outcome.reward
    if rewards.mode == "sparse":
        return rewards.coefficient * success
    metrics = outcome.metrics
    return rewards.coefficient * sum(weight * metrics.get(name, 0.0) for name, weight in rewards.shaping.items())
