import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.config import M2FlowConfig, is_requested, m2flow_config


def job(**m2flow):
    return OmegaConf.create({"trainer": {"v1": {"trainer_mode": "m2flow", "m2flow": m2flow}}})


def test_defaults():
    assert m2flow_config(OmegaConf.create({})) == M2FlowConfig()
    assert is_requested(job())
    assert not is_requested(OmegaConf.create({"trainer": {"v1": {"trainer_mode": "sync"}}}))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"mode": "spatiall"}, ["trainer.v1.m2flow.mode", "spatiall"]),
        ({"mdoe": "temporal"}, ["trainer.v1.m2flow.mdoe", "did you mean 'mode'", "stall_timeout_s"]),
        ({"max_failed_fraction": 1.5}, ["max_failed_fraction", "[0, 1]", "1.5"]),
        ({"stall_timeout_s": 0.0}, ["stall_timeout_s", "positive"]),
        ({"virtual_devices": {"count": -1}}, ["virtual_devices.count", "-1"]),
        ({"virtual_devices": {"count": 1, "memory_gb": 0.0}}, ["memory_gb", "positive"]),
        ({"virtual_devices": {"count": 1, "cores_per_device": 0}}, ["cores_per_device", "at least 1"]),
        ({"virtual_devices": {"counts": 1}}, ["virtual_devices.counts", "did you mean 'count'"]),
    ],
)
def test_bad_options_are_named(options, parts):
    with pytest.raises(ConfigError) as caught:
        m2flow_config(job(**options))
    for part in parts:
        assert part in str(caught.value)
