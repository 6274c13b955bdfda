"""The arrival-driven buffer over a real Arrivals actor; TransferQueue's metadata is a mapping in the test."""

import asyncio
import os
import signal
import threading

import pytest

from rlinf_plugins.core.errors import RolloutFailedError, RolloutStalledError, RolloutWorkerDiedError
from rlinf_verl.trainer.arrivals import Arrivals, RolloutFailure

pytestmark = [pytest.mark.slow, pytest.mark.ray]


@pytest.fixture
def arrivals(ray_session):
    actor = ray_session.remote(Arrivals).options(num_cpus=0, max_concurrency=16).remote()
    yield actor
    ray_session.kill(actor)


@pytest.fixture
def make_buffer(arrivals, monkeypatch):
    from verl.trainer.ppo.v1 import replay_buffer

    from rlinf_verl.trainer.replay import ArrivalReplayBuffer

    monkeypatch.setattr(replay_buffer.tq, "kv_clear", lambda **_: None)
    status: dict[str, str] = {}

    class Buffer(ArrivalReplayBuffer):
        looks = 0

        def _sync_metadata_from_transfer_queue(self):
            Buffer.looks += 1
            for keys in (self.pending_keys, self.finished_keys, self.failure_keys):
                keys["train"] = set()
            for uid, state in list(status.items()):
                getattr(self, f"{state}_keys")["train"].add(uid)
                self.prompt_global_steps["train"][uid] = 1
            self.partitions["train"] = {f"{uid}_0_0": {} for uid in status}

    def make(sentinels=(), **options):
        settings = {"max_failed_fraction": 0.5, "stall_timeout_s": 30.0} | options
        buffer = Buffer(
            **settings,
            rollouts_per_prompt={"train": 4, "val": 1},
            trainer_mode="sync",
            trainer_config={},
            max_off_policy_threshold=1,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
        )
        buffer.attach(arrivals, list(sentinels))
        return buffer, status

    Buffer.looks = 0
    make.looks = lambda: Buffer.looks
    return make


@pytest.fixture
def sample(make_buffer, ray_session, arrivals):
    """Sample two prompts of a buffer in which ``finish`` ends prompts from another thread."""

    def run(buffer, status, finish):
        status.update(dict.fromkeys(("a", "b"), "pending"))
        thread = threading.Thread(target=finish)
        thread.start()
        try:
            return buffer.sample(global_steps=1, partition_id="train", batch_size=2)
        finally:
            thread.join()

    return run


def failure(session: int) -> RolloutFailure:
    return RolloutFailure(uid="a", session_id=session, kind="OSError", message="gone", where="tool.py:3 in call")


def test_one_look_when_everything_is_there_and_one_wake_up_for_all_that_is_missing(
    make_buffer, sample, ray_session, arrivals
):
    buffer, status = make_buffer()

    def finish():
        for uid in ("a", "b"):
            status[uid] = "finished"
            ray_session.get(arrivals.publish.remote("train"))

    batch, metrics = sample(buffer, status, finish)
    assert set(batch.keys) == {"a_0_0", "b_0_0"}
    assert metrics["training/rollout_failure/count"] == 0
    assert make_buffer.looks() <= 3
    looks = make_buffer.looks()
    buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert make_buffer.looks() == looks + 1


def test_failures_are_counted_and_reported(make_buffer, sample, ray_session, arrivals, capsys):
    buffer, status = make_buffer()

    def finish():
        ray_session.get(arrivals.report.remote("train", [failure(0)]))
        status.update(a="failure", b="finished")
        ray_session.get(arrivals.publish.remote("train"))
        ray_session.get(arrivals.publish.remote("train"))

    _, metrics = sample(buffer, status, finish)
    assert metrics["training/rollout_failure/count"] == 1
    assert metrics["training/rollout_failure/OSError"] == 1
    assert "1 of 8 rollouts failed and were left out: 1 x OSError at tool.py:3 in call: gone" in capsys.readouterr().out


def test_more_failures_than_allowed_stop_with_their_causes(make_buffer, sample, ray_session, arrivals):
    buffer, status = make_buffer(max_failed_fraction=0.25)

    def finish():
        ray_session.get(arrivals.report.remote("train", [failure(i) for i in range(3)]))
        status.update(a="failure", b="finished")
        ray_session.get(arrivals.publish.remote("train"))
        ray_session.get(arrivals.publish.remote("train"))

    with pytest.raises(RolloutFailedError, match=r"3 of 8 .*0\.25.*3 x OSError at tool\.py:3"):
        sample(buffer, status, finish)


def test_a_stall_names_what_is_missing(make_buffer, sample):
    buffer, status = make_buffer(stall_timeout_s=0.2)
    with pytest.raises(RolloutStalledError, match=r"0\.2 s; 2 prompts .* \(first: a, b\)"):
        sample(buffer, status, lambda: None)


def test_a_killed_worker_ends_the_wait(make_buffer, sample, ray_session):
    class Worker:
        async def run_until_exit(self):
            await asyncio.Event().wait()

        async def pid(self):
            return os.getpid()

    worker = ray_session.remote(Worker).options(num_cpus=0, max_concurrency=4).remote()
    pid = ray_session.get(worker.pid.remote())
    buffer, status = make_buffer(sentinels=[worker.run_until_exit.remote()])
    with pytest.raises(RolloutWorkerDiedError, match="worker 0 of 1 died"):
        sample(buffer, status, lambda: os.kill(pid, signal.SIGKILL))
