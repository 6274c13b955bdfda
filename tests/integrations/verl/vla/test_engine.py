"""The training engine on gloo, without Ray: against a loop written out here, and against itself on two ranks."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.models.openvla import ActionSpec, ImageProcessor, TinySizes, load_policy, make_tiny_checkpoint
from rlinf_plugins.models.openvla.lora import TARGETS

SCRIPT = Path(__file__).with_name("engine_job.py")
SIZES = TinySizes(vision_dims=(32, 32), vision_heads=(2, 2), patch_size=56, hidden=32, intermediate=64)
SPECS = {
    "openvla": ActionSpec(dim=4, value_head="chunk"),
    "openvla-oft": ActionSpec(decoding="parallel", chunk=4, dim=3, proprio_dim=3, value_head="action"),
    "grpo": ActionSpec(decoding="parallel", chunk=4, dim=3),
    "lora": ActionSpec(decoding="parallel", chunk=4, dim=3, value_head="chunk"),
    "bf16": ActionSpec(dim=4, value_head="chunk"),
}
OPTIONS = {
    "openvla": {"override": {"log_prob_level": "action"}},  # RLinf's PPO
    "openvla-oft": {},
    "grpo": {"clip": [0.2, 0.28], "dropped": [2, 5]},  # clip-higher, two rows left out by the group filter
    "lora": {"model": {"lora_rank": 4, "lora_alpha": 4}, "precision": "bf16"},  # as RLinf trains them
    "bf16": {"precision": "bf16", "override": {"log_prob_level": "action"}},
}
BF16_BAND = 0.05
"""Largest distance of log-probabilities computed in bfloat16; the random policy's are near ln(256)."""
WHOLE = ["openvla", "openvla-oft", "grpo"]
"""Variants that train all weights."""


@pytest.fixture(scope="module")
def job():
    """The script's module, for the rows it makes."""
    spec = importlib.util.spec_from_file_location("engine_job", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run_ranks(tmp_path_factory):
    """Function from variant and number of ranks to the checkpoint and what rank 0 saw; each runs once."""
    folders, results = {}, {}

    def run(variant: str, ranks: int):
        if variant not in folders:
            folder = tmp_path_factory.mktemp(variant)
            base = "openvla" if SPECS[variant].decoding == "autoregressive" else "openvla-oft"
            folders[variant] = make_tiny_checkpoint(folder, variant=base, sizes=SIZES, spec=SPECS[variant])
        if (variant, ranks) not in results:
            out = tmp_path_factory.mktemp(f"{variant}-{ranks}")
            launch(folders[variant], out, ranks, OPTIONS[variant])
            results[variant, ranks] = torch.load(out / "result.pt", weights_only=True), out
        return folders[variant], *results[variant, ranks]

    return run


def launch(folder: Path, out: Path, ranks: int, options: dict) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "VERL_PLATFORM": "cpu",
    }
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), str(out), json.dumps(options)]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]


def value_reference(values, rows, job):
    """The clipped Huber loss over valid values, written out."""
    returns, old = (torch.stack([row[name] for row in rows]) for name in ("chunk_returns", "rollout_values"))
    outputs = values.shape[1]
    valid = torch.stack([row["response_mask"].view(outputs, -1).amax(1) for row in rows])

    def huber(error):
        delta = job.VALUE["value_huber"]
        return torch.where(error.abs() <= delta, 0.5 * error**2, delta * (error.abs() - 0.5 * delta))

    clipped = old + (values - old).clamp(-job.VALUE["value_clip"], job.VALUE["value_clip"])
    losses = torch.maximum(huber(returns - values), huber(returns - clipped))
    return job.VALUE["value_coef"] * (losses * valid).sum() / valid.sum()


def reference(policy, job, options):
    """PPO's clipped loss per unit, the entropy bonus and the value loss, written out; returns everything."""
    from rlinf_verl.vla.engine_rows import read_inputs

    rows = job.rows(policy.spec, dropped=options.get("dropped", ()))
    inputs = read_inputs(job.tensordict(rows), policy.spec, ImageProcessor(), "cpu").arguments
    out = policy(**inputs)
    log_probs, entropy = out.log_probs.flatten(1), out.entropy.flatten(1)
    mask, advantages, shift = (torch.stack([r[k] for r in rows]) for k in ("response_mask", "advantages", "old_shift"))
    if options.get("override", {}).get("log_prob_level") == "action":
        by_action = (len(rows), policy.spec.chunk, policy.spec.dim)
        new, bonus, moved = ((t * mask).view(by_action).sum(2) for t in (log_probs, entropy, shift))
        mask, advantages = mask.view(by_action)[..., 0], advantages.view(by_action)[..., 0]
    else:
        new, bonus, moved = log_probs, entropy, shift
    low, high = options.get("clip", (0.2, 0.2))
    ratio = (-moved).exp() * (new - new.detach()).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * 3.0), losses)  # veRL's dual clip
    loss = ((losses - 0.01 * bonus) * mask).sum() / mask.sum()
    if out.values is not None:
        loss = loss + value_reference(out.values, rows, job)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), job.CLIP)
    return log_probs.detach(), entropy.detach(), loss.item(), norm.item()


@pytest.mark.slow
@pytest.mark.parametrize("variant", WHOLE)
def test_a_training_step_is_that_of_a_plain_loop(run_ranks, job, variant):
    folder, seen, _ = run_ranks(variant, 1)
    policy = load_policy(folder)
    log_probs, entropy, loss, norm = reference(policy, job, OPTIONS[variant])
    assert torch.allclose(seen["log_probs"], log_probs, atol=1e-5)
    assert torch.allclose(seen["entropy"], entropy, atol=1e-5)
    assert seen["loss"] == pytest.approx(loss, abs=1e-5)
    assert seen["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, parameter in policy.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        lr = job.VALUE["value_lr"] if name.startswith("value_head.") else job.LR
        assert torch.allclose(seen["before"][name] - seen["after"][name], lr * gradient, atol=1e-5), name
    assert ("value/loss" in seen["metrics"]) == (policy.value_head is not None)


@pytest.mark.slow
def test_bfloat16_computes_in_its_band_and_keeps_float32_weights(run_ranks, job):
    folder, seen, _ = run_ranks("bf16", 1)
    policy = load_policy(folder)
    log_probs, entropy, loss, norm = reference(policy, job, OPTIONS["bf16"])
    distance = (seen["log_probs"] - log_probs).abs().max()
    assert 1e-5 < distance < BF16_BAND
    assert torch.allclose(seen["entropy"], entropy, atol=BF16_BAND)
    assert seen["loss"] == pytest.approx(loss, rel=0.02)
    assert seen["grad_norm"] == pytest.approx(norm, rel=0.05)
    assert all(value.dtype == torch.float32 for value in seen["after"].values())
    head = [name for name in seen["after"] if name.startswith("value_head.")]
    assert all(not torch.equal(seen["before"][name], seen["after"][name]) for name in head)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["openvla", "openvla-oft"])
def test_two_ranks_equal_one(run_ranks, variant):
    _, one, _ = run_ranks(variant, 1)
    _, two, _ = run_ranks(variant, 2)
    assert torch.allclose(one["log_probs"], two["log_probs"], atol=1e-6)
    assert torch.allclose(one["entropy"], two["entropy"], atol=1e-6)
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)
    for name, value in one["after"].items():
        assert torch.allclose(value, two["after"][name], atol=1e-5), name


@pytest.mark.slow
def test_vision_blocks_projector_and_decoder_layers_are_sharded_on_their_own(run_ranks):
    _, seen, _ = run_ranks("openvla-oft", 1)
    assert set(seen["wrapped"]) >= {
        "FSDPBlock",
        "FSDPFusedProjector",
        "FSDPProprioProjector",
        "FSDPValueHead",
        "FSDPLlamaDecoderLayer",
        "FSDPEmbedding",
        "FSDPVocabularyHead",
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_synced_weights_carry_the_names_of_the_checkpoint(run_ranks, ranks):
    folder, seen, _ = run_ranks("openvla-oft", ranks)
    stored = load_policy(folder).state_dict()
    assert seen["before"].keys() == stored.keys()
    assert all(torch.equal(seen["before"][name], value) for name, value in stored.items())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_resumes_and_exports_the_published_layout(run_ranks, ranks):
    folder, seen, out = run_ranks("openvla-oft", ranks)
    assert any(not torch.equal(seen["moved"][name], value) for name, value in seen["after"].items())
    assert all(torch.equal(seen["restored"][name], value) for name, value in seen["after"].items())
    exported = out / "checkpoint" / "huggingface"
    policy = load_policy(exported)
    assert policy.spec == SPECS["openvla-oft"]
    assert all(torch.equal(policy.state_dict()[name], value) for name, value in seen["after"].items())
    for name in ("dataset_statistics.json", "tokenizer.json"):
        assert (exported / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.slow
def test_adapters_train_sharded_sync_merged_and_resume(run_ranks):
    folder, seen, out = run_ranks("lora", 2)
    stored = load_policy(folder).state_dict()
    assert seen["before"].keys() == stored.keys()
    assert all(torch.equal(seen["before"][name], value) for name, value in stored.items())
    moved = {name for name, value in seen["after"].items() if not torch.equal(value, stored[name])}
    assert {name for name in stored if name.startswith("value_head.")} <= moved
    assert {"language_model.lm_head.weight", "projector.fc1.weight"} <= moved
    assert all(name.startswith("value_head.") or name.rsplit(".", 2)[-2] in TARGETS for name in moved)
    assert not any(name.endswith(".bias") for name in moved if not name.startswith("value_head."))
    assert all(torch.equal(seen["restored"][name], value) for name, value in seen["after"].items())
    exported = load_policy(out / "checkpoint" / "huggingface").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in seen["after"].items())


def test_rows_added_to_fill_a_mini_batch_weigh_nothing(job):
    from rlinf_plugins.models.openvla.modeling import ActionOutput
    from rlinf_verl.vla.engine_rows import pack_outputs

    spec = ActionSpec(dim=4)
    rows = job.rows(spec)[:2]
    for name in ("responses", "response_mask", "loss_mask", "rollout_log_probs"):
        rows[1][name] = rows[1][name][:1] * 0
    rows[1]["input_ids"] = torch.cat([rows[1]["prompts"], rows[1]["responses"]])
    names = ("prompts", "responses", "input_ids", "response_mask")
    data = {k: torch.nested.as_nested_tensor([row[k] for row in rows], layout=torch.jagged) for k in names}
    values = torch.full((2, 1, 4), -2.0, requires_grad=True)
    output = ActionOutput(tokens=values, log_probs=values, entropy=values, values=None, hidden=values)
    packed = pack_outputs(output, data, torch.tensor([True, False]))
    real, added = packed["log_probs"].unbind()
    prompt = len(rows[0]["prompts"])
    assert real.tolist() == [0.0] * (prompt - 1) + [-2.0] * 4 + [0.0]
    assert added.abs().sum() == 0
    packed["log_probs"].values().sum().backward()
    assert values.grad.tolist() == [[[1.0] * 4], [[0.0] * 4]]


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        ({"use_remove_padding": True}, {}, "needs model.use_remove_padding=false, got True"),
        ({"lora_adapter_path": "adapter"}, {}, "needs model.lora_adapter_path=none, got adapter"),
        ({"use_fused_kernels": True}, {}, "needs model.use_fused_kernels=false"),
        ({}, {"strategy": "fsdp"}, "needs fsdp_config.strategy=fsdp2, got fsdp"),
        ({}, {"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size=1, got 2"),
    ],
)
def test_settings_without_a_meaning_are_refused(model, engine, message):
    from types import SimpleNamespace

    from rlinf_verl.vla.engine import OpenVLAEngine

    model_config = SimpleNamespace(
        **{"use_remove_padding": False, "use_fused_kernels": False, "use_liger": False, "lora_adapter_path": None}
        | model
    )
    engine_config = SimpleNamespace(**{"strategy": "fsdp2", "ulysses_sequence_parallel_size": 1} | engine)
    with pytest.raises(ConfigError, match=message):
        OpenVLAEngine(model_config, engine_config, None, None)
