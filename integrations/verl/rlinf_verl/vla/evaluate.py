"""Evaluate a checkpoint: each (task, initial state) of a suite once, in environments that run side by side.

Needs neither veRL nor Ray: the policy runs in this process, batched over the environments. An episode that an
environment or the policy's server failed is reported as that and never counts as a failure of the policy.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_plugins.core.errors import EpisodeFailedError, MissingAssetError, RestartStormError, RlinfError
from rlinf_plugins.envs import EnvPool, InitialState
from rlinf_plugins.models.openvla import OpenVLAProcessor, load_policy
from rlinf_plugins.models.openvla.checkpoint import has_weights
from rlinf_verl.rollout.host import EngineHost
from rlinf_verl.rollout.weights import ResidentWeights
from rlinf_verl.vla.evaluate_report import Verdict
from rlinf_verl.vla.loop_episode import EpisodeRunner
from rlinf_verl.vla.rollout_engine import Decision, PolicyEngine, PolicyRequest, sampling_of
from rlinf_verl.vla.suites import Suite


def load_engine(
    checkpoint: Path, suite: Suite, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> PolicyEngine:
    """Load a checkpoint as a batched policy.

    Args:
        checkpoint: Folder in the published layout.
        suite: Statistics and batching.
        device: Where the policy computes.
        dtype: Type of its weights.

    Raises:
        MissingAssetError: The folder holds no weights.
        CheckpointError: The folder does not hold what the policy needs.
        ConfigError: Several data sets and no ``unnorm_key``.
    """
    if not has_weights(checkpoint):
        raise MissingAssetError(f"{checkpoint} holds no model.safetensors{_exported(checkpoint)}")
    processor = OpenVLAProcessor.from_folder(
        checkpoint, unnorm_key=suite.unnorm_key, statistics=suite.statistics, extremes=suite.extremes
    )
    policy = load_policy(checkpoint, dtype=dtype).to(device)
    return PolicyEngine(
        policy,
        processor,
        ResidentWeights(policy, loaded=True),
        max_batch=suite.num_envs,
        max_wait_s=suite.max_wait_ms / 1000,
        seed=suite.seed,
    )


def _exported(folder: Path) -> str:
    """Say where a training checkpoint keeps the policy in the published layout."""
    exports = [path for path in (folder / "huggingface", folder / "actor" / "huggingface") if path.is_dir()]
    ready = [path for path in exports if has_weights(path)]
    if ready:
        return f"; the policy of this training checkpoint is {ready[0]}"
    if exports or folder.name == "huggingface":
        return (
            "; training checkpoints hold the policy only with "
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
        )
    return "; give a folder in the published layout of OpenVLA"


def evaluate(
    engine: PolicyEngine, suite: Suite, on_verdict: Callable[[Verdict, int], None] | None = None
) -> tuple[list[Verdict], list[str]]:
    """Run every pair of the suite once.

    Args:
        engine: The policy.
        suite: What to run.
        on_verdict: Called with each verdict and the number of pairs in all.

    Returns:
        Verdicts in the order of the pairs, and the names of the environment's tasks.

    Raises:
        ConfigError: Tasks, initial states or observations the environment does not have.
        EnvStartError: The environment cannot be made.
    """
    with EnvPool(suite.make_factory(), suite.num_envs, suite.pool) as pool:
        pairs = suite.pairs(pool.spec)
        runner = EpisodeRunner(pool, suite, suite.choose_cameras(pool.spec))
        judge = _Judge(engine, suite, pool, runner, on_verdict)
        verdicts = asyncio.run(judge.run(pairs))
        return [verdicts[pair] for pair in pairs], list(pool.spec.tasks)


class _Judge:
    def __init__(
        self,
        engine: PolicyEngine,
        suite: Suite,
        pool: EnvPool,
        runner: EpisodeRunner,
        on_verdict: Callable[[Verdict, int], None] | None,
    ) -> None:
        self._engine, self._suite, self._pool, self._runner, self._say = engine, suite, pool, runner, on_verdict
        self._sampling = {"temperature": suite.temperature, "top_k": suite.top_k}
        self._verdicts: dict[InitialState, Verdict] = {}
        self._total = 0

    async def run(self, pairs: list[InitialState]) -> dict[InitialState, Verdict]:
        self._total, waiting = len(pairs), deque(pairs)
        host = EngineHost(self._engine)
        try:
            await asyncio.gather(*(self._work(slot, waiting, host) for slot in range(len(self._pool))))
        finally:
            host.close()
        while waiting:
            pair = waiting.popleft()
            self._note(pair, _unjudged(pair, "storm", "no environment was left to run it"))
        return self._verdicts

    async def _work(self, slot: int, waiting: deque[InitialState], host: EngineHost) -> None:
        """Run pairs in one environment until none waits or the environment is given up."""
        while waiting:
            pair = waiting.popleft()
            try:
                verdict = await self._judge(pair, slot, host)
            except RestartStormError:
                waiting.appendleft(pair)
                return
            self._note(pair, verdict)

    async def _judge(self, pair: InitialState, slot: int, host: EngineHost) -> Verdict:
        seeds = np.random.SeedSequence([self._suite.seed, pair.task, pair.trial])
        said: list[str] = []

        async def decide(images: list[np.ndarray], instruction: str, proprio: np.ndarray | None) -> Decision:
            said.append(instruction)
            request = PolicyRequest(
                id=f"{pair.task}-{pair.trial}-{len(said)}",
                instruction=instruction,
                images=images,
                proprio=proprio,
                sampling=sampling_of(self._sampling),
                seed=int(seeds.spawn(1)[0].generate_state(1, np.uint64)[0] >> 1),
            )
            decision: Decision | None = await host.generate(request)
            assert decision is not None, "nobody pauses this host"
            return decision

        try:
            trace = await self._runner.run(
                uid="eval", session=0, slot=slot, initial=pair, decide=decide, sampling=self._sampling
            )
        except RestartStormError:
            raise
        except EpisodeFailedError as error:
            return _unjudged(pair, self._kind(pair), str(error), said)
        except RlinfError as error:
            return _unjudged(pair, type(error).__name__, str(error), said)
        return Verdict(
            task=pair.task,
            trial=pair.trial,
            instruction=said[0],
            success=trace.success,
            length=trace.steps,
            ret=trace.ret,
        )

    def _kind(self, pair: InitialState) -> str:
        """Kind of the environment's failure, from the pool's own record of the episode."""
        kinds = [r.failure.kind for r in self._pool.drain_records() if r.failure is not None and r.initial == pair]
        return kinds[-1] if kinds else "failed"

    def _note(self, pair: InitialState, verdict: Verdict) -> None:
        self._verdicts[pair] = verdict
        if self._say is not None:
            self._say(verdict, self._total)


def _unjudged(pair: InitialState, kind: str, reason: str, said: Any = ()) -> Verdict:
    instruction = said[0] if said else ""
    return Verdict(task=pair.task, trial=pair.trial, instruction=instruction, success=None, failure=kind, reason=reason)
