"""The engine as veRL meets it: server, replica and adapter, over Ray and in process."""

import asyncio
import json
import subprocess
import sys

import pytest
import torch

from rlinf_plugins.core.errors import ConfigError, RequestRejectedError, WeightsNotLoadedError, WeightSyncError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_dir(make_model, tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    words = {f"w{i}": i for i in range(61)} | {}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w0", unk_token="w0").save_pretrained(
        folder
    )
    make_model().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return folder


@pytest.fixture(scope="module")
def configs(model_dir):
    from verl.workers.config import HFModelConfig, RolloutConfig

    def make(**overrides):
        rollout = {
            "name": "hf",
            "dtype": "float32",
            "prompt_length": 16,
            "response_length": 8,
            "tensor_model_parallel_size": 1,
            "load_format": "auto",
        } | overrides
        return RolloutConfig(**rollout), HFModelConfig(path=str(model_dir))

    return make


@pytest.fixture
def server_of(configs):
    from verl.workers.rollout.replica import RolloutMode

    from rlinf_verl.rollout.server import HFServer

    def make(mode=RolloutMode.HYBRID, **overrides):
        rollout, model = configs(**overrides)
        return HFServer(rollout, model, mode, 0)

    return make


async def test_generate_answers_as_verl_expects(server_of, make_model, teacher):
    server = server_of()
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    out = await server.generate(request_id="a", prompt_ids=[5, 6, 7], sampling_params=params)
    assert out.stop_reason == "completed"
    assert 1 <= len(out.token_ids) <= 8
    want = teacher(make_model(), [5, 6, 7], out.token_ids).gather(-1, torch.tensor(out.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(out.log_probs).double(), want, atol=1e-5)
    assert out.extra_fields["global_steps"] is None
    await server.set_global_steps(4)
    again = await server.generate(request_id="a", prompt_ids=[5, 6, 7], sampling_params=params)
    assert again.extra_fields["global_steps"] == 4


async def test_a_long_history_leaves_less_room(server_of):
    server = server_of(ignore_eos=True)
    out = await server.generate("a", prompt_ids=[5] * 20, sampling_params={})
    assert len(out.token_ids) == 4
    out = await server.generate("a", prompt_ids=[5] * 40, sampling_params={})
    assert len(out.token_ids) == 1


async def test_images_are_refused(server_of):
    with pytest.raises(RequestRejectedError, match="reads text only"):
        await server_of().generate("a", prompt_ids=[5], sampling_params={}, image_data=[object()])


async def test_dummy_weights_are_never_served(server_of):
    with pytest.raises(WeightsNotLoadedError, match="never synced"):
        await server_of(load_format="dummy").generate("a", prompt_ids=[5], sampling_params={})


async def test_a_standalone_server_does_not_sleep(server_of):
    from verl.workers.rollout.replica import RolloutMode

    server = server_of(RolloutMode.STANDALONE)
    await server.sleep()
    assert (await server.generate("a", prompt_ids=[5], sampling_params={})).stop_reason == "completed"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"engine_kwargs": {"hf": {"thread": 1}}}, "did you mean 'threads'"),
        ({"engine_kwargs": {"hf": {"threads": 0}}}, "threads must be >= 1"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size must be 1, got 2"),
        ({"load_format": "gguf"}, "load_format='gguf'"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode='raw_logits'"),
    ],
)
def test_impossible_options_are_named(server_of, overrides, says):
    with pytest.raises(ConfigError, match=says):
        server_of(**overrides)


@pytest.fixture
async def replica(ray_session, configs):
    """A replica beside a stand-in worker, started with weights that only a sync can bring."""
    from verl.workers.rollout.replica import RolloutMode

    from rlinf_verl.rollout.replica import InProcessReplica

    class Worker:
        pass

    rollout, model = configs(load_format="dummy", engine_kwargs={"hf": {"bucket_mb": 1}})
    replica = InProcessReplica(replica_rank=0, config=rollout, model_config=model, gpus_per_node=1)
    replica.rollout_mode = RolloutMode.HYBRID
    replica.workers = [ray_session.remote(Worker).options(num_cpus=0).remote()]
    await replica.launch_servers()
    yield replica
    for actor in [*replica.servers, *replica.workers]:
        ray_session.kill(actor)


@pytest.fixture
def adapter(configs, monkeypatch):
    from rlinf_verl.rollout.replica import InProcessAdapter

    monkeypatch.setenv("RANK", "0")
    rollout, model = configs(load_format="dummy")
    return InProcessAdapter(config=rollout, model_config=model, device_mesh=None)


@pytest.mark.ray
async def test_a_hybrid_round_over_ray(replica, adapter, make_model, teacher):
    """Sleep, sync version 1, wake, generate; abort returns partial output; a bad sync drains and is refused."""
    server = replica.server_handle
    greedy = {"temperature": 0, "ignore_eos": True}
    await replica.sleep()
    parked = asyncio.ensure_future(server.generate.remote("p", [5, 6], greedy))
    await adapter.resume(["weights"])
    await adapter.update_weights(iter(make_model(seed=1).state_dict().items()), global_steps=1)
    await adapter.resume(["kv_cache"])
    out = await parked
    assert out.extra_fields["global_steps"] == 1
    assert out.token_ids == teacher(make_model(seed=1), [5, 6], out.token_ids).argmax(-1).tolist()

    await replica.abort_all_requests()
    parked = asyncio.ensure_future(server.generate.remote("q", [5, 6], greedy))
    await replica.resume_generation()
    assert (await parked).stop_reason == "completed"

    drained = []

    def weights():
        for name, tensor in make_model(seed=2).state_dict().items():
            drained.append(name)
            yield name, torch.zeros(3) if name == "lm_head.weight" else tensor

    with pytest.raises(WeightSyncError, match=r"\(3,\) in training"):
        await adapter.update_weights(weights(), global_steps=2)
    assert drained == list(make_model().state_dict())
    with pytest.raises(WeightsNotLoadedError):
        await server.generate.remote("r", [5, 6], greedy)
    await adapter.update_weights(iter(make_model(seed=2).state_dict().items()), global_steps=2)
    assert (await server.generate.remote("s", [5, 6], greedy)).extra_fields["global_steps"] == 2


async def test_what_cannot_be_synced_still_drains(adapter):
    left = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    with pytest.raises(ConfigError, match="delta_flush"):
        await adapter.update_weights(left, wire_format="delta_flush")
    assert next(left, None) is None
    left = iter([("a", torch.zeros(1))])
    with pytest.raises(ConfigError, match=r"lora\.merge=True"):
        await adapter.update_weights(left, peft_config={"r": 8})
    assert next(left, None) is None


def test_verl_finds_the_rollouts_by_name():
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    import rlinf_verl.rollout

    own = "rlinf_verl.rollout.replica"
    for _ in range(2):
        rlinf_verl.rollout.register("hf", replica=f"{own}.InProcessReplica", adapter=f"{own}.InProcessAdapter")
    assert get_rollout_class("hf").__name__ == "InProcessAdapter"
    assert get_rollout_replica_class("hf").__name__ == "InProcessReplica"


def test_the_policy_server_is_known_where_no_model_was_read():
    """A worker that only receives weights does not import model.external_lib."""
    code = """
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
print(get_rollout_replica_class("openvla").__name__, get_rollout_class("openvla").__name__)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["VLAReplica", "VLAAdapter"]
