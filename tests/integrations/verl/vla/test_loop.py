"""Prompts in, rows in TransferQueue out: real policy server and environments over Ray; only the trainer is absent."""

import asyncio

import numpy as np
import pytest
import torch

from rlinf_verl.vla.rows import column

pytestmark = [pytest.mark.slow, pytest.mark.ray]


@pytest.fixture(scope="module")
def transfer_queue(ray_session):
    import transfer_queue as tq
    from omegaconf import OmegaConf

    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield tq
    tq.close()


@pytest.fixture(scope="module")
def job_config(vla_folder):
    from hydra import compose, initialize_config_module

    envs = {
        "factory": "rlinf_plugins.testing.envs:ToyFactory",
        "kwargs": {"image": 32},
        "num_envs": 2,
        "pool": {"episode": {"max_steps": 6}, "out_of_range": "clip"},
    }
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                "actor_rollout_ref.rollout.name=openvla",
                "actor_rollout_ref.rollout.n=3",
                "actor_rollout_ref.rollout.load_format=auto",
                "actor_rollout_ref.rollout.dtype=float32",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                "+actor_rollout_ref.rollout.engine_kwargs.openvla={max_batch: 2}",
                f"actor_rollout_ref.model.path={vla_folder}",
                "trainer.n_gpus_per_node=1",
                "trainer.device=cpu",
                "+m2flow=default",
            ],
        )
    config.trainer.v1.m2flow.envs = envs
    return config


@pytest.fixture(scope="module")
def llm_client(ray_session, job_config):
    """A replica beside a stand-in worker, behind veRL's own load balancer and client."""
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.router import get_router_handle

    from rlinf_verl.vla.rollout_server import VLAReplica

    class Worker:
        pass

    rollout = job_config.actor_rollout_ref.rollout
    replica = VLAReplica(0, rollout, job_config.actor_rollout_ref.model, gpus_per_node=1)
    replica.rollout_mode = RolloutMode.HYBRID
    replica.workers = [ray_session.remote(Worker).options(num_cpus=0).remote()]
    asyncio.run(replica.launch_servers())
    router = get_router_handle(
        servers={replica.server_address: replica.server_handle}, router_config_path=None, full_determinism=False
    )
    yield LLMServerClient(job_config, router)
    for actor in [*replica.servers, *replica.workers]:
        ray_session.kill(actor)


@pytest.fixture
def manager(ray_session, transfer_queue, job_config, llm_client):
    from rlinf_verl.vla.loop import EmbodiedLoopManager

    made = []

    def make(**envs):
        config = job_config.copy()
        config.trainer.v1.m2flow.envs = {**config.trainer.v1.m2flow.envs, **envs}
        made.append(EmbodiedLoopManager.create(config=config, llm_client=llm_client))
        return made[-1]

    yield make
    for manager in made:
        for worker in manager.agent_loop_workers:
            ray_session.get(worker.close.remote())
            ray_session.kill(worker)


@pytest.fixture
def arrivals(ray_session):
    from rlinf_verl.trainer.arrivals import Arrivals

    actor = ray_session.remote(Arrivals).options(num_cpus=0, max_concurrency=8).remote()
    yield actor
    ray_session.kill(actor)


def prompts(uids, trials, tasks=None, validate=False):
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import collate_fn

    from rlinf_verl.vla.dataset import EpisodeDataset

    data = EpisodeDataset({"trials": max(trials) + 1}, None, None)
    rows = collate_fn([data[trial] for trial in trials])
    if tasks:
        rows["task"] = np.array(tasks, dtype=object)
    rows["uid"] = np.array(uids, dtype=object)
    batch = tu.get_tensordict(rows)
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    if validate:
        tu.assign_non_tensor_data(batch, "validate", True)
    return batch


def test_groups_of_episodes_become_rows(ray_session, transfer_queue, manager, arrivals):
    loop = manager()
    loop.attach_arrivals(arrivals)
    loop.generate_sequences(prompts(["a", "b"], [0, 1]))
    assert ray_session.get(arrivals.wait_for.remote("train", 2), timeout=100) == 2
    assert ray_session.get(arrivals.take_failures.remote("train")) == []
    tags = transfer_queue.kv_list(partition_id="train")["train"]
    assert [tags[uid]["status"] for uid in "ab"] == ["finished", "finished"]
    keys = sorted(key for key in tags if "_" in key)
    assert keys == [f"{uid}_{session}_{index}" for uid in "ab" for session in range(3) for index in range(2)]
    data = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
    images = column(data, "images")
    assert images.shape == (12, 1, 32, 32, 3)
    assert images.dtype == torch.uint8
    first = images[::2].flatten(1)
    assert all(torch.equal(first[0], first[i]) for i in range(3))
    assert not torch.equal(first[0], first[3])
    masks = column(data, "response_mask")
    assert masks[0].tolist() == [1] * 12
    assert masks[1].tolist() == [1] * 6 + [0] * 6
    assert column(data, "truncated").flatten().tolist() == [False, True] * 6
    scores = column(data, "rm_scores").sum(-1).reshape(6, 2)
    rewards = column(data, "chunk_rewards").sum(-1).reshape(6, 2).sum(-1)
    assert torch.allclose(scores, rewards[:, None].expand(6, 2), atol=1e-5)
    assert len(set(scores[:3, 0].tolist())) == 3
    transfer_queue.kv_clear(keys=list(tags), partition_id="train")


def test_validation_is_greedy_and_kept_apart(ray_session, transfer_queue, manager, arrivals):
    loop = manager()
    loop.attach_arrivals(arrivals)
    loop.generate_sequences(prompts(["c", "d"], [1, 1], validate=True))
    ray_session.get(arrivals.wait_for.remote("val", 2), timeout=100)
    tags = transfer_queue.kv_list(partition_id="val")["val"]
    keys = sorted(key for key in tags if "_" in key)
    assert [key[:3] for key in keys] == ["c_0", "c_0", "d_0", "d_0"]
    data = transfer_queue.kv_batch_get(keys=keys, partition_id="val", select_fields=["responses", "sampling"])
    tokens = column(data, "responses")
    assert torch.equal(tokens[:2], tokens[2:])
    transfer_queue.kv_clear(keys=list(tags), partition_id="val")


def test_a_failing_group_is_reported_and_leaves_the_others_alone(ray_session, transfer_queue, manager, arrivals):
    loop = manager()
    loop.attach_arrivals(arrivals)
    loop.generate_sequences(prompts(["e", "f"], [0, 1], tasks=[0, 9]))
    ray_session.get(arrivals.wait_for.remote("train", 2), timeout=200)
    failures = ray_session.get(arrivals.take_failures.remote("train"))
    assert [(f.uid, f.session_id, f.kind) for f in failures] == [("f", i, "PoolUsageError") for i in range(3)]
    assert "no task 9" in failures[0].message
    tags = transfer_queue.kv_list(partition_id="train")["train"]
    assert (tags["e"]["status"], tags["f"]["status"]) == ("finished", "failure")
    assert {key[0] for key in tags if "_" in key} == {"e"}
    transfer_queue.kv_clear(keys=list(tags), partition_id="train")
