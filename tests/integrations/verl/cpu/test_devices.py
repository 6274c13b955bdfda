import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.cpu.devices import DEVICES_ENV, VirtualDevices, bind_assigned_device

GB = 2**30


@given(st.integers(1, 16), st.integers(1, 64))
def test_every_device_gets_cores_and_none_beyond_the_pool(count, cores):
    devices = VirtualDevices.divide(count, available_cores=range(cores), available_bytes=64 * GB)
    assert devices.count == count
    assert all(device and set(device) <= set(range(cores)) for device in devices.cores)
    if count <= cores:
        flat = [core for device in devices.cores for core in device]
        assert len(flat) == len(set(flat))
    assert devices.memory_bytes * count <= 64 * GB


def test_round_trips_through_the_environment(monkeypatch):
    devices = VirtualDevices.divide(2, available_cores=[3, 5, 7, 9], available_bytes=10 * GB)
    assert devices.cores == ((3, 5), (7, 9))
    monkeypatch.setenv(DEVICES_ENV, devices.to_json())
    assert VirtualDevices.from_environment() == devices
    monkeypatch.delenv(DEVICES_ENV)
    assert VirtualDevices.from_environment() is None


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"count": 3, "cores_per_device": 2}, ["3 virtual devices x 2 cores = 6", "may use 4"]),
        ({"count": 2, "memory_gb": 6.0}, ["6.0 GiB", "10.0 GiB"]),
        ({"count": 0}, ["at least one", "0"]),
    ],
)
def test_more_than_exists_is_refused_with_the_numbers(options, parts):
    with pytest.raises(ConfigError) as caught:
        VirtualDevices.divide(**options, available_cores=range(4), available_bytes=10 * GB)
    for part in parts:
        assert part in str(caught.value)


def test_binding_confines_the_process_to_the_assigned_device():
    cores = sorted(os.sched_getaffinity(0))
    devices = VirtualDevices(cores=((cores[0],), (cores[-1],)), memory_bytes=GB)
    code = (
        "import os; from rlinf_verl.cpu.devices import bind_assigned_device as bind; "
        "print(bind(), sorted(os.sched_getaffinity(0)))"
    )
    environment = {**os.environ, DEVICES_ENV: devices.to_json(), "CUDA_VISIBLE_DEVICES": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == f"1 [{cores[-1]}]"


def test_nothing_is_bound_without_virtual_devices(monkeypatch):
    monkeypatch.delenv(DEVICES_ENV, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert bind_assigned_device() is None


@pytest.mark.slow
@pytest.mark.ray
def test_ray_listens_on_loopback_only(ray_session):
    import psutil

    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    listening = {
        connection.laddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in family
    }
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
