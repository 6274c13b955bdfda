"""A step measures its stages and adds what it measured to the job's profile."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from rlinf_plugins.core.errors import FlowError
from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.planning.capture import check_spans
from rlinf_plugins.scheduler.planning.profile import StageProfile, SwitchSample, SyncSample
from rlinf_plugins.scheduler.planning.profiler import samples_from_spans
from rlinf_verl.config import M2FlowConfig
from rlinf_verl.job_flow import job_cluster, job_flow
from rlinf_verl.profiles import JobProfile, open_profile
from rlinf_verl.trainer.sharing_sizes import estimate
from rlinf_verl.trainer.stage_calls import StageCalls

RESIDENT = {"rollout": "rollout", "reference": "ref", "values": "critic", "critic": "critic"}
"""Stage -> the resident it needs on the devices; the others need the actor."""

_WRITE_EVERY = 20


class MeasuresStages:
    """A base of trainers, before all others: one span per stage call.

    ``step_calls`` holds the spans of the last finished step, with the attributes ``stage``, ``step``, ``items``
    (prompts), ``devices`` and ``seconds``.
    """

    options: M2FlowConfig
    config: Any
    sharing: Any
    global_steps: int
    replay_buffer: Any
    actor_rollout_wg: Any
    step_calls: Sequence[Span] = ()

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        self.calls = StageCalls(lambda: self.sharing.waited_s)
        self.flow = job_flow(self.config)
        self._profile: JobProfile | None = open_profile(self.config, self.options)
        self._first_step = self.global_steps + 1
        self._said: set[str] = set()
        (self._kind, *_) = job_cluster(self.config, self.options).kinds
        sizes = estimate(self.config, self.options)
        self._gib = (
            {} if sizes is None else {k: v / 2**30 for k, v in {"rollout": sizes.rollout, **sizes.stages}.items()}
        )

    def measured(self, stage: str, batch: Any) -> AbstractContextManager[None]:
        """Measure a block as a call of ``stage`` with the prompts of ``batch``."""
        return self.calls.call(stage, prompts_in(batch.keys, batch.tags), self.actor_rollout_wg.world_size)

    def finishing(self, stage: str) -> AbstractContextManager[None]:
        """Measure a block as work that the step's calls of ``stage`` share."""
        return self.calls.finishing(stage)

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and write what was measured however it ends."""
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
        finally:
            if self._profile is not None:
                self._profile.write()

    def prepare_step(self) -> Any:
        """Note when the rollout begins."""
        self._begun = time.monotonic(), time.time()
        return super().prepare_step()  # type: ignore[misc]

    def on_step_begin(self) -> None:
        """Take the granularity whose turn it is."""
        turns = self.options.profile.granularities
        if turns:
            self.granularity = turns[(self.global_steps - self._first_step) % len(turns)]
        super().on_step_begin()  # type: ignore[misc]

    def on_sample_end(self) -> None:
        """Note when the rollout was over: where training goes on meanwhile, at the last arrival."""
        end = time.monotonic()
        if self.options.mode == "spatial" and hasattr(self.replay_buffer, "last_arrival"):  # a custom sampler has none
            begun, wall = self._begun
            took = self.replay_buffer.last_arrival("train") - wall
            end = begun + took if took > 0 else end  # nothing arrives where rollouts are replayed
        if self.options.mode != "hybrid":  # there, devices come and go while it runs
            self.calls.add("rollout", self.config.data.train_batch_size, self._rollout_devices(), self._begun[0], end)
        super().on_sample_end()  # type: ignore[misc]

    def _rollout_devices(self) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        if self.options.mode == "temporal":
            return int(self.actor_rollout_wg.world_size)
        return int(rollout.nnodes * rollout.n_gpus_per_node)

    def _balance_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self.calls.preparing():
            return super()._balance_batch(*args, **kwargs)  # type: ignore[misc]

    def _compute_advantage(self, *args: Any, **kwargs: Any) -> Any:
        with self.calls.preparing():
            return super()._compute_advantage(*args, **kwargs)  # type: ignore[misc]

    def _compute_reward_colocate(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.measured("reward_model", batch):
            return super()._compute_reward_colocate(batch, *args, **kwargs)  # type: ignore[misc]

    def _compute_old_log_prob(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if all(stage.name != "old_log_prob" for stage in self.flow.stages):
            return super()._compute_old_log_prob(batch, *args, **kwargs)  # type: ignore[misc]
        with self.measured("old_log_prob", batch):
            return super()._compute_old_log_prob(batch, *args, **kwargs)  # type: ignore[misc]

    def _compute_ref_log_prob(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.measured("reference", batch):
            return super()._compute_ref_log_prob(batch, *args, **kwargs)  # type: ignore[misc]

    def _compute_values(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.measured("values", batch):
            return super()._compute_values(batch, *args, **kwargs)  # type: ignore[misc]

    def _update_critic(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.measured("critic", batch):
            return super()._update_critic(batch, *args, **kwargs)  # type: ignore[misc]

    def _update_actor(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.measured("actor", batch):
            return super()._update_actor(batch, *args, **kwargs)  # type: ignore[misc]

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, *args, **kwargs)  # type: ignore[misc]
        self.step_calls = self._described(self.calls.take(self.global_steps), longest_by_prompt(batch.keys, batch.tags))
        self._check_flow()
        steps = self.global_steps - self._first_step
        if self._profile is None or steps < self.options.profile.warmup:
            return
        measured = samples_from_spans(self.step_calls)
        for stage, switch in self._switches(metrics).items():
            measured[stage] = replace(measured.get(stage, StageProfile()), switches=(switch,))
        self._profile.add(measured, self._syncs(metrics, timing_raw))
        if steps % _WRITE_EVERY == _WRITE_EVERY - 1:
            self._profile.write()

    def _described(self, spans: list[Span], lengths: Sequence[float]) -> list[Span]:
        found = []
        for span in spans:
            stage = span.attributes["stage"]
            more: dict[str, Any] = {"device_kind": self._kind}
            more["memory_gib"] = self._gib.get(RESIDENT.get(stage, "actor"), self._gib.get("actor", 0.0))
            if stage == "rollout":
                more["lengths"] = tuple(lengths)
            found.append(replace(span, attributes={**span.attributes, **more}))
        return found

    def _check_flow(self) -> None:
        """Say once where the job does not follow the flow that plans are made for."""
        if self.options.mode == "hybrid" or self.global_steps < self.config.trainer.critic_warmup:
            return
        try:
            check_spans(self.flow, self.step_calls)
        except FlowError as error:
            message = str(error).partition(": ")[2] or str(error)
            if message not in self._said:
                self._said.add(message)
                print(f"[rlinf-plugins] the job differs from the flow that is planned for: {message}", flush=True)

    def _switches(self, metrics: Mapping[str, Any]) -> dict[str, SwitchSample]:
        """Mean seconds of the step's moves of each resident, as switches of the stage that stands for it."""
        found = {}
        for stage in ("rollout", "actor", "reference", "critic"):
            prefix = f"sharing/{RESIDENT.get(stage, stage)}"
            onloads, offloads = metrics.get(f"{prefix}/onloads", 0), metrics.get(f"{prefix}/offloads", 0)
            if onloads and offloads:
                found[stage] = SwitchSample(
                    devices=self.actor_rollout_wg.world_size,
                    onload_seconds=metrics[f"{prefix}/onload_s"] / onloads,
                    offload_seconds=metrics[f"{prefix}/offload_s"] / offloads,
                    device_kind=self._kind,
                )
        return found

    def _syncs(self, metrics: Mapping[str, Any], timing: Mapping[str, float]) -> list[SyncSample]:
        if "update_weights" not in timing or self.options.mode == "hybrid":
            return []
        shared = self.options.mode == "temporal"
        seconds = timing["update_weights"]
        if shared:  # who leaves for the rollout, and its return, are switches
            left = sum(metrics.get(f"sharing/{who}/offload_s", 0.0) for who in ("actor", "ref", "critic"))
            seconds = max(seconds - left - metrics.get("sharing/rollout/onload_s", 0.0), 0.0)
        return [SyncSample(source="actor", target="rollout", seconds=seconds, shared=shared)]


def prompts_in(keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> int:
    """Return how many prompts rows belong to; rows that pad a batch count for none.

    Args:
        keys: TransferQueue keys ``{uid}_{session}_{index}``.
        tags: Their tags.
    """
    real = {key.split("_")[0] for key, tag in zip(keys, tags, strict=True) if not tag.get("is_padding", False)}
    return len(real)


def longest_by_prompt(keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the tokens of each prompt's longest trajectory, over all of its rows.

    Args:
        keys: TransferQueue keys ``{uid}_{session}_{index}``.
        tags: Their tags, with ``response_len``.
    """
    tokens: dict[tuple[str, str], float] = {}
    for key, tag in zip(keys, tags, strict=True):
        if not tag.get("is_padding", False):
            uid, session = key.split("_")[:2]
            tokens[uid, session] = tokens.get((uid, session), 0.0) + float(tag["response_len"])
    longest: dict[str, float] = {}
    for (uid, _), count in tokens.items():
        longest[uid] = max(longest.get(uid, 1.0), count)
    return list(longest.values())
