"""A tiny policy of 4 actions x 3 numbers, its engine, and the environment it drives."""

import numpy as np
import pytest

from rlinf_plugins.models.openvla import (
    ActionSpec,
    OpenVLAProcessor,
    Sampling,
    TinySizes,
    load_policy,
    make_tiny_checkpoint,
)
from rlinf_verl.rollout.weights import ResidentWeights
from rlinf_verl.vla.rollout_engine import PolicyEngine, PolicyRequest

SPEC = ActionSpec(decoding="parallel", chunk=4, dim=3, value_head="chunk")


@pytest.fixture(scope="session")
def vla_folder(tmp_path_factory):
    sizes = TinySizes(vision_dims=(32, 32), vision_heads=(2, 2), patch_size=56, hidden=32, intermediate=64, layers=2)
    return make_tiny_checkpoint(tmp_path_factory.mktemp("vla"), variant="openvla-oft", seed=0, sizes=sizes, spec=SPEC)


@pytest.fixture
def vla_policy(vla_folder):
    return load_policy(vla_folder)


@pytest.fixture(scope="session")
def vla_processor(vla_folder):
    return OpenVLAProcessor.from_folder(vla_folder, unnorm_key="tiny")


@pytest.fixture
def make_policy_engine(vla_policy, vla_processor):
    def make(*, loaded=True, **options) -> PolicyEngine:
        settings = {"max_batch": 4, "max_wait_s": 0.0} | options
        return PolicyEngine(vla_policy, vla_processor, ResidentWeights(vla_policy, loaded=loaded), **settings)

    return make


@pytest.fixture
def observation():
    def make(id: str, seed: int = 0, instruction: str = "push the cube", **changes) -> PolicyRequest:
        frame = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        given = {"images": [frame], "proprio": None, "sampling": Sampling(), "seed": seed} | changes
        return PolicyRequest(id=id, instruction=instruction, **given)

    return make
