"""Stages that share devices: who comes, who stays, who leaves, and what is reported of it."""

from types import SimpleNamespace

import pytest

from rlinf_plugins.core.errors import ExceedsCapacityError
from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.lock.fence import MemoryFence
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.virtual import VirtualDevices, VirtualResident
from rlinf_verl.trainer.residents import WorkingRoom
from rlinf_verl.trainer.sharing import Sharing, Tenants, fence_folder
from rlinf_verl.trainer.sharing_metrics import switch_lines, switch_metrics
from rlinf_verl.trainer.sharing_trainer import STEP, SharesDevices


class Replicas(VirtualResident):
    """Replicas that log how weights came to them."""

    def __init__(self, log, *args, **options):
        super().__init__(*args, **options)
        self.log = log

    async def onload(self, permit):
        await super().onload(permit)
        self.log.append("woken")

    async def offload(self, permit):
        await super().offload(permit)
        self.log.append("asleep")

    def refresh(self):
        self.log.append("refreshed")


class Rig:
    """One device of ``capacity`` bytes: rollout 60, actor 50, ref 10."""

    def __init__(self, capacity, **options):
        self.log, devices, fence = [], VirtualDevices({"d": capacity}), MemoryFence()
        fast = {"bytes_per_s": 1e4}
        self.devices = devices
        self.replicas = Replicas(self.log, "rollout", {"d": 60}, devices, fence, **fast)
        self.engines = {
            name: VirtualResident(name, {"d": size}, devices, fence, **fast)
            for name, size in (("actor", 50), ("ref", 10))
        }
        devices.allocate("d", "actor", 50)
        if options.get("rollout_fixed"):
            devices.allocate("d", "rollout", 60)
        tenants = Tenants(capacity={"d": capacity}, rollout=self.replicas, engines=self.engines, **options)
        self.sharing = Sharing(tenants, LocalLock({"d": capacity}))

    def step(self):
        """One step of veRL's in its order; returns what was reported."""
        sharing = self.sharing
        sharing.begin_step(STEP)
        with sharing.use("rollout"):
            assert self.devices.held("d", "rollout")
        sharing.generated()
        for stage in ("actor", "ref", "actor"):
            with sharing.use(stage):
                assert self.devices.held("d", stage)
        sharing.sync_weights()
        return sharing.take_metrics()


@pytest.fixture
def rig():
    made = []

    def make(capacity, **options):
        made.append(Rig(capacity, **options))
        return made[-1]

    yield make
    for one in made:
        one.sharing.close()


def test_with_room_for_all_nobody_moves_and_weights_go_to_replicas_that_are_awake(rig):
    ample = rig(120)
    ample.sharing.sync_weights()
    assert ample.sharing.take_metrics()["sharing/rollout/onloads"] == 1
    ample.step()
    assert ample.step()["sharing/switches"] == 0
    assert ample.log == ["woken", "refreshed", "refreshed"]


def test_in_tight_memory_they_take_turns_and_each_turn_is_reported(rig):
    tight = rig(60)
    tight.sharing.sync_weights()
    first = tight.sharing.take_metrics()
    assert first["sharing/actor/offloads"] == 1
    found = tight.step()
    # The reference's room fits beside the actor; the replicas need it all, and the actor's and the reference's leave.
    moves = {key: value for key, value in found.items() if "/rollout/" in key or "/actor/" in key}
    assert all(
        moves.pop(f"sharing/{who}/{move}_s") > 0 for who in ("rollout", "actor") for move in ("onload", "offload")
    )
    assert moves == {
        "sharing/rollout/offloads": 1,
        "sharing/rollout/onloads": 1,
        "sharing/actor/onloads": 1,
        "sharing/actor/offloads": 1,
        "sharing/rollout/left_for/actor": 1,
        "sharing/actor/left_for/rollout": 1,
    }
    assert found["sharing/ref/left_for/rollout"] == 1
    assert found["sharing/bytes_in"] == 50 + 10 + 60
    assert found["sharing/bytes_out"] == 60 + 50 + 10
    assert found["sharing/switches"] == 3
    assert found["sharing/switch_s"] > 0
    assert tight.devices.peak["d"] <= 60
    assert tight.log == ["woken", "asleep", "woken"]


def test_the_replicas_leave_first_since_they_get_new_weights_anyway(rig):
    medium = rig(115)
    medium.sharing.sync_weights()
    medium.sharing.take_metrics()
    found = medium.step()
    assert found["sharing/rollout/left_for/ref"] == 1, "not the actor, though its moves take less"
    assert "sharing/actor/left_for/ref" not in found


def test_replicas_that_cannot_stay_leave_after_every_generation(rig):
    sync_like = rig(200, rollout_leaves=True)
    sync_like.sharing.sync_weights()
    sync_like.sharing.take_metrics()
    found = sync_like.step()
    assert found["sharing/rollout/offloads"] == found["sharing/rollout/onloads"] == 1
    assert sync_like.log == ["woken", "asleep", "woken"]


def test_replicas_that_never_leave_count_against_the_capacity(rig):
    fixed = rig(120, rollout_fixed=True)
    fixed.sharing.sync_weights()
    fixed.step()
    assert fixed.log == ["refreshed", "refreshed"]
    with pytest.raises(ExceedsCapacityError, match=r"actor can never run: it needs 50 bytes on d \(actor 50\), which"):
        Sharing(
            Tenants(capacity={"d": 109}, rollout=fixed.replicas, engines=fixed.engines, rollout_fixed=True),
            LocalLock({"d": 109}),
        )


def test_what_can_never_fit_is_refused_with_the_numbers(rig):
    with pytest.raises(ExceedsCapacityError, match=r"needs 60 bytes on d \(rollout 60\), which has 55"):
        rig(55)


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ({"replica 0": {"a", "b"}}, ""),
        (
            {"replica 0": {"a"}, "replica 1": {"b"}},
            "; no stage's process group lies on the devices of one replica, so all replicas leave together",
        ),
        ({"replica 0": {"a"}, "replica 1": {"b", "c"}}, "; the devices of replica 1 hold all of ref"),
    ],
)
def test_what_one_replicas_devices_could_serve_is_said(replicas, said):
    names = sorted(set().union(*replicas.values()))
    devices, fence = VirtualDevices(dict.fromkeys(names, 100)), MemoryFence()
    where = {"rollout": names, "actor": names, "ref": names[1:] if len(names) == 3 else names}
    made = {name: VirtualResident(name, dict.fromkeys(on, 10), devices, fence) for name, on in where.items()}
    tenants = Tenants(
        capacity=devices.capacity,
        rollout=made.pop("rollout"),
        engines=made,
        replicas={name: frozenset(on) for name, on in replicas.items()},
    )
    sharing = Sharing(tenants, LocalLock(devices.capacity))
    found = sharing.describe()
    sharing.close()
    assert found.startswith("a has 100 bytes, rollout 10, actor 10")
    assert found.endswith(f" has 100 bytes, rollout 10, actor 10, ref 10{said}")


def test_a_stage_may_work_beside_the_generation_where_both_fit(rig):
    ample = rig(120)
    assert ample.sharing.fit_together("rollout", "actor")
    with ample.sharing.use("rollout"), ample.sharing.use("actor"):
        assert ample.devices.held("d", "rollout")
        assert ample.devices.held("d", "actor")
    assert not rig(60).sharing.fit_together("rollout", "actor")


def test_a_checkpoint_holds_engines_that_stay_and_the_largest_room():
    class Lock(LocalLock):
        pass

    workers = [SimpleNamespace()]
    actor, critic = (
        WorkingRoom(n, workers, ["d"], b, fence_folder="/nowhere") for n, b in (("actor", 5), ("critic", 9))
    )
    devices = VirtualDevices({"d": 100})
    replicas = Replicas([], "rollout", {"d": 1}, devices, MemoryFence())
    engine = VirtualResident("actor", {"d": 50}, devices, MemoryFence())
    for engines, expected in (
        ({"actor": actor, "critic": critic}, ("critic",)),
        ({"actor": engine, "critic": critic}, ("actor", "critic")),
    ):
        tenants = Tenants(capacity={"d": 100}, rollout=replicas, engines=engines)
        sharing = Sharing(tenants, Lock({"d": 100}))
        assert sharing.saved_together == expected
        sharing.close()


def test_the_trainers_hooks_hold_what_the_stages_need(rig):
    class Base:
        def _compute_old_log_prob(self, batch, metrics):
            self.seen.append(("old_log_prob", self.devices.held("d", "actor")))

        def _compute_ref_log_prob(self, batch, metrics):
            self.seen.append(("ref", self.devices.held("d", "ref")))

        def _update_actor(self, batch, metrics):
            self.seen.append(("update_actor", self.devices.held("d", "actor")))

    class Trainer(SharesDevices, Base):
        def __init__(self, one, bypass=False):
            from contextlib import ExitStack

            self.seen, self.devices, self.sharing, self.timing_raw = [], one.devices, one.sharing, {}
            self._generation, self.curr_step_profile = ExitStack(), False
            algorithm = {"rollout_correction": {"bypass_mode": bypass}}
            self.config = SimpleNamespace(algorithm=algorithm)

    tight = rig(60)
    trainer = Trainer(tight)
    trainer.sharing.sync_weights()
    trainer.on_step_begin()
    trainer.on_sample_begin()
    assert tight.devices.held("d", "rollout") == 60
    trainer.on_sample_end()
    trainer._compute_old_log_prob(None, {})
    trainer._compute_ref_log_prob(None, metrics={})
    trainer._update_actor(None, {})
    trainer.on_step_end()
    assert trainer.seen == [("old_log_prob", 50), ("ref", 10), ("update_actor", 50)]
    assert trainer.timing_raw["update_weights"] > 0
    assert trainer._pending_sync_metrics["sharing/rollout/onloads"] == 2
    bypassed = Trainer(tight, bypass=True)
    bypassed._compute_old_log_prob(None, {})
    assert bypassed.seen == [("old_log_prob", 0)], "the rollout's own log-probs are taken; the actor stays away"


def test_spans_become_numbers_and_lines():
    def span(name, start, end, **attributes):
        return Span(name=name, actor="x", start=start, end=end, attributes=attributes)

    spans = [
        span("offload", 0, 1, resident="rollout", bytes=60),
        span("evict", 0, 1, resident="rollout", reason="actor#2 runs next"),
        span("onload", 1, 3, resident="actor", bytes=50),
        span(
            "switch", 0, 3, resident="actor", reason="actor#2 runs next", waiters=2, evicted=["rollout"],
            bytes_in=50, bytes_out=60,
        ),
        span("offload", 4, 5, resident="actor", bytes=50),
        span("evict", 4, 6, resident="actor", reason="asked to leave"),
    ]  # fmt: skip
    assert switch_metrics(spans) == {
        "sharing/switches": 2,
        "sharing/switch_s": 5,
        "sharing/bytes_in": 50,
        "sharing/bytes_out": 110,
        "sharing/waiters": 2,
        "sharing/onload_s": 2,
        "sharing/offload_s": 2,
        "sharing/actor/onloads": 1,
        "sharing/actor/offloads": 1,
        "sharing/rollout/offloads": 1,
        "sharing/actor/onload_s": 2,
        "sharing/actor/offload_s": 1,
        "sharing/rollout/offload_s": 1,
        "sharing/rollout/left_for/actor": 1,
    }
    first, second = switch_lines(spans)
    assert first.startswith("actor came, rollout left (actor#2 runs next; 50 bytes in, 60 out, 2 waiting)")
    assert second == "actor left (asked to leave) in 2.000 s"


def test_jobs_of_different_clusters_do_not_fence_each_other_off(monkeypatch):
    """Two jobs on one machine, each with its own Ray, may both call a device ``host/gpu:0``."""
    import ray

    folders = []
    for address in ("127.0.0.1:6379", "127.0.0.1:6379", "127.0.0.1:6380"):
        monkeypatch.setattr(ray, "get_runtime_context", lambda address=address: SimpleNamespace(gcs_address=address))
        folders.append(fence_folder())
    assert folders[0] == folders[1] != folders[2]


@pytest.mark.slow
def test_the_fences_of_a_cluster_have_one_folder(ray_session):
    folder = ray_session.get(ray_session.remote(fence_folder).remote())
    assert folder == fence_folder()
    assert folder.count("/") == 4, "one folder, whatever the cluster's address"
