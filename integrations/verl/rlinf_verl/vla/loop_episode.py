"""One episode: the policy and an environment take turns until the environment is done."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np

from rlinf_plugins.core.errors import EpisodeFailedError
from rlinf_plugins.envs import InitialState, StepResult
from rlinf_plugins.models.openvla.actions import libero_gripper, widowx_gripper
from rlinf_plugins.models.openvla.images import centre_crop, libero_view
from rlinf_verl.vla.loop_config import EmbodiedConfig
from rlinf_verl.vla.rollout_engine import Decision
from rlinf_verl.vla.rows import Chunk, EpisodeTrace

_GRIPPERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda actions: actions,
    "libero": libero_gripper,
    "widowx": widowx_gripper,
}

_VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda frame: frame,
    "libero": lambda frame: centre_crop(libero_view(frame, upright=True)),
}


class Environments(Protocol):
    """What an episode needs of a pool (``rlinf_plugins.envs.EnvPool``)."""

    async def async_reset(self, slot: int, initial: InitialState) -> StepResult:
        """Start an episode in one environment."""
        ...

    async def async_step(self, slot: int, actions: object) -> StepResult:
        """Execute a chunk in one environment."""
        ...


Decide = Callable[..., Awaitable[Decision]]
"""``decide(images, instruction, proprio)``: ask the policy about an observation."""


class EpisodeRunner:
    """Runs episodes in the slots of a pool.

    Args:
        pool: The environments.
        config: How observations and actions are translated.
        cameras: Observation arrays the policy sees, in order.
        values_the_end: Ask for the value of the last observation after termination too, for ``value_bootstrap=always``;
            otherwise after truncation only.
    """

    def __init__(
        self, pool: Environments, config: EmbodiedConfig, cameras: list[str], values_the_end: bool = False
    ) -> None:
        self._values_the_end = values_the_end
        self._pool = pool
        self._config = config
        self._cameras = cameras
        self._gripper, self._view = _GRIPPERS[config.gripper], _VIEWS[config.view]

    async def run(
        self, *, uid: str, session: int, slot: int, initial: InitialState, decide: Decide, sampling: dict[str, Any]
    ) -> EpisodeTrace:
        """Run an episode to its end.

        Args:
            uid: Of its group.
            session: Its number in the group.
            slot: Environment to use.
            initial: Where it starts.
            decide: The policy.
            sampling: Settings the policy draws with; recorded in the rows.

        Raises:
            EpisodeFailedError: The environment failed, or the episode ended before its first step.
            RlinfError: What ``decide`` raises.
        """
        trace = EpisodeTrace(uid=uid, session=session)
        clock = {"env_s": 0.0, "policy_s": 0.0}
        state = await _timed(clock, "env_s", self._pool.async_reset(slot, initial))
        self._require_alive(state, trace)
        while not state.done:
            images, proprio = self._see(state)
            decision = await _timed(clock, "policy_s", decide(images, state.task_description, proprio))
            after = await _timed(clock, "env_s", self._pool.async_step(slot, self._command(decision)))
            self._require_alive(after, trace)
            trace.chunks.append(_chunk(images, decision, after, sampling))
            trace.success |= bool((after.metrics.get("success", after.terminated) * after.valid).any())
            state = after
        if not trace.chunks:
            raise EpisodeFailedError(f"episode {trace.id} ended before its first step")
        last = trace.chunks[-1]
        if last.values is not None and (self._values_the_end or not last.terminated):
            images, proprio = self._see(state)
            trace.final_values = (await decide(images, state.task_description, proprio)).values
        trace.extra = clock
        return trace

    def _see(self, state: StepResult) -> tuple[list[np.ndarray], np.ndarray | None]:
        images = [self._view(state.observation[name]) for name in self._cameras]
        return images, None if self._config.proprio is None else state.observation[self._config.proprio]

    def _command(self, decision: Decision) -> np.ndarray:
        return self._gripper(decision.actions[: self._config.execute])

    @staticmethod
    def _require_alive(state: StepResult, trace: EpisodeTrace) -> None:
        if state.failure is not None:
            raise EpisodeFailedError(f"episode {trace.id} failed after {len(trace.chunks)} chunks: {state.failure}")


def _chunk(images: list[np.ndarray], decision: Decision, after: StepResult, sampling: dict[str, Any]) -> Chunk:
    return Chunk(
        prompt=decision.prompt,
        images=np.stack(images),
        proprio=decision.proprio,
        tokens=decision.tokens,
        log_probs=decision.log_probs,
        values=decision.values,
        temperature=float(sampling.get("temperature") or 1.0),
        top_k=max(0, sampling.get("top_k") or 0),
        version=decision.version,
        rewards=after.rewards,
        valid=after.valid,
        terminated=bool((after.terminated & after.valid).any()),
        truncated=bool((after.truncated & after.valid).any()),
    )


async def _timed(clock: dict[str, float], name: str, work: Awaitable[Any]) -> Any:
    start = time.perf_counter()
    try:
        return await work
    finally:
        clock[name] += time.perf_counter() - start
