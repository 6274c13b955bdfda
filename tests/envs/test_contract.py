"""The exported conformance suite on every adapter."""

import pytest

from rlinf_plugins.envs.gym import GymFactory
from rlinf_plugins.envs.libero import LiberoFactory
from rlinf_plugins.envs.maniskill import ManiSkillFactory
from rlinf_plugins.testing.env_check import check_environment
from rlinf_plugins.testing.envs import ToyFactory

FETCH = {"env_id": "FetchPickAndPlace-v4", "modules": ("gymnasium_robotics",)}
QUICK = {
    "toy": ToyFactory(image=8),
    "gymnasium": GymFactory(env_id="Pendulum-v1"),
}
SIMULATORS = {
    "robotics, state": GymFactory(**FETCH),
    "robotics, pixels": GymFactory(**FETCH, render_size=32),
    "maniskill, state": ManiSkillFactory(env_id="PickCube-v1", obs_mode="state"),
    "maniskill, pixels": ManiSkillFactory(env_id="RlinfPutOnPlate-v1", image_size=32, options={"hide_arm": True}),
    "libero": LiberoFactory(suite="libero_object", image_size=32, wrist=False, max_episode_steps=12),
}


def complaints(factory, seed):
    return [f"{f.rule}: {f.explanation}" for f in check_environment(factory, seed=seed) if f.verdict != "kept"]


@pytest.mark.parametrize("name", QUICK)
def test_the_contract_is_kept(name, seed):
    assert complaints(QUICK[name], seed) == []


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("name", SIMULATORS)
def test_the_contract_is_kept_by_a_simulator(name, seed):
    assert complaints(SIMULATORS[name], seed) == []
