import asyncio

import pytest
from omegaconf import OmegaConf

from rlinf_verl.trainer.finished import FinishedStore, KeepsFinished, folder_of


class Base:
    def on_step_begin(self):
        self.begun = self.global_steps


class Trainer(KeepsFinished, Base):
    def __init__(self, config, step):
        self.config, self.global_steps = config, step


@pytest.fixture
def job(tmp_path):
    """Makes a job's configuration in one folder."""

    def make(*changes):
        config = OmegaConf.create(
            {
                "trainer": {"default_local_dir": str(tmp_path), "save_freq": 1, "resume_mode": "auto"},
                "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"temperature": 1.0}},
                "data": {"train_files": "t"},
                "reward": {"num_workers": 1},
            }
        )
        return OmegaConf.merge(config, OmegaConf.from_dotlist(list(changes)))

    return make


def checkpoint(config, step):
    path = folder_of(config).parent.parent / "latest_checkpointed_iteration.txt"
    path.write_text(str(step))


def row(step=1, index=0, session=0, uid="a", prompt="1 + 1"):
    return {
        "global_steps": step,
        "index": index,
        "session_id": session,
        "uid": uid,
        "raw_prompt": [{"role": "user", "content": prompt}],
    }


def begin(config, step):
    Trainer(config, step).on_step_begin()
    return FinishedStore(folder_of(config))


def test_an_interrupted_step_finds_what_was_finished_under_new_uids(job, capsys):
    begin(job(), 1).save(row(uid="a"), "the answer")
    again = begin(job(), 1)
    assert again.load(row(uid="b")) == "the answer"
    assert again.load(row(uid="b", session=1)) is None
    assert again.load(row(uid="c", prompt="2 + 2")) is None
    assert "step 1 was interrupted: 1 finished trajectories are taken over" in capsys.readouterr().out


def test_equal_prompts_of_a_batch_keep_their_own(job):
    store = begin(job(), 1)
    store.save(row(uid="a"), "first")
    store.save(row(uid="b"), "second")
    again = begin(job(), 1)
    assert [again.load(row(uid=uid)) for uid in ("x", "y")] == ["first", "second"]


def test_only_the_step_after_the_last_checkpoint_is_kept(job):
    config = job()
    begin(config, 1).save(row(), "old")
    later = begin(config, 2)  # no checkpoint of step 1: resuming would start at step 1 again
    later.save(row(step=2), "useless")
    assert later.load(row(step=2)) is None
    assert later.load(row()) is None
    checkpoint(config, 2)
    store = begin(config, 3)
    store.save(row(step=3), "kept")
    assert begin(config, 3).load(row(step=3)) == "kept"


@pytest.mark.parametrize(
    "change",
    ["actor_rollout_ref.model.path=other", "actor_rollout_ref.rollout.temperature=0.5", "data.train_files=other"],
)
def test_another_job_takes_nothing_over(job, change):
    begin(job(), 1).save(row(), "of the old job")
    assert begin(job(change), 1).load(row()) is None


def test_a_fresh_start_takes_nothing_over(job):
    begin(job(), 1).save(row(), "old")
    assert begin(job("trainer.resume_mode=disable"), 1).load(row()) is None


def test_within_a_run_a_step_does_not_lose_its_own(job):
    trainer = Trainer(job("trainer.resume_mode=disable"), 1)
    trainer.on_step_begin()
    FinishedStore(folder_of(trainer.config)).save(row(), "now")
    trainer.on_step_begin()
    assert FinishedStore(folder_of(trainer.config)).load(row()) == "now"


def test_without_checkpoints_nothing_is_written(job):
    config = job("trainer.save_freq=-1")
    begin(config, 1).save(row(), "x")
    assert not list(folder_of(config).glob("**/*"))


def test_a_worker_saves_what_it_finished_and_takes_it_over_without_generating(job, monkeypatch):
    from rlinf_verl.trainer import agent_loop

    put, generated = [], []

    async def postprocess(self, output, validate, **kwargs):
        put.append((output, kwargs["uid"]))

    async def run(self, sampling_params, trajectory, *, agent_name, trace, **kwargs):
        generated.append(kwargs["session_id"])
        return await self._agent_loop_postprocess(f"answer {kwargs['session_id']}", trajectory["validate"], **kwargs)

    plain = agent_loop._PlainAgentLoopWorker
    monkeypatch.setattr(plain, "_agent_loop_postprocess", postprocess)
    monkeypatch.setattr(plain, "_run_agent_loop", run)

    def work(uid, session, validate=False):
        worker = object.__new__(agent_loop.ArrivalAgentLoopWorker)
        worker._arrivals, worker._finished = None, begin(job(), 1)
        found = {"agent_name": "x", "trace": False, **row(uid=uid, session=session)}
        asyncio.run(worker._run_agent_loop({}, {"validate": validate}, **found))

    work("a", 0)
    work("b", 0)  # the run was killed and resumed
    work("b", 1)
    work("v", 0, validate=True)
    assert generated == [0, 1, 0]
    assert put == [("answer 0", "a"), ("answer 0", "b"), ("answer 1", "b"), ("answer 0", "v")]
