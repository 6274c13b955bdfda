"""What a step measures, on a trainer whose stages take known times."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ProfileError
from rlinf_plugins.scheduler.planning.capture import check_spans
from rlinf_plugins.scheduler.planning.profile import Profile, Sample
from rlinf_verl.config import M2FlowConfig, ProfileConfig, VirtualDevicesConfig

pytestmark = pytest.mark.slow  # imports veRL

CONFIG = {
    "trainer": {"nnodes": 1, "n_gpus_per_node": 1, "critic_warmup": 0},
    "data": {"train_batch_size": 4, "max_response_length": 8},
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "critic": {"enable": False},
    "reward": {"reward_model": {"enable": False}},
    "actor_rollout_ref": {
        "model": {"path": "runs/tiny/model"},
        "actor": {"use_kl_loss": False, "ppo_mini_batch_size": 4},
        "rollout": {"n": 2, "tensor_model_parallel_size": 1, "nnodes": 1, "n_gpus_per_node": 1},
    },
}


class Times:
    """Stands for the ``time`` module: it stands still until a stage takes some."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def time(self):
        return 1e9 + self.now


class Base:
    """veRL's trainer as far as stages are concerned."""

    def __init__(self, options, clock, **changes):
        self.options, self.clock = options, clock
        self.config = OmegaConf.create(CONFIG)
        for key, value in changes.items():
            OmegaConf.update(self.config, key.replace("__", "."), value)
        self.sharing = SimpleNamespace(waited_s=0.0)
        self.actor_rollout_wg = SimpleNamespace(world_size=1)
        self.replay_buffer = SimpleNamespace(last_arrival=lambda partition: self.arrived)
        self.granularity = 0
        self.seen = []

    def _setup(self):
        self.global_steps = 0

    def fit(self, manager):
        for step in (1, 2, 3, 4):
            self.global_steps = step
            self.on_step_begin()
            self.seen.append(self.granularity)
            self.prepare_step()
            self.clock.now += 5.0
            self.arrived = self.clock.time() - 2.0
            self.on_sample_end()
            batch = SimpleNamespace(
                keys=[f"{p}_{s}_0" for p in "abcd" for s in (0, 1)],
                tags=[{"response_len": 2 + index} for index in range(8)],
            )
            for stage in (self._balance_batch, self._compute_old_log_prob, self._compute_advantage, self._update_actor):
                stage(batch, {})
            self._compute_metrics(batch, self.step_metrics, {"update_weights": 0.5}, global_steps=step, epoch=0)

    step_metrics: dict = {}

    def _takes(self, seconds):
        self.clock.now += seconds

    def on_step_begin(self):
        pass

    def prepare_step(self):
        self._takes(0.25)

    def on_sample_end(self):
        pass

    def _balance_batch(self, batch, metrics):
        self._takes(0.125)

    def _compute_advantage(self, batch, metrics):
        self._takes(0.5)

    def _compute_old_log_prob(self, batch, metrics):
        self._takes(1.0)

    def _update_actor(self, batch, metrics):
        self.sharing.waited_s += 4.0
        self._takes(7.0)

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        pass


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    from rlinf_verl.trainer import measured
    from rlinf_verl.trainer.stage_calls import StageCalls

    clock = Times()
    monkeypatch.setattr(measured, "time", clock)
    monkeypatch.setattr(measured, "StageCalls", lambda waited: StageCalls(waited, clock.monotonic))

    def make(mode="temporal", granularities=(), config=None):
        options = M2FlowConfig(
            mode=mode,
            virtual_devices=VirtualDevicesConfig(count=2, cores_per_device=1, memory_gb=1),
            profile=ProfileConfig(path=str(tmp_path / "p.json"), warmup=1, granularities=granularities),
        )
        made = type("Measured", (measured.MeasuresStages, Base), {})(options, clock, **(config or {}))
        made._setup()
        return made

    return make


def test_a_job_adds_its_steps_to_the_profile_without_the_warm_up(trainer, tmp_path):
    trainer().fit(None)
    found = Profile.read(tmp_path / "p.json")
    assert found.fingerprint.kinds[0].kind == "1-core"
    expected = {"rollout": 5.25, "old_log_prob": 1.125, "actor": 0.5 + 7.0 - 4.0}
    for stage, seconds in expected.items():
        assert found.stages[stage].samples == (Sample(devices=1, items=4, seconds=seconds, device_kind="1-core"),) * 3
    assert found.stages["rollout"].lengths == (3.0, 5.0, 7.0, 9.0) * 3
    assert {(sync.seconds, sync.shared) for sync in found.syncs} == {(0.5, True)}


def test_rollout_apart_ends_with_its_last_arrival(trainer, tmp_path):
    trainer("spatial").fit(None)
    found = Profile.read(tmp_path / "p.json")
    assert [s.seconds for s in found.stages["rollout"].samples] == pytest.approx([3.25] * 3, abs=1e-6)
    assert {sync.shared for sync in found.syncs} == {False}


def test_granularities_take_turns(trainer):
    made = trainer(granularities=(0, 2))
    made.fit(None)
    assert made.seen == [0, 2, 0, 2]


def test_switches_are_no_part_of_the_weight_sync(trainer, tmp_path):
    made = trainer()
    moves = {"onloads": 1, "offloads": 1, "onload_s": 0.25, "offload_s": 0.125}
    made.step_metrics = {f"sharing/{who}/{key}": value for who in ("rollout", "actor") for key, value in moves.items()}
    made.fit(None)
    found = Profile.read(tmp_path / "p.json")
    assert {sync.seconds for sync in found.syncs} == {0.5 - 0.25 - 0.125}
    for stage in ("rollout", "actor"):
        assert {(s.onload_seconds, s.offload_seconds) for s in found.stages[stage].switches} == {(0.25, 0.125)}


def test_a_job_that_differs_from_the_planned_flow_says_so_once(trainer, capsys):
    trainer(config={"actor_rollout_ref__actor__use_kl_loss": True}).fit(None)  # but no stage computes the reference
    lines = [line for line in capsys.readouterr().out.splitlines() if "differs from the flow" in line]
    assert lines == [
        "[rlinf-plugins] the job differs from the flow that is planned for: reference of the flow was never called"
    ]


def test_a_profile_of_another_batch_is_refused_at_setup(trainer):
    trainer().fit(None)
    with pytest.raises(ProfileError, match="is of flow 'tiny/model/4x2/8', not of 'tiny/model/8x2/8'"):
        trainer(config={"data__train_batch_size": 8})


class Buffer:
    """Two prompts are over at once, the others one after the other."""

    failure_metrics: dict = {}

    def __init__(self, clock):
        self.clock, self.waves = clock, [["a", "b"], ["c"], ["d"]]

    def begin_taking(self, count):
        pass

    def last_arrival(self, partition):
        return self.clock.time()

    def take_finished(self, partition, *, wait):
        self.clock.now += 1.0
        found = {}
        for uid in self.waves.pop(0):
            tag = {"seq_len": 9, "response_len": 4, "prompt_len": 5}
            found[uid] = {f"{uid}_{session}_0": dict(tag) for session in (0, 1)}
        return found


class Group:
    """A worker group whose forward-backward pass takes three seconds a row, and whose optimizer step takes eight."""

    world_size = 1

    def __init__(self, clock):
        self.clock = clock

    def begin_mini_batch(self):
        pass

    def accumulate(self, chunk):
        self.clock.now += 3.0 * len(chunk)

    def apply_gradients(self, denominator, rows, last):
        self.clock.now += 8.0
        return {"grad_norm": 1.0}


class StreamedBase(Base):
    use_reference_policy = use_critic = lends = False
    separate = True
    tokenizer = SimpleNamespace(eos_token_id=0)
    submitted = list("abcd")

    def fit(self, manager):
        self.global_steps = 1
        self.on_step_begin()
        self.prepare_step()
        self.metrics = {}
        batch = self._step_once(self.metrics, {}, 4)
        self._compute_metrics(batch, self.metrics, {"update_weights": 0.5}, global_steps=1, epoch=0)

    def on_sample_begin(self):
        pass

    def reclaim(self):
        pass

    def _mini_batches(self):
        return nullcontext()


def test_a_streamed_step_is_measured_chunk_by_chunk(trainer, monkeypatch):
    import verl.trainer.ppo.v1  # noqa: F401  the trainer registers itself when veRL's are imported

    from rlinf_verl.trainer.measured import MeasuresStages
    from rlinf_verl.trainer.streamed import StreamedStep

    whole = trainer("spatial")
    changes = {
        "actor_rollout_ref__actor__ppo_epochs": 1,
        "actor_rollout_ref__actor__strategy": "fsdp2",
        "actor_rollout_ref__actor__loss_agg_mode": "token-mean",
        "actor_rollout_ref__actor__entropy_coeff": 0.0,
        "actor_rollout_ref__rollout__temperature": 1.0,
        "critic__ppo_mini_batch_size": 4,
        "trainer__v1": {"sampler": {}},
    }
    kind = type("Streamed", (MeasuresStages, StreamedStep, StreamedBase), {})
    made = kind(replace(whole.options, granularity=2), whole.clock, **changes)
    made._setup()
    made.actor_rollout_wg, made.replay_buffer = Group(made.clock), Buffer(made.clock)
    made.sharing = SimpleNamespace(waited_s=0.0, use=lambda *names: nullcontext())
    made.fit(None)
    calls = [(c.attributes["stage"], c.attributes["items"], c.attributes["seconds"]) for c in made.step_calls]
    # A chunk is what is ready: three prompts by then. Advantages, rows, and its share of the optimizer step.
    assert sorted(call for call in calls if call[0] != "rollout") == [
        ("actor", 1, 0.5 + 3.0 * 2 + 8.0 / 4),
        ("actor", 3, 0.5 + 3.0 * 6 + 8.0 * 3 / 4),
        ("old_log_prob", 1, 1.0),
        ("old_log_prob", 3, 1.0),
    ]
    assert [call[1] for call in calls if call[0] == "rollout"] == [4]
    check_spans(made.flow, made.step_calls)


def test_a_trainer_measures_where_a_profile_is_named():
    import verl.trainer.ppo.v1  # noqa: F401

    from rlinf_verl.trainer.m2flow import M2FlowTrainer, MeasuredM2FlowTrainer

    for path, kind in ((None, M2FlowTrainer), ("p.json", MeasuredM2FlowTrainer)):
        config = OmegaConf.create({"trainer": {"v1": {"m2flow": {"profile": {"path": path}}}}})
        assert type(M2FlowTrainer.__new__(M2FlowTrainer, config)) is kind
