import json
import subprocess
import sys
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Edge, Flow, Loop, Stage
from rlinf_plugins.scheduler.planning.capture import flow_from_roles
from rlinf_plugins.scheduler.planning.planner import PlanRequest, plan
from rlinf_plugins.scheduler.planning.profile import Fingerprint, Profile, Sample, StageProfile
from rlinf_plugins.scheduler.planning.ranges import parse_range, plan_from_ranges
from rlinf_verl.job_flow import flow_from_config, verl_constraints
from rlinf_verl.placement import layout, overrides, write_overrides
from rlinf_verl.room import PoolRequest, check_resources, free_nodes, job_requests

EIGHT = Cluster.uniform(8, per_node=8)

MATH = Flow(
    name="math",
    items=64,
    stages=(Stage(name="rollout", kind="generate"), Stage(name="inference"), Stage(name="actor", kind="train")),
    edges=(Edge(source="rollout", target="inference"), Edge(source="inference", target="actor")),
)
SEARCH = flow_from_roles(name="search", items=64, tools=True, turns=4, old_log_prob=False)
EMBODIED = Flow(
    name="embodied",
    items=64,
    stages=(
        Stage(name="env", kind="environment"),
        Stage(name="rollout", kind="generate"),
        Stage(name="actor", kind="train"),
    ),
    edges=(
        Edge(source="env", target="rollout"),
        Edge(source="rollout", target="env"),
        Edge(source="rollout", target="actor", kind="barrier"),
    ),
    loops=(Loop(stages=("env", "rollout"), turns=80, streams=(1, 2)),),
)


def published():
    """RLinf's placements on eight devices: math in its spatial form, search collocated, embodied hybrid."""
    return {
        "math": plan_from_ranges(MATH, EIGHT, {"rollout": "0-3", "inference,actor": "4-7"}, items=8),
        "search": plan_from_ranges(SEARCH, EIGHT, {"actor,rollout,tool": "all"}),
        "embodied": plan_from_ranges(EMBODIED, EIGHT, {"actor": "0-7", "env": "0-3", "rollout": "4-7"}, streams=2),
    }


def test_published_placements_are_expressed():
    plans = published()
    assert {name: chosen.mode for name, chosen in plans.items()} == {
        "math": "hybrid",  # its inference and actor take turns on one pool: two phases when written as ranges
        "search": "temporal",
        "embodied": "hybrid",
    }
    assert plans["embodied"].ranges() == {"env": "0-3", "rollout": "4-7", "actor": "0-7"}
    assert plans["embodied"].phases[0].streams == {"env<->rollout": 2}


def test_layouts_are_veRLs_three():
    found = {name: layout(chosen, EIGHT) for name, chosen in published().items()}
    assert {name: placed.kind for name, placed in found.items()} == {
        "math": "spatial",
        "search": "temporal",
        "embodied": "hybrid",
    }
    assert found["math"].resource_pool_spec == {"global_pool": [4]}
    assert found["math"].rollout == (1, 4)
    assert found["search"].resource_pool_spec == {"global_pool": [8]}
    assert found["embodied"].parts == {"env": (0, 4), "rollout": (4, 4)}


def test_overrides_follow_the_layout():
    plans = published()
    assert "actor_rollout_ref.rollout.n_gpus_per_node=4" in overrides(plans["math"], EIGHT)
    assert overrides(plans["search"], EIGHT) == [
        "trainer.v1.trainer_mode=m2flow",
        "++trainer.v1.m2flow.mode=temporal",
        "++trainer.v1.m2flow.granularity=0",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=8",
    ]
    assert "++trainer.v1.m2flow.mode=spatial" in overrides(plans["math"], EIGHT)
    with pytest.raises(PlanError, match="not on a part of them"):
        overrides(plans["embodied"], EIGHT)


def test_what_the_seam_cannot_place_is_refused_by_name(tmp_path):
    apart = plan_from_ranges(MATH, EIGHT, {"rollout": "0-3", "inference": "4-5", "actor": "6-7"}, items=8)
    with pytest.raises(PlanError, match="veRL runs inference in the actor's worker group"):
        layout(apart, EIGHT)
    assert "cannot be placed by veRL" in write_overrides(apart, tmp_path / "p", EIGHT)
    half = plan_from_ranges(MATH, EIGHT, {"rollout": "0-4", "inference,actor": "3-7"})
    with pytest.raises(PlanError, match="half of each"):
        layout(half, EIGHT)
    split = plan_from_ranges(EMBODIED, EIGHT, {"actor": "0-7", "env": "0,2,4,6", "rollout": "1,3,5,7"})
    with pytest.raises(PlanError, match="no neighbours"):
        layout(split, EIGHT)
    uneven = Cluster.uniform(16, per_node=8)
    crooked = plan_from_ranges(MATH, uneven, {"rollout": "0-11", "inference,actor": "12-15"})
    with pytest.raises(PlanError, match=r"every machine of rollout; the plan gives \[8, 4\]"):
        layout(crooked, uneven)


def test_critic_and_reward_model_may_have_pools_of_their_own():
    flow = flow_from_roles(name="ppo", items=64, critic=True, reward_model=True)
    ranges = {"actor,rollout,old_log_prob": "0-3", "critic,values": "4-5", "reward_model": "6-7"}
    placed = layout(plan_from_ranges(flow, EIGHT, ranges), EIGHT)
    assert placed.resource_pool_spec == {"global_pool": [4], "critic_pool": [2], "reward_pool": [2]}
    assert placed.roles["Critic"] == "critic_pool"
    ranges["critic,values"] = "3-4"
    with pytest.raises(PlanError, match="critic_pool shares devices"):
        layout(plan_from_ranges(flow, EIGHT, ranges), EIGHT)
    ranges = {"actor,rollout,old_log_prob": "0-3", "critic": "4-5", "values": "6-7", "reward_model": "0-3"}
    with pytest.raises(PlanError, match="one process"):
        layout(plan_from_ranges(flow, EIGHT, ranges), EIGHT)


def test_plans_made_under_veRLs_constraints_can_be_placed():
    flow = flow_from_roles(name="grpo", items=64, reference=True, mini_batch=16)
    sample = {name: 4.0 if name in ("rollout", "actor") else 1.0 for name in (s.name for s in flow.stages)}
    stages = {
        name: StageProfile(
            samples=tuple(
                Sample(devices=n, items=m, seconds=0.2 + s * m / 64 * 8 / n, memory_gib=30.0)
                for n in (1, 2, 4, 8)
                for m in (8, 64)
            )
        )
        for name, s in sample.items()
    }
    cluster = Cluster.uniform(8, memory_gib=40.0)
    profile = Profile(flow="grpo", fingerprint=Fingerprint.of(cluster), created=0.0, stages=stages)
    request = PlanRequest(flow=flow, cluster=cluster, profile=profile, constraints=verl_constraints(flow))
    for modes in (("temporal",), ("spatial",), ("temporal", "spatial", "hybrid")):
        chosen = plan(replace(request, constraints=replace(request.constraints, modes=modes)), now=0.0)
        assert layout(chosen, cluster).resource_pool_spec


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([], "no node"),
        (
            [{"name": "a", "GPU": 4, "CPU": 64}, {"name": "b", "GPU": 2, "CPU": 64}],
            "node a comes closest, short of GPU: 4 free of 8",
        ),
        ([{"name": "a", "GPU": 8, "CPU": 16}], "node a comes closest, short of CPU: 16 free of 24"),
        ([{"name": "a", "GPU": 8, "CPU": 99, "memory_gib": 10}], "short of memory: 10 free of 32"),
    ],
)
def test_the_short_node_and_resource_are_named(nodes, words):
    with pytest.raises(PlanError, match=words):
        check_resources([PoolRequest(name="global_pool", processes=(8,), memory_gib=4.0)], nodes)


def test_pools_share_the_nodes_room():
    nodes = [{"name": "a", "GPU": 8, "CPU": 64}, {"name": "b", "GPU": 8, "CPU": 64}]
    both = [PoolRequest(name="global_pool", processes=(8,)), PoolRequest(name="rollout", processes=(4, 4))]
    check_resources(both, nodes)
    with pytest.raises(PlanError, match="pool rollout needs 4"):
        check_resources([*both, PoolRequest(name="reward_pool", processes=(1,))], [nodes[0], {**nodes[1], "GPU": 7}])
    assert nodes[0]["GPU"] == 8  # the caller's records are left alone


def test_a_jobs_pools_are_all_checked():
    rollout = {"nnodes": 1, "n_gpus_per_node": 4, "pipeline_model_parallel_size": 1}
    sizes = {"tensor_model_parallel_size": 2, "data_parallel_size": 1}
    job = OmegaConf.create({"actor_rollout_ref": {"rollout": {**rollout, **sizes}}})
    spec = {"global_pool": [4]}
    assert job_requests(spec, job, separate=False) == [PoolRequest(name="global_pool", processes=(4,))]
    pools = job_requests(spec, job, separate=True)
    assert pools[1:] == [PoolRequest(name="rollout", processes=(2,), cpus_per_device=2)] * 2
    check_resources(pools, [{"name": "a", "GPU": 8, "CPU": 20}])
    with pytest.raises(PlanError, match="node a comes closest, short of CPU: 3 free of 4 needed"):
        check_resources(pools, [{"name": "a", "GPU": 8, "CPU": 19}])
    with pytest.raises(PlanError, match="pool rollout needs 2 devices on one node"):
        check_resources(pools, [{"name": "a", "GPU": 7, "CPU": 20}])


def test_rays_records_become_nodes():
    records = [{"NodeID": "x", "Alive": True, "NodeManagerAddress": "10.0.0.1"}, {"NodeID": "y", "Alive": False}]
    assert free_nodes(records, {"x": {"GPU": 2.0, "CPU": 4.0, "memory": 2**31}}) == [
        {"name": "10.0.0.1", "GPU": 2.0, "CPU": 4.0, "memory_gib": 2.0}
    ]


@pytest.mark.parametrize("text", ["", "x", "3-1", "1-", "0-9", "0,0"])
def test_bad_ranges_are_named(text):
    with pytest.raises(PlanError, match="range"):
        parse_range(text, tuple(range(8)))


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ({"actor": "all"}, "no devices are given for"),
        ({"actor,rollout,toool": "all"}, "did you mean 'tool'"),
        ({"actor,rollout,tool": "all", "actor": "0"}, "twice"),
        ({"actor": "all", "rollout": "0-4", "tool": "4-7"}, "must share their devices or none"),
    ],
)
def test_incomplete_ranges_are_named(ranges, words):
    with pytest.raises(PlanError, match=words):
        plan_from_ranges(SEARCH, EIGHT, ranges)


def config(**changes):
    base = {
        "trainer": {"experiment_name": "job"},
        "data": {"train_batch_size": 32},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "critic": {"enable": None},
        "reward": {"reward_model": {"enable": False}},
        "actor_rollout_ref": {
            "actor": {"use_kl_loss": False, "ppo_mini_batch_size": 8},
            "rollout": {"tensor_model_parallel_size": 2, "multi_turn": {"enable": False}},
        },
    }
    made = OmegaConf.create(base)
    for key, value in changes.items():
        OmegaConf.update(made, key.replace("__", "."), value)
    return made


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, ["rollout", "old_log_prob", "actor"]),
        ({"actor_rollout_ref__actor__use_kl_loss": True}, ["rollout", "old_log_prob", "reference", "actor"]),
        ({"algorithm__adv_estimator": "gae"}, ["rollout", "old_log_prob", "values", "actor", "critic"]),
        ({"reward__reward_model__enable": True}, ["rollout", "old_log_prob", "reward_model", "actor"]),
        ({"actor_rollout_ref__rollout__multi_turn__enable": True}, ["rollout", "tool", "old_log_prob", "actor"]),
    ],
)
@pytest.mark.slow
def test_flow_of_a_job_has_the_roles_its_config_has(changes, stages):
    flow = flow_from_config(config(**changes))
    assert [stage.name for stage in flow.stages] == stages
    assert flow.stage("rollout").replica == 2
    assert flow.stage("actor").divides == 8


PROGRAM = """
import json, sys
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

sys.path.insert(0, sys.argv[1])
from test_placement import EIGHT, published
from rlinf_verl.placement import bundles, carve, layout, resource_pool_manager
from rlinf_verl.room import check_resources, free_nodes

@ray.remote(num_cpus=0.1, num_gpus=0.25)
class Seat:
    def device(self):
        return int(ray.get_gpu_ids()[0])

out = {}
for name, plan in published().items():
    # A session each: Ray reports what a removed group frees only after a while.
    ray.init(num_cpus=40, num_gpus=8, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False,
             object_store_memory=100 * 1024**2, configure_logging=False)
    placed = layout(plan, EIGHT)
    check_resources(placed.pools, free_nodes(ray.nodes(), ray._private.state.available_resources_per_node()))
    manager = resource_pool_manager(placed)
    manager.create_resource_pool()
    pools = dict(manager.resource_pool_dict)
    if placed.rollout is not None:
        from verl.single_controller.ray import RayResourcePool
        machines, each = placed.rollout
        pools["rollout"] = RayResourcePool([each] * machines, name_prefix="rollout", max_colocate_count=3)
    parts = carve(pools["global_pool"], placed)
    found = {}
    for stage in plan.stages():
        pool = parts.get(stage) or (pools["rollout"] if stage == "rollout" and placed.rollout else pools["global_pool"])
        seats = [
            Seat.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
            for group, index in bundles(pool)
        ]
        found[stage] = sorted(ray.get([seat.device.remote() for seat in seats]))
        for seat in seats:
            ray.kill(seat)
    out[name] = found
    ray.shutdown()
print("RESULT" + json.dumps(out))
"""


@pytest.mark.slow
@pytest.mark.ray
def test_published_placements_are_applied_to_eight_virtual_devices():
    """Apply all three through veRL's own pools and read back the devices the processes got.

    A process of its own: the suite's session has two devices.
    """
    from pathlib import Path

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESULT"))
    everything = list(range(8))
    math = found["math"]
    assert math["inference"] == math["actor"]
    assert sorted(math["rollout"] + math["actor"]) == everything
    assert found["search"] == {"rollout": everything, "tool": everything, "actor": everything}
    embodied = found["embodied"]
    assert embodied["actor"] == everything
    assert len(embodied["env"]) == len(embodied["rollout"]) == 4
    assert sorted(embodied["env"] + embodied["rollout"]) == everything
