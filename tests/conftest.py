"""Fixtures of the whole suite: one Ray session, one seed that every failing test prints."""

import os
import random

import pytest
from hypothesis import HealthCheck, settings

# Time limits per example fail on a busy machine, not on a broken one.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # read at import; keeps Ray on the loopback interface


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for the test: RLINF_TEST_SEED if set, else drawn anew; shown when the test fails."""
    value = int(os.environ.get("RLINF_TEST_SEED", random.SystemRandom().randrange(2**31)))
    request.node.add_report_section("setup", "seed", f"RLINF_TEST_SEED={value}")
    return value


@pytest.fixture(scope="session")
def ray_session():
    """The suite's one Ray session: loopback only, no dashboard, 8 logical CPUs and 2 virtual devices."""
    import ray

    ray.init(
        num_cpus=8,
        num_gpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=400 * 1024**2,
        log_to_driver=False,
        configure_logging=False,
    )
    yield ray
    ray.shutdown()
