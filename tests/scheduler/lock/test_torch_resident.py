"""A torch module as a resident: its bytes are measured by the storages that live, its values survive every trip."""

import asyncio

import pytest
import torch

from rlinf_plugins.core.errors import ExceedsCapacityError, NotFreedError, StaleTokenError
from rlinf_plugins.scheduler.lock.fence import MemoryFence, Permit
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.resident import Resident
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_plugins.scheduler.lock.torch_resident import ModuleResident, used_bytes_of
from rlinf_plugins.scheduler.lock.virtual import VirtualDevices

CPU = torch.device("cpu")
PERMIT = Permit({"d0": 1}, "test")


def tied_module() -> torch.nn.Module:
    """Weights that share a storage, a buffer, and one parameter that is a view into a larger storage."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16))
    module[1].weight = module[0].weight
    flat = torch.randn(64)
    module[0].bias = torch.nn.Parameter(flat[:16])
    module[1].bias = torch.nn.Parameter(flat[16:32])
    return module


@pytest.fixture
def make():
    def build(capacity=100_000, module=None, **options):
        devices = VirtualDevices({"d0": capacity})
        module = module or tied_module()
        return ModuleResident("model", module, "d0", CPU, MemoryFence(), virtual=devices, **options), devices, module

    return build


def train(module, optimizer, steps=2):
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(8, 16)).pow(2).sum().backward()
        optimizer.step()


async def test_bytes_are_those_of_the_storages_each_counted_once(make):
    resident, devices, module = make()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in module.state_dict().values()}
    assert isinstance(resident, Resident)
    assert resident.footprint == {"d0": sum(storages.values())}
    assert await resident.resident_bytes() == {"d0": 0}
    await resident.onload(PERMIT)
    assert await resident.resident_bytes() == dict(resident.footprint)
    assert devices.used_bytes("d0") == resident.footprint["d0"]
    await resident.offload(PERMIT)
    assert await resident.resident_bytes() == {"d0": 0}
    assert devices.used_bytes("d0") == 0


async def test_training_goes_on_as_if_it_had_never_left(make):
    staying = tied_module()
    optimizer = torch.optim.Adam(staying.parameters())
    train(staying, optimizer)
    train(staying, optimizer)

    moving = tied_module()
    optimizer = torch.optim.Adam(moving.parameters())
    resident, _, _ = make(module=moving, optimizer=optimizer)
    await resident.onload(PERMIT)
    train(moving, optimizer)
    before = resident.footprint["d0"]
    await resident.offload(PERMIT)
    assert await resident.resident_bytes() == {"d0": 0}, "gradients and Adam's moments leave as well"
    await resident.onload(PERMIT)
    assert await resident.resident_bytes() == {"d0": before}
    train(moving, optimizer)
    for ours, theirs in zip(moving.state_dict().values(), staying.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert moving[0].weight is moving[1].weight
    assert moving[0].bias.untyped_storage().data_ptr() == moving[1].bias.untyped_storage().data_ptr()


async def test_moving_twice_is_moving_once(make):
    resident, devices, _ = make()
    await resident.onload(PERMIT)
    await resident.onload(PERMIT)
    assert devices.used_bytes("d0") == resident.footprint["d0"]
    await resident.offload(PERMIT)
    await resident.offload(PERMIT)
    assert devices.used_bytes("d0") == 0


async def test_a_view_somebody_kept_keeps_the_bytes_and_is_found(make):
    resident, devices, module = make()
    await resident.onload(PERMIT)
    kept = module[0].weight.data[0]
    await resident.offload(PERMIT)
    assert (await resident.resident_bytes())["d0"] == 16 * 16 * 4
    assert devices.used_bytes("d0") > 0
    del kept
    assert await resident.resident_bytes() == {"d0": 0}
    assert devices.used_bytes("d0") == 0


async def test_a_stale_permit_moves_nothing(make):
    resident, _, _ = make()
    resident._fence.seal(Permit({"d0": 2}, "heir"))
    with pytest.raises(StaleTokenError):
        await resident.onload(PERMIT)
    assert await resident.resident_bytes() == {"d0": 0}


async def test_a_device_without_room_refuses(make):
    resident, _, _ = make(capacity=100)
    with pytest.raises(ExceedsCapacityError, match="out of memory"):
        await resident.onload(PERMIT)
    assert await resident.resident_bytes() == {"d0": 0}


async def test_two_modules_take_turns(make):
    devices = VirtualDevices({"d0": 6000})
    fence = MemoryFence()
    switcher = Switcher(LocalLock({"d0": 6000}), {"d0": 6000}, used_bytes=devices.used_bytes, patience_s=0.05)
    modules = {}
    for name in ("actor", "critic"):
        modules[name] = torch.nn.Linear(32, 32)
        await switcher.add(ModuleResident(name, modules[name], "d0", CPU, fence, virtual=devices))
    for name in ("actor", "critic", "actor"):
        async with switcher.use(name):
            modules[name](torch.ones(1, 32))
    assert devices.peak["d0"] == 32 * 32 * 4 + 32 * 4
    kept = modules["actor"].weight.data
    with pytest.raises(NotFreedError, match="actor reported that it left"):
        async with switcher.use("critic"):
            pass
    del kept
    await asyncio.sleep(0)
    async with switcher.use("critic"):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
async def test_on_cuda_the_bytes_are_gone_from_the_device():
    cuda = torch.device("cuda:0")
    module = torch.nn.Linear(8192, 8192)
    resident = ModuleResident("model", module, "d0", cuda, MemoryFence())
    torch.zeros(1, device=cuda)
    before = used_bytes_of(cuda)
    for _ in range(2):
        await resident.onload(PERMIT)
        assert module.weight.device == cuda
        assert used_bytes_of(cuda) - before >= resident.footprint["d0"]
        await resident.offload(PERMIT)
        assert await resident.resident_bytes() == {"d0": 0}
        assert used_bytes_of(cuda) - before < 2**22
