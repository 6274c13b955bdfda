"""The VLA policy server takes turns on a device: its weights are gone while it sleeps and current when it is back."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
import torch
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from rlinf_plugins.core.errors import ConfigError, StaleTokenError
from rlinf_plugins.models.openvla import load_policy
from rlinf_plugins.scheduler.lock.fence import FileFence, MemoryFence, Permit
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.resident import Resident
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_plugins.scheduler.lock.virtual import VirtualDevices, VirtualResident
from rlinf_verl.rollout.weights import pack
from rlinf_verl.trainer.replica_residents import Replica
from rlinf_verl.trainer.server_resident import ServerResident, weight_bytes
from rlinf_verl.vla.rollout_server import VLAServer


class Handle:
    """An actor's handle, without the actor."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        async def remote(*arguments, **options):
            if name == "__ray_call__":
                found = arguments[0](self.inner, *arguments[1:])
            else:
                found = getattr(self.inner, name)(*arguments, **options)
            return await found if inspect.isawaitable(found) else found

        return SimpleNamespace(remote=remote)


class OneServer(RolloutReplica):
    def __init__(self, config, server):
        self.replica_rank, self.config, self.workers = 0, config, [Handle(object())]
        self.servers = [server]
        self._server_address, self._server_handle = "openvla:0", server

    async def launch_servers(self): ...


def rollout_config(**engine):
    return RolloutConfig(
        name="openvla",
        dtype="float32",
        prompt_length=16,
        response_length=12,
        tensor_model_parallel_size=1,
        load_format="auto",
        engine_kwargs={"openvla": engine},
    )


@pytest.fixture
def rig(vla_folder, tmp_path):
    """A server over a tiny policy, and a trainer whose weights differ from the checkpoint's."""
    config = rollout_config(discard_weights=True)
    server = VLAServer(config, SimpleNamespace(path=str(vla_folder)), RolloutMode.HYBRID, 0)
    trained = load_policy(vla_folder)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.5)
    router = []

    async def refill(replica):
        await server.begin_weight_sync()

        async def weights():
            for entry in trained.state_dict().items():
                yield entry

        async for bucket in pack(weights(), 1 << 20):
            await server.write_weights(bucket)
        await server.end_weight_sync(7)
        await server.wake_up(["kv_cache"])

    log = SimpleNamespace(
        remove_servers=lambda ids: router.append(("off", ids)), add_servers=lambda ids: router.append(("on", [*ids]))
    )
    replica = Replica(OneServer(config, Handle(server)), ["d"], Handle(log), fence_folder=str(tmp_path), refill=refill)
    nbytes = weight_bytes(server)
    resident = ServerResident("policy", replica, nbytes)
    return SimpleNamespace(
        server=server, trained=trained, router=router, resident=resident, nbytes=nbytes, fence=FileFence(tmp_path),
        replica=replica,
    )  # fmt: skip


async def test_policy_and_actor_take_turns(rig):
    assert isinstance(rig.resident, Resident)
    assert rig.nbytes == sum(p.numel() * p.itemsize for p in rig.trained.parameters())
    capacity = {"d": rig.nbytes + 10}
    switcher = Switcher(LocalLock(capacity), capacity)
    await switcher.add(rig.resident)
    await switcher.add(VirtualResident("actor", {"d": 100}, VirtualDevices(capacity), MemoryFence()))
    async with switcher.use("policy"):
        assert rig.router == [], "it was there"
    async with switcher.use("actor"):
        assert weight_bytes(rig.server) == 0
        assert rig.router == [("off", ["openvla:0"])]
    async with switcher.use("policy"):
        assert not switcher.is_on("actor")
        assert weight_bytes(rig.server) == rig.nbytes
        assert rig.server.version == 7
        served = rig.server._host.engine.weights._model.state_dict()
        for name, value in rig.trained.state_dict().items():
            assert torch.equal(served[name], value), name
    assert rig.router[-1] == ("on", ["openvla:0"])


async def test_under_a_lost_lease_it_goes_back_to_sleep(rig):
    await rig.resident.offload(Permit({"d": 5}, "test"))
    refill = rig.replica._refill

    async def slow(replica):
        await refill(replica)
        rig.fence.seal(Permit({"d": 6}, "heir"))

    rig.replica._refill = slow
    with pytest.raises(StaleTokenError):
        await rig.resident.onload(Permit({"d": 5}, "test"))
    assert await rig.resident.resident_bytes() == {"d": 0}
    with pytest.raises(StaleTokenError):
        await rig.resident.onload(Permit({"d": 5}, "test"))


async def test_a_server_that_keeps_its_weights_is_refused(rig):
    replica = rig.replica.verl
    replica.config = rollout_config()
    with pytest.raises(ConfigError, match=r"engine_kwargs\.openvla\.discard_weights=True"):
        ServerResident("policy", rig.replica, rig.nbytes)
    await asyncio.sleep(0)
