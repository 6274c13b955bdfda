"""Loading and saving: strict, whole or not at all, and the same layout back."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf_plugins.core.errors import CheckpointError, ConfigError, MissingAssetError
from rlinf_plugins.models.openvla import (
    ActionSpec,
    OpenVLAConfig,
    Sampling,
    load_policy,
    make_tiny_checkpoint,
    save_policy,
)
from rlinf_plugins.models.openvla.checkpoint import named_weights

OFT = ActionSpec(decoding="parallel", chunk=8, num_images=2, proprio_dim=8)


def stored(folder):
    weights = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(file)
    return weights


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def broken(tiny, tmp_path):
    """A copy of a tiny checkpoint, to be damaged."""
    return shutil.copytree(tiny(), tmp_path / "copy")


@pytest.mark.parametrize(("name", "spec"), [("tiny-openvla", ActionSpec()), ("tiny-openvla-oft", OFT)])
@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 2 * 10**6])
def test_published_layout_round_trips(golden, tmp_path, name, spec, max_shard_bytes):
    policy = load_policy(golden.folder / name, spec=spec, dtype=torch.bfloat16)
    save_policy(policy, tmp_path, max_shard_bytes=max_shard_bytes)
    before, after = stored(golden.folder / name), stored(tmp_path)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes < 10**9)
    if spec.proprio_dim:
        file = "proprio_projector--latest_checkpoint.pt"
        first, second = (torch.load(f / file, weights_only=True) for f in (golden.folder / name, tmp_path))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_configuration_round_trips(golden, tmp_path):
    policy = load_policy(golden.folder / "tiny-openvla")
    save_policy(policy, tmp_path)
    before, after = (json.loads((f / "config.json").read_text()) for f in (golden.folder / "tiny-openvla", tmp_path))
    for key in ("model_type", "architectures", "norm_stats", "timm_model_ids", "image_sizes", "n_action_bins"):
        assert before[key] == after[key], key
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "pad_token_id"):
        assert before["text_config"][key] == after["text_config"][key]
    assert after["text_config"]["rms_norm_eps"] == 1e-6


def test_the_seven_billion_layout_has_982_keys():
    with torch.device("meta"):
        from rlinf_plugins.models.openvla import OpenVLAForActionPrediction

        policy = OpenVLAForActionPrediction(OpenVLAConfig())
    weights = {key: value.shape for key, value in policy.state_dict().items()}
    assert len(weights) == 982
    assert sum(shape.numel() for shape in weights.values()) == 7_541_237_184


@pytest.mark.slow
def test_a_fresh_process_computes_the_same(tiny, observe, tmp_path):
    folder = tiny("openvla-oft", value_head="action")
    policy, (inputs, _) = load_policy(folder), observe(folder)
    save_policy(policy, tmp_path / "saved")
    arguments = inputs.kwargs() | {"sampling": Sampling(greedy=True)}
    torch.save({key: value for key, value in inputs.kwargs().items() if value is not None}, tmp_path / "inputs.pt")
    code = (
        "import sys, torch\n"
        "from rlinf_plugins.models.openvla import Sampling, load_policy\n"
        "inputs = torch.load(sys.argv[2], weights_only=True)\n"
        "out = load_policy(sys.argv[1]).act(**inputs, sampling=Sampling(greedy=True))\n"
        "torch.save([out.tokens, out.log_probs, out.values], sys.argv[3])\n"
    )
    arguments_of = [str(tmp_path / "saved"), str(tmp_path / "inputs.pt"), str(tmp_path / "out.pt")]
    subprocess.run([sys.executable, "-c", code, *arguments_of], check=True, timeout=120)
    tokens, log_probs, values = torch.load(tmp_path / "out.pt", weights_only=True)
    ours = policy.act(**arguments)
    assert torch.equal(ours.tokens, tokens)
    assert torch.allclose(ours.log_probs, log_probs, atol=1e-6)
    assert torch.allclose(ours.values, values, atol=1e-6)


def test_the_value_head_is_kept_and_is_random_only_once(tiny, tmp_path):
    policy = load_policy(tiny(), spec=ActionSpec(dim=3, value_head="chunk"), value_head_seed=1)
    with torch.no_grad():
        policy.value_head.mlp[0].bias.fill_(0.5)
    save_policy(policy, tmp_path)
    again = load_policy(tmp_path, spec=policy.spec, value_head_seed=2)
    assert all(
        torch.equal(a, b) for a, b in zip(policy.value_head.parameters(), again.value_head.parameters(), strict=True)
    )


def test_layer_scale_has_the_published_name(golden):
    names = named_weights(load_policy(golden.folder / "tiny-openvla"))
    assert "vision_backbone.featurizer.blocks.0.ls1.scale_factor" in names
    assert not any("gamma" in key for key in names)


def test_missing_and_unexpected_keys_are_listed(broken):
    def change(weights):
        weights["projector.fc9.weight"] = weights.pop("projector.fc1.weight")

    rewrite(broken, change)
    with pytest.raises(CheckpointError) as error:
        load_policy(broken)
    assert "1 missing: projector.fc1.weight" in str(error.value)
    assert "1 unexpected: projector.fc9.weight" in str(error.value)


def test_a_misshapen_key_is_listed_with_both_shapes(broken):
    def change(weights):
        weights["projector.fc3.bias"] = torch.zeros(7)

    rewrite(broken, change)
    with pytest.raises(CheckpointError, match=r"projector\.fc3\.bias is \(7,\), expected \(64,\)"):
        load_policy(broken)


def test_long_lists_are_cut(broken):
    rewrite(broken, lambda weights: [weights.pop(key) for key in list(weights) if "layers" in key])
    with pytest.raises(CheckpointError, match=r"18 missing: .* and 6 more"):
        load_policy(broken)


def test_a_truncated_file_is_named(broken):
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read, it may be truncated"):
        load_policy(broken)


def test_a_truncated_or_absent_shard_is_named(golden, tmp_path):
    folder = shutil.copytree(golden.folder / "tiny-openvla-oft", tmp_path / "copy")
    shard = folder / "model-00003-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="model-00003-of-00004"):
        load_policy(folder)
    shard.unlink()
    with pytest.raises(MissingAssetError, match="model-00003-of-00004"):
        load_policy(folder)


def test_an_index_that_lies_is_refused(golden, tmp_path):
    folder = shutil.copytree(golden.folder / "tiny-openvla-oft", tmp_path / "copy")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["projector.fc7.weight"] = "model-00001-of-00004.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"listed but absent: projector\.fc7\.weight"):
        load_policy(folder)


def test_component_files_are_required_and_checked(golden, tmp_path):
    folder = shutil.copytree(golden.folder / "tiny-openvla-oft", tmp_path / "copy")
    file = folder / "proprio_projector--latest_checkpoint.pt"
    file.write_bytes(file.read_bytes()[:400])
    with pytest.raises(CheckpointError, match="proprio_projector"):
        load_policy(folder, spec=OFT)
    file.unlink()
    with pytest.raises(MissingAssetError, match="exactly one proprio_projector"):
        load_policy(folder, spec=OFT)


def test_absent_folders_and_foreign_configurations(broken, tmp_path):
    with pytest.raises(MissingAssetError, match=r"config\.json does not exist"):
        load_policy(tmp_path / "nowhere")
    (broken / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="model_type must be 'openvla', got 'llama'"):
        load_policy(broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_policy(broken)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_fused_vision_backbone": False}, "only the fused"),
        ({"arch_specifier": "linear"}, "arch_specifier"),
        ({"n_action_bins": 1}, "n_action_bins"),
        ({"timm_model_ids": ["vit_nobody", "vit_so400m_patch14_siglip_224"]}, "'vit_nobody', which timm"),
    ],
)
def test_configurations_outside_the_implementation_are_refused(broken, change, message):
    file = broken / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_policy(broken)


def test_tiny_checkpoints_depend_on_the_seed_alone(tmp_path):
    folders = [make_tiny_checkpoint(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    first, same, other = (stored(folder) for folder in folders)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first["projector.fc1.weight"], other["projector.fc1.weight"])


def test_an_unknown_variant_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="variant must be one of openvla, openvla-oft, got 'pi0'"):
        make_tiny_checkpoint(tmp_path, variant="pi0")
