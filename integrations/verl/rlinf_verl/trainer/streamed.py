"""A training step that begins on the first complete groups while the rest is still being generated.

Complete groups are cut into chunks. Each chunk runs through veRL's own stages - old log-probs, reference, values,
advantages - and, where the loss allows it, through the forward and backward pass; see ``barriers.py`` for what may and
``updates.py`` for when the optimizer steps. Which prompts make a mini-batch is fixed by the order in which they were
submitted, so a step does not depend on who finishes first.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from rlinf_verl.config import M2FlowConfig
from rlinf_verl.say import say
from rlinf_verl.trainer.barriers import Streaming, streaming_of, whole_batch_reasons
from rlinf_verl.trainer.updates import StreamedUpdate

Finished = tuple[str, dict[str, dict]]
"""A prompt that is over: its uid, and key -> tag of its trajectories."""


class StreamedStep:
    """A base of trainers, before all others: replaces veRL's step where a granularity is set."""

    options: M2FlowConfig
    config: Any
    streaming: Streaming | None = None

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        self.granularity = granularity_of(self.options, self.config)
        if not self.granularity and not any(self.options.profile.granularities):
            return
        reasons = whole_batch_reasons(self.config)
        if reasons:
            say(f"mode={self.options.mode}: every stage waits for the whole batch: {'; '.join(reasons)}")
            return
        self.streaming = streaming_of(self.config)
        say(f"mode={self.options.mode}: training takes {self.granularity} prompts at a time")
        for reason in self.streaming.reasons:
            say(reason)

    def measured(self, stage: str, batch: Any) -> AbstractContextManager[None]:
        """Enclose a call of a stage; see :class:`rlinf_verl.trainer.measured.MeasuresStages`."""
        return nullcontext()

    def finishing(self, stage: str) -> AbstractContextManager[None]:
        """Enclose what a stage does once a step."""
        return nullcontext()

    def _next_train_batch(self, num_prompts: int | None = None) -> Any:
        batch = super()._next_train_batch(num_prompts)  # type: ignore[misc]
        self.submitted = list(batch["uid"])
        return batch

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> Any:
        if self.streaming is None or not self.granularity:
            return super()._step_once(metrics, timing_raw, sample_batch_size)  # type: ignore[misc]
        return _Step(self, self.streaming, metrics, timing_raw).run()


def granularity_of(options: M2FlowConfig, config: Any) -> int:
    """Return the prompts training takes at a time; 0: the whole batch."""
    if options.granularity or options.mode == "temporal":
        return options.granularity
    return max(1, int(config.actor_rollout_ref.actor.ppo_mini_batch_size) // 8)


class _Step:
    """One step of a trainer."""

    def __init__(self, trainer: Any, streaming: Streaming, metrics: dict, timing_raw: dict) -> None:
        self.trainer, self.streaming, self.metrics, self.timing = trainer, streaming, metrics, timing_raw
        self.config = trainer.config
        self.rollouts = self.config.actor_rollout_ref.rollout.n
        self.position = {uid: number for number, uid in enumerate(trainer.submitted)}
        self.trains_actor = self.config.trainer.critic_warmup <= trainer.global_steps
        self.merged = MetricsAggregator()
        self.keys: list[str] = []
        self.tags: list[dict] = []
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        self.actor = self._update(trainer.actor_rollout_wg, actor, streaming.actor) if self.trains_actor else None
        self.critic = self._update(trainer.critic_wg, critic, streaming.critic) if trainer.use_critic else None
        # A group's advantages can be had with the group; so can returns, which is all a streamed critic needs.
        self.early_advantages = streaming.actor is not None or self.critic is not None

    def _update(self, group: Any, part: Any, denominator: Any) -> StreamedUpdate | None:
        if denominator is None:
            return None
        return StreamedUpdate(
            group,
            mini_batches=len(self.position) // part.ppo_mini_batch_size,
            epochs=part.ppo_epochs,
            denominator=denominator,
            settings={
                "calculate_entropy": bool(part.get("calculate_entropy") or part.get("entropy_coeff")),
                "distillation_use_topk": False,
                "distillation_only": False,
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
            },
        )

    def run(self) -> KVBatchMeta:
        start = time.perf_counter()
        for number, finished in self._chunks():
            chunk = self._batch({key: tag for _, rows in finished for key, tag in rows.items()}, len(finished))
            if chunk is not None:
                self._prepare(chunk)
                self._accumulate(number, chunk)
        self.metrics.update(self.trainer.replay_buffer.failure_metrics)
        self.metrics["m2flow/rollout_s"] = self.last_arrival - start
        self.metrics["m2flow/wait_s"] = self.timing.get("gen", 0.0)
        return self._finish()

    def _chunks(self) -> Iterator[tuple[tuple[int, int], list[Finished]]]:
        """Yield complete groups of one mini-batch, with the number of their actor's and critic's mini-batch.

        Where rollout goes on elsewhere, a chunk is what is ready, at least ``granularity`` prompts; the last of a
        mini-batch may be smaller. Otherwise everything is there first, and chunks have that size.
        """
        buffer, granularity = self.trainer.replay_buffer, self.trainer.granularity
        overlaps = self.trainer.separate
        missing = dict.fromkeys(self.position)
        ready: dict[tuple[int, int], list[Finished]] = defaultdict(list)
        buffer.begin_taking(len(missing))
        self.trainer.on_sample_begin()
        while missing or any(ready.values()):
            cell = None
            if not missing or (overlaps and len(self.position) - len(missing) >= self._lent_until):
                cell = self._next_cell(ready, missing, granularity)
            if cell is not None:
                self.trainer.reclaim()
            if missing:
                with marked_timer("gen", self.timing, color="red"):
                    taken = buffer.take_finished("train", wait=cell is None)
                for uid, rows in taken.items():
                    del missing[uid]
                    ready[self._cell(uid)].append((uid, rows))
                if not missing:
                    self.last_arrival = time.perf_counter()
                    self.trainer.on_sample_end()
            if cell is not None:
                size = len(ready[cell]) if overlaps else granularity
                chunk, ready[cell] = ready[cell][:size], ready[cell][size:]
                yield cell, sorted(chunk, key=lambda finished: self.position[finished[0]])

    @property
    def _lent_until(self) -> int:
        """Complete prompts before training may take devices back from generation."""
        return math.ceil(self.trainer.options.lend_until * len(self.position)) if self.trainer.lends else 0

    def _next_cell(self, ready: dict, missing: dict, granularity: int) -> tuple[int, int] | None:
        """Return the first mini-batch with enough prompts ready, or with all it still lacks."""
        waiting = {self._cell(uid) for uid in missing}
        able = [cell for cell, found in ready.items() if found and (len(found) >= granularity or cell not in waiting)]
        return min(able, default=None)

    def _cell(self, uid: str) -> tuple[int, int]:
        place = self.position[uid]
        critic = self.config.critic.ppo_mini_batch_size if self.trainer.use_critic else len(self.position)
        return place // self.config.actor_rollout_ref.actor.ppo_mini_batch_size, place // critic

    def _batch(self, rows: dict[str, dict], prompts: int) -> KVBatchMeta | None:
        """Return rows as a batch that divides over the ranks: failed trajectories are padded, ranks get even work."""
        if not rows:
            return None
        ranks = self.trainer.actor_rollout_wg.world_size
        wanted = math.ceil(max(len(rows), prompts * self.rollouts) / ranks) * ranks
        batch = KVBatchMeta(partition_id="train", keys=list(rows), tags=list(rows.values()))
        batch = upsample_batch_to_divisible_size(batch, wanted, self.trainer.tokenizer.eos_token_id)

        work = calculate_workload(torch.tensor([tag["seq_len"] for tag in batch.tags]))
        partitions = get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)
        batch.reorder([row for partition in partitions for row in partition])
        self.keys += batch.keys
        self.tags += batch.tags
        return batch

    def _prepare(self, chunk: KVBatchMeta) -> None:
        """Run veRL's stages up to the advantages on a chunk."""
        trainer = self.trainer
        with self._stage("old_log_prob", chunk) as arguments:
            trainer._compute_old_log_prob(*arguments)
        if trainer.use_reference_policy:
            with self._stage("ref", chunk) as arguments:
                trainer._compute_ref_log_prob(*arguments)
        if trainer.use_critic:
            with self._stage("values", chunk) as arguments:
                trainer._compute_values(*arguments)
        if self.early_advantages:
            with self._stage("adv", chunk) as arguments:
                trainer._compute_advantage(*arguments)

    def _accumulate(self, number: tuple[int, int], chunk: KVBatchMeta) -> None:
        if self.critic is not None:
            with self._updating("critic", chunk):
                self.critic.add(number[1], _copy(chunk))
        if self.actor is not None:
            with self._updating("actor", chunk):
                self.actor.add(number[0], _copy(chunk))

    @contextmanager
    def _updating(self, part: str, chunk: KVBatchMeta) -> Iterator[None]:
        timed = marked_timer(f"update_{part}", self.timing)
        with timed, self.trainer.measured(part, chunk), self.trainer.sharing.use(part):
            yield

    def _finish(self) -> KVBatchMeta:
        """Everything is there: what waited for it, and the optimizer steps."""
        trainer = self.trainer
        batch = KVBatchMeta(partition_id="train", keys=self.keys, tags=self.tags)
        real = sum(not tag.get("is_padding", False) for tag in batch.tags)
        several_rows = real > len(self.position) * self.rollouts
        if self.actor is not None and several_rows and self.actor.mini_batches > 1:
            say("trajectories of several rows: veRL counts mini-batches in rows, so the actor's update runs whole")
            self.actor = None
        batch = self._complete(batch, real)
        if not self.early_advantages or self.streaming.actor is None:
            with self._stage("adv", batch) as arguments:
                trainer._compute_advantage(*arguments)
        self.metrics.update(self.merged.get_aggregated_metrics())
        if trainer.use_critic:
            with marked_timer("update_critic", self.timing, color="pink"):
                self._step_critic(batch)
        if self.trains_actor:
            with marked_timer("update_actor", self.timing, color="red"):
                self._step_actor(batch, real)
        return batch

    def _complete(self, batch: KVBatchMeta, real: int) -> KVBatchMeta:
        """Balance the batch for updates that run whole; rows this adds as padding pass the stages too."""
        self.trainer._step_rows = real
        waits = (self.trains_actor and self.actor is None) or (self.trainer.use_critic and self.critic is None)
        if not waits:
            return batch
        before = set(batch.keys)
        batch = self.trainer._balance_batch(batch, self.metrics)
        self.trainer._step_rows = real
        added = {key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if key not in before}
        if added:
            self._prepare(KVBatchMeta(partition_id="train", keys=list(added), tags=list(added.values())))
        return batch

    def _step_critic(self, batch: KVBatchMeta) -> None:
        if self.critic is None:
            self.trainer._update_critic(batch, self.metrics)
            return
        with self.trainer.finishing("critic"), self.trainer.sharing.use("critic"):
            steps = self.critic.finish(self.config.critic.ppo_mini_batch_size * self.rollouts)
        self.metrics.update(_reduced(steps, "critic/"))

    def _step_actor(self, batch: KVBatchMeta, real: int) -> None:
        if self.actor is None:
            self.trainer._update_actor(batch, self.metrics)
            return
        with self.trainer._mini_batches():
            rows = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.rollouts
        with self.trainer.finishing("actor"), self.trainer.sharing.use("actor"):
            self.metrics["m2flow/streamed_share"] = self.actor.streamed_rows / len(batch)
            steps = self.actor.finish(rows)
        self.metrics.update(_reduced(steps, "actor/"))

    @contextmanager
    def _stage(self, name: str, batch: KVBatchMeta) -> Iterator[tuple[KVBatchMeta, dict]]:
        """Time a stage and merge the metrics of its parts, weighted by rows."""
        metrics: dict = {}
        with marked_timer(name, self.timing):
            yield _copy(batch), metrics
        self.merged.add_step_metrics(metrics, sample_count=len(batch))


def _copy(batch: KVBatchMeta) -> KVBatchMeta:
    """Return the batch without what stages left in its ``extra_info``."""
    return KVBatchMeta(partition_id=batch.partition_id, keys=list(batch.keys), tags=batch.tags)


def _reduced(steps: list[dict[str, Any]], prefix: str) -> dict[str, Any]:
    """Reduce the metrics of a step's updates as veRL's ``_update_actor`` and ``_update_critic`` do."""
    collected: dict[str, Any] = {}
    for step in steps:
        append_to_dict(collected, step)
    renamed = rename_dict(collected, prefix)
    if prefix + "mfu" in renamed:
        renamed["perf/mfu/" + prefix.rstrip("/")] = renamed.pop(prefix + "mfu")
    reduced: dict[str, Any] = reduce_metrics(renamed)
    return reduced
