"""veRL's engines and replicas as residents: its own verbs, called in the right order, under the fence."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rlinf_plugins.core.errors import ConfigError, ResidentStateError, StaleTokenError
from rlinf_plugins.scheduler.lock.fence import FileFence, Permit
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.resident import Resident
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_verl.trainer import worker_side
from rlinf_verl.trainer.all_replicas import AllReplicas
from rlinf_verl.trainer.replica_residents import Replica, ReplicaCache, ReplicaWeights, refill_through
from rlinf_verl.trainer.residents import EngineResident, WorkingRoom, servable

PERMIT = Permit({"d0": 5, "d1": 5}, "test")


class Remote:
    """A method of an actor handle."""

    def __init__(self, function):
        self.function = function

    async def remote(self, *args, **kwargs):
        await asyncio.sleep(0)
        result = self.function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result


class FakeTrainingWorker:
    """Has veRL's ``to``; on "cpu" its bytes are gone from the device's total."""

    def __init__(self, memory, log):
        self.memory, self.log = memory, log
        module = torch.nn.Linear(4, 4)
        self.engine = SimpleNamespace(module=module, optimizer=None)

    def to(self, device, model=True, optimizer=True, grad=True):
        self.log.append(("to", device, model, optimizer, grad))


def handle(worker):
    return SimpleNamespace(**{"__ray_call__": Remote(lambda function, *args: function(worker, *args))})


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """Two ranks with an actor each, one rollout replica on the same devices, a router; all log what they are asked."""
    log = []
    memory = {"weights": 0, "cache": 0, "other": 100}

    class Server:
        def __init__(self, name):
            for verb in ("sleep", "wake_up", "release_kv_cache", "resume_kv_cache", "abort_all_requests"):
                setattr(self, verb, Remote(lambda verb=verb, **kwargs: self.asked(verb, **kwargs)))
            self.resume_generation = Remote(lambda: self.asked("resume_generation"))
            self.wait_for_requests_to_drain = Remote(lambda: self.asked("wait_for_requests_to_drain"))

        def asked(self, verb, **kwargs):
            log.append((verb, kwargs) if kwargs else verb)
            if verb == "sleep":
                memory.update(weights=0, cache=0)
            if verb == "wake_up":
                memory.update({{"weights": "weights", "kv_cache": "cache"}[tag]: 40 for tag in kwargs["tags"]})
            if verb in ("release_kv_cache", "resume_kv_cache"):
                memory.update(cache=0 if verb == "release_kv_cache" else 30)

    class FakeReplica(RolloutReplica):
        def __init__(self, workers):
            self.replica_rank, self.workers = 3, workers
            self.servers = [Server("s")]
            self._server_address, self._server_handle = "host:1", self.servers[0]

        async def launch_servers(self): ...

    training = [FakeTrainingWorker(memory, log) for _ in range(2)]
    workers = [
        handle(SimpleNamespace(worker_dict={"actor_rollout": SimpleNamespace(actor=t, ref=None)})) for t in training
    ]
    router = SimpleNamespace(
        remove_servers=Remote(lambda ids: log.append(("remove_servers", ids))),
        add_servers=Remote(lambda servers: log.append(("add_servers", list(servers)))),
    )
    monkeypatch.setattr(worker_side, "device_used_bytes", lambda worker: sum(memory.values()))
    folder = str(tmp_path / "fence")
    return SimpleNamespace(
        log=log,
        memory=memory,
        training=training,
        workers=workers,
        replica=FakeReplica(workers),
        router=router,
        folder=folder,
        fence=FileFence(tmp_path / "fence"),
    )


def replica_of(rig, **options):
    options = {"keeps_weights": True, **options}
    return Replica(rig.replica, ["d0", "d1"], rig.router, fence_folder=rig.folder, **options)


def engine_of(rig, **options):
    return EngineResident("actor", rig.workers, "actor", ["d0", "d1"], 80, fence_folder=rig.folder, **options)


def test_the_verbs_have_the_signatures_these_residents_rely_on():
    assert list(inspect.signature(TrainingWorker.to).parameters) == ["self", "device", "model", "optimizer", "grad"]
    assert list(inspect.signature(ActorRolloutRefWorker.to).parameters)[1:] == ["device", "model", "optimizer", "grad"]
    for verb in ("sleep", "wake_up", "resume_generation", "release_kv_cache", "resume_kv_cache"):
        assert list(inspect.signature(getattr(RolloutReplica, verb)).parameters) == ["self"]
    assert "reject_request" in inspect.signature(RolloutReplica.abort_all_requests).parameters
    assert list(inspect.signature(CheckpointEngineManager.__init__).parameters)[1:] == [
        "config",
        "actor_wg",
        "replicas",
    ]
    router = GlobalRequestLoadBalancer
    assert list(inspect.signature(router.remove_servers).parameters)[1:] == ["server_ids"]
    assert list(inspect.signature(router.add_servers).parameters)[1:] == ["servers"]


def test_all_are_residents(rig):
    replica = replica_of(rig)
    for resident in (
        engine_of(rig),
        WorkingRoom("ref", rig.workers, ["d0", "d1"], 10, fence_folder=rig.folder),
        ReplicaWeights("weights", replica, 40),
        ReplicaCache("kv", replica, 30),
    ):
        assert isinstance(resident, Resident)


async def test_an_engine_moves_by_verls_verb_on_every_rank(rig):
    actor = engine_of(rig, optimizer=False)
    assert (await actor.resident_bytes())["d0"] == 4 * 4 * 4 + 4 * 4
    await actor.drain()
    await actor.offload(PERMIT)
    assert rig.log == [("to", "cpu", True, False, True)] * 2
    assert await actor.resident_bytes() == {"d0": 0, "d1": 0}
    await actor.onload(PERMIT)
    assert rig.log[-2:] == [("to", "device", True, False, True)] * 2
    assert (await actor.resident_bytes())["d1"] == 80


async def test_an_engine_refuses_a_stale_token_in_its_own_process(rig):
    rig.fence.seal(Permit({"d1": 6}, "heir"))
    with pytest.raises(StaleTokenError, match="d1 with token 5, but 6"):
        await engine_of(rig).onload(PERMIT)
    assert rig.log == [("to", "device", True, True, True)], "rank 0 moved, rank 1 refused"


def test_the_engine_of_a_role_is_found_in_fused_workers():
    critic, actor, ref = (SimpleNamespace(engine=object()) for _ in range(3))
    fused = SimpleNamespace(worker_dict={"actor_rollout_ref": SimpleNamespace(actor=actor, ref=ref), "critic": critic})
    assert worker_side.find_training_worker(fused, "critic") is critic
    assert worker_side.find_training_worker(fused, "actor") is actor
    assert worker_side.find_training_worker(fused, "ref") is ref
    assert worker_side.find_training_worker(critic, "critic") is critic
    with pytest.raises(ResidentStateError, match="no ref engine; it holds critic"):
        worker_side.find_training_worker(SimpleNamespace(worker_dict={"critic": critic}), "ref")


async def test_an_engine_that_fetches_its_own_weights_needs_only_room(rig):
    room = WorkingRoom("ref", rig.workers, ["d0", "d1"], 10, fence_folder=rig.folder)
    assert await room.resident_bytes() == {"d0": 0, "d1": 0}
    await room.onload(PERMIT)
    assert await room.resident_bytes() == {"d0": 10, "d1": 10}
    rig.fence.seal(Permit({"d0": 9}, "heir"))
    with pytest.raises(StaleTokenError):
        await room.offload(PERMIT)
    assert rig.log == []


async def test_a_replica_leaves_the_router_before_it_drains_and_comes_back_last(rig):
    replica = replica_of(rig)
    weights, cache = ReplicaWeights("weights", replica, 40, awake=False), ReplicaCache("kv", replica, 30, awake=False)
    await weights.onload(PERMIT)
    await cache.onload(PERMIT)
    await cache.resume()
    assert rig.log == [("wake_up", {"tags": ["weights"]}), "resume_kv_cache", ("add_servers", ["host:1"])]
    assert await weights.resident_bytes() == {"d0": 40, "d1": 40}
    assert await cache.resident_bytes() == {"d0": 30, "d1": 30}
    rig.log.clear()
    await cache.drain()
    await cache.offload(PERMIT)
    await weights.drain()
    await weights.offload(PERMIT)
    assert rig.log == [("remove_servers", ["host:1"]), "wait_for_requests_to_drain", "release_kv_cache", "sleep"]
    assert await cache.resident_bytes() == {"d0": 0, "d1": 0}
    assert await weights.resident_bytes() == {"d0": 0, "d1": 0}


async def test_requests_can_move_on_instead_of_ending(rig):
    cache = ReplicaCache("kv", replica_of(rig, drain="move"), 30)
    await cache.drain()
    await cache.resume()
    assert rig.log == [
        ("remove_servers", ["host:1"]),
        ("abort_all_requests", {"reject_request": True}),
        "resume_generation",
        ("add_servers", ["host:1"]),
    ]


async def test_a_cache_that_stays_behind_is_measured(rig):
    rig.memory.update(weights=40, cache=30)
    cache = ReplicaCache("kv", replica_of(rig), 30)
    rig.replica.servers[0].release_kv_cache = Remote(lambda: None)
    await cache.offload(PERMIT)
    assert await cache.resident_bytes() == {"d0": 30, "d1": 30}
    rig.memory.update(cache=0)
    assert await cache.resident_bytes() == {"d0": 0, "d1": 0}


async def test_discarded_weights_come_back_with_the_cache_and_once(rig):
    synced = []

    class Manager:
        backend = "nccl"

        def __init__(self, config, actor_wg, replicas):
            self.config, self.actor_wg, self.replicas = config, actor_wg, replicas

        async def update_weights(self, global_steps=None):
            synced.append(([r.replica_rank for r in self.replicas], global_steps))
            rig.memory.update(cache=30)

    refill = refill_through(Manager("config", "actor_wg", ["all", "replicas"]), lambda: 17)
    replica = replica_of(rig, keeps_weights=False, refill=refill)
    weights, cache = ReplicaWeights("weights", replica, 40), ReplicaCache("kv", replica, 30)
    rig.memory.update(weights=40, cache=30)
    for resident in (cache, weights):
        await resident.offload(PERMIT)
    for resident in (weights, cache):
        await resident.onload(PERMIT)
    assert synced == [([3], 17)]
    assert "resume_kv_cache" not in rig.log, "veRL's weight sync maps the cache itself"
    assert await cache.resident_bytes() == {"d0": 30, "d1": 30}


def test_what_cannot_work_is_refused_when_it_is_made(rig):
    with pytest.raises(ConfigError, match="waking one needs rollout.checkpoint_engine.backend other than 'naive'"):
        replica_of(rig, keeps_weights=False)
    with pytest.raises(ConfigError, match="naive"):
        refill_through(SimpleNamespace(backend="naive"), lambda: 0)
    with pytest.raises(ConfigError, match="2 workers and 1 devices"):
        EngineResident("actor", rig.workers, "actor", ["d0"], 80, fence_folder=rig.folder)
    del rig.replica.servers[0].wait_for_requests_to_drain
    with pytest.raises(ConfigError, match="use drain='move'"):
        replica_of(rig)


async def test_a_replica_woken_under_a_lost_lease_goes_back_to_sleep(rig):
    weights = ReplicaWeights("weights", replica_of(rig), 40, awake=False)
    wake = rig.replica.servers[0].wake_up.function

    def slow(**kwargs):
        wake(**kwargs)
        rig.fence.seal(Permit({"d1": 6}, "heir"))

    rig.replica.servers[0].wake_up = Remote(slow)
    with pytest.raises(StaleTokenError):
        await weights.onload(PERMIT)
    assert rig.log[-1] == "sleep"
    assert await weights.resident_bytes() == {"d0": 0, "d1": 0}


async def test_replica_and_actor_take_turns_on_one_device(rig):
    capacity = {"d0": 100, "d1": 100}
    switcher = Switcher(LocalLock(capacity), capacity, patience_s=5.0)
    replica = replica_of(rig, measured=False)
    await switcher.add(ReplicaWeights("weights", replica, 40, awake=False))
    await switcher.add(ReplicaCache("kv", replica, 30, awake=False), after=["weights"])
    for training in rig.training:
        worker_side._SENT_OFF.add(training)
    await switcher.add(engine_of(rig))
    async with switcher.use("kv"):
        assert "to" not in [entry[0] for entry in rig.log]
    async with switcher.use("actor"):
        assert not switcher.is_on("weights")
    async with switcher.use("kv"):
        assert not switcher.is_on("actor")
    assert switcher.budget.used("d0") == 70


async def test_all_replicas_wake_by_a_weight_sync(rig):
    class Manager:
        def sleep_replicas(self):
            asyncio.run(asyncio.sleep(0))  # as veRL's decorator does; fails on a running loop
            rig.log.append("sleep_replicas")

        def update_weights(self, global_steps):
            asyncio.run(asyncio.sleep(0))
            rig.log.append(("update_weights", global_steps))

    version = iter(range(7, 100))
    replicas = AllReplicas(
        "rollout", Manager(), rig.workers, ["d0", "d1"], 60, lambda: next(version), fence_folder=rig.folder
    )
    assert isinstance(replicas, Resident)
    capacity = {"d0": 100, "d1": 100}
    switcher = Switcher(LocalLock(capacity), capacity)
    await switcher.add(replicas)
    for training in rig.training:
        worker_side._SENT_OFF.add(training)
    await switcher.add(engine_of(rig))
    for name in ("rollout", "actor", "rollout"):
        async with switcher.use(name):
            pass
    moves = ["sleep_replicas", *[("to", "device", True, True, True)] * 2]
    assert rig.log == [*moves, *[("to", "cpu", True, True, True)] * 2, ("update_weights", 7)]
    rig.fence.seal(Permit({"d0": 10**9}, "heir"))
    with pytest.raises(StaleTokenError):
        await replicas.offload(PERMIT)


def test_a_freed_device_serves_only_groups_that_lie_wholly_on_freed_devices():
    groups = {"reference": ["d0", "d1"], "reward": ["d1"], "actor": ["d0", "d1", "d2"], "nowhere": []}
    assert servable(frozenset(["d1"]), groups) == ("reward",)
    assert servable(frozenset(["d0", "d1"]), groups) == ("reference", "reward")
    assert servable(frozenset(), groups) == ()
