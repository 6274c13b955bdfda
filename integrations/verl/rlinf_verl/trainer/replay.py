"""veRL's replay buffer, woken by arrivals instead of a timer."""

from collections import Counter
from typing import Any

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from rlinf_plugins.core.errors import RolloutFailedError, RolloutStalledError, RolloutWorkerDiedError
from rlinf_verl.trainer.arrivals import RolloutFailure


class ArrivalReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """Same sampling as veRL's synchronous buffer; only the wait differs, and failures are counted and capped.

    Args:
        max_failed_fraction: Share of a step's rollouts that may fail before the job stops.
        rollouts_per_prompt: Rollouts of one prompt, by partition (``train``, ``val``).
        stall_timeout_s: Longest wait in seconds for one arrival.
        **kwargs: Passed to :class:`verl.trainer.ppo.v1.replay_buffer.ReplayBuffer`.
    """

    def __init__(
        self,
        *,
        max_failed_fraction: float,
        rollouts_per_prompt: dict[str, int],
        stall_timeout_s: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._max_failed_fraction = max_failed_fraction
        self._rollouts_per_prompt = rollouts_per_prompt
        self._stall_timeout_s = stall_timeout_s
        self._arrivals: Any = None
        self._sentinels: list[ray.ObjectRef] = []
        self._seen: Counter[str] = Counter()
        self._batch_size = 0
        self._failures: list[RolloutFailure] = []
        self._failure_metrics: dict[str, int] = {}

    def attach(self, arrivals: Any, sentinels: list[ray.ObjectRef]) -> None:
        """Receive what to wait for: the Arrivals actor, and one pending reference per rollout worker."""
        self._arrivals, self._sentinels = arrivals, sentinels

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict]:
        """Sample ``batch_size`` prompts as veRL's synchronous buffer does.

        Raises:
            RolloutFailedError: More than the allowed share of the rollouts failed.
            RolloutStalledError: Nothing arrived for ``stall_timeout_s`` seconds.
            RolloutWorkerDiedError: A process that runs agent loops died.
        """
        self.begin_taking(batch_size)
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        return batch, {**metrics, **self._failure_metrics}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """Wait for the arrivals that are missing; veRL's loop calls this between two looks at the metadata.

        The count seen is taken before the look that follows, so no arrival between the two is lost. Where groups are
        filtered or refilled every arrival may need an answer, otherwise one wake-up for all missing ones is enough.
        """
        reacts_to_each = self.filter_groups_metric is not None or self.sync_refill_failed_groups
        terminal = len(self.finished_keys[partition_id]) + len(self.failure_keys[partition_id])
        self._wait_for(partition_id, 1 if reacts_to_each else max(1, self._batch_size - terminal))
        return last_debug_time

    def take_finished(self, partition_id: str, *, wait: bool) -> dict[str, dict[str, dict]]:
        """Take the prompts that are over, in no particular order, and hand over their trajectories.

        Args:
            partition_id: Partition of TransferQueue.
            wait: Wait for at least one; otherwise return what there is.

        Returns:
            Prompt uid -> key -> tag of its trajectories; a prompt whose rollouts all failed has none.

        Raises:
            RolloutFailedError: More than the allowed share of the step's rollouts failed.
            RolloutStalledError: Nothing arrived for ``stall_timeout_s`` seconds.
            RolloutWorkerDiedError: A process that runs agent loops died.
        """
        while True:
            self._sync_metadata_from_transfer_queue()
            over = self.finished_keys[partition_id] | self.failure_keys[partition_id]
            if over or not wait:
                break
            self._wait_for(partition_id, 1)
        if not over:
            return {}
        tq.kv_clear(partition_id=partition_id, keys=sorted(over))
        self._account_for_failures(partition_id)
        taken: dict[str, dict[str, dict]] = {uid: {} for uid in over}
        for key, tag in self.partitions[partition_id].items():
            uid = key.split("_")[0]
            if uid in taken:
                taken[uid][key] = tag
        return taken

    def last_arrival(self, partition_id: str) -> float:
        """Return when the last prompt of ``partition_id`` was over, in seconds since the epoch."""
        return float(ray.get(self._arrivals.last.remote(partition_id)))

    def begin_taking(self, batch_size: int) -> None:
        """Start a step whose ``batch_size`` prompts :meth:`take_finished` hands over."""
        self._batch_size, self._failures, self._failure_metrics = batch_size, [], {}

    @property
    def failure_metrics(self) -> dict[str, int]:
        """Failed rollouts of the step so far, by kind."""
        return self._failure_metrics

    def _wait_for(self, partition_id: str, missing: int) -> None:
        """Wait until ``missing`` more prompts have ended than were seen."""
        arrival = self._arrivals.wait_for.remote(partition_id, self._seen[partition_id] + missing)
        ready, _ = ray.wait([arrival, *self._sentinels], num_returns=1, timeout=self._stall_timeout_s)
        if not ready:
            waiting = sorted(self.pending_keys[partition_id] | self.running_keys[partition_id])
            raise RolloutStalledError(
                f"no rollout finished for {self._stall_timeout_s:g} s; {len(waiting)} prompts of partition "
                f"{partition_id!r} are not finished (first: {', '.join(waiting[:5])}); look at the agent-loop and "
                "rollout logs, or raise trainer.v1.m2flow.stall_timeout_s"
            )
        if ready[0] is not arrival:
            self._raise_worker_death(ready[0])
        self._seen[partition_id] = ray.get(arrival)

    def _raise_worker_death(self, sentinel: ray.ObjectRef) -> None:
        index = self._sentinels.index(sentinel)
        try:
            ray.get(sentinel)
        except ray.exceptions.RayError as error:
            raise RolloutWorkerDiedError(
                f"agent-loop worker {index} of {len(self._sentinels)} died and its rollouts with it: {error}; "
                "resume from the last checkpoint"
            ) from error
        raise RolloutWorkerDiedError(f"agent-loop worker {index} of {len(self._sentinels)} ended unexpectedly")

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> Any:
        """Account for the failures of what is about to be sampled; veRL calls this once per sample."""
        self._account_for_failures(partition_id)
        return super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)

    def _account_for_failures(self, partition_id: str) -> None:
        fresh: list[RolloutFailure] = ray.get(self._arrivals.take_failures.remote(partition_id))
        failures = self._failures = self._failures + fresh
        total = self._batch_size * self._rollouts_per_prompt[partition_id]
        causes = Counter(f"{f.kind} at {f.where}: {f.message}" for f in failures)
        prefix = self._metrics_prefix(partition_id)
        self._failure_metrics = {f"{prefix}/rollout_failure/count": len(failures)} | {
            f"{prefix}/rollout_failure/{kind}": count for kind, count in Counter(f.kind for f in failures).items()
        }
        report = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(5))
        if len(failures) > self._max_failed_fraction * total:
            raise RolloutFailedError(
                f"{len(failures)} of {total} rollouts failed, more than "
                f"trainer.v1.m2flow.max_failed_fraction={self._max_failed_fraction:g} allows: {report}"
            )
        if fresh:
            print(f"[rlinf-plugins] {len(failures)} of {total} rollouts failed and were left out: {report}", flush=True)
