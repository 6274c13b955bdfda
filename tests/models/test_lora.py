"""LoRA: starts as the identity, trains the right parameters, and merges into what the adapters compute."""

import pytest
import torch

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.models.openvla import ActionSpec, OpenVLAProcessor, Sampling, TinySizes, load_policy, save_policy
from rlinf_plugins.models.openvla.lora import TARGETS, adapters_off, add_adapters, merged_weights
from rlinf_plugins.models.openvla.tiny import make_tiny_checkpoint

SIZES = TinySizes(vision_dims=(32, 32), vision_heads=(2, 2), patch_size=56, hidden=32, intermediate=64)
SPECS = {
    "openvla": ActionSpec(dim=3, value_head="chunk"),
    "openvla-oft": ActionSpec(decoding="parallel", chunk=2, dim=3, proprio_dim=3, value_head="action"),
}


@pytest.fixture(params=SPECS)
def folder(request, tmp_path):
    return make_tiny_checkpoint(
        tmp_path / "model", variant=request.param, sizes=SIZES, spec=SPECS[request.param], seed=1
    )


@pytest.fixture
def judge(folder):
    """Function from a policy to log-probabilities and values of fixed actions."""
    generator = torch.Generator().manual_seed(0)
    spec = load_policy(folder).spec
    processor = OpenVLAProcessor.from_folder(folder)
    frames = torch.randint(0, 256, (2, 64, 64, 3), generator=generator, dtype=torch.uint8).numpy()
    proprio = torch.rand(2, 3, generator=generator).numpy() if spec.proprio_dim else None
    inputs = processor(["push the cube", "pick up the mug"], [[frame] for frame in frames], proprio)
    tokens = torch.randint(31744, 32000, (2, spec.tokens), generator=generator)

    def run(policy):
        out = policy(**inputs.kwargs(), tokens=tokens, sampling=Sampling())
        return torch.cat([out.log_probs.flatten(), out.values.flatten()])

    return run


def shaken(policy):
    """Give the adapters weights as if they had been trained."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return policy


def test_adapters_start_as_the_identity_and_leave_names_alone(folder, judge):
    plain, adapted = load_policy(folder), load_policy(folder)
    add_adapters(adapted, rank=4)
    # An adapted output layer computes all rows, which sums in another order.
    assert torch.allclose(judge(plain), judge(adapted), atol=1e-6)
    merged = dict(merged_weights(adapted))
    assert merged.keys() == plain.state_dict().keys()
    assert all(torch.equal(merged[name], value) for name, value in plain.state_dict().items())


def test_only_adapters_and_value_head_learn(folder, judge):
    policy = load_policy(folder)
    add_adapters(policy, rank=4)
    learning = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or name.startswith("value_head.") for name in learning)
    assert {name for name, _ in policy.named_parameters() if name.startswith("value_head.")} <= learning
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in learning if "lora_" in name}
    assert adapted == set(TARGETS) - {"out_proj"}  # of the attention pooling in other timm models
    judge(shaken(policy)).sum().backward()
    for part in ("vision_backbone.featurizer", "projector", "language_model.model.layers.0", "lm_head", "value_head"):
        gradients = [p.grad.abs().sum() for n, p in policy.named_parameters() if part in n and p.grad is not None]
        assert sum(gradients) > 0, part


def test_merged_weights_compute_what_the_adapters_do(folder, judge, tmp_path):
    policy = load_policy(folder)
    before = judge(policy)
    add_adapters(policy, rank=4, alpha=8)
    shaken(policy)
    with_adapters = judge(policy)
    assert (with_adapters - before).abs().max() > 0.05
    save_policy(policy, tmp_path / "merged", weights=dict(merged_weights(policy)))
    assert torch.allclose(judge(load_policy(tmp_path / "merged")), with_adapters, atol=1e-5)
    assert torch.equal(judge(policy), with_adapters)  # merging changed nothing


def test_without_adapters_it_is_the_policy_they_were_added_to(folder, judge):
    policy = load_policy(folder)
    before = judge(policy)
    add_adapters(policy, rank=2)
    shaken(policy)
    with adapters_off(policy):
        assert torch.allclose(judge(policy), before, atol=1e-6)
    assert (judge(policy) - before).abs().max() > 0.01


def test_what_cannot_be_adapted_is_refused(folder):
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        add_adapters(load_policy(folder), rank=0)
    with pytest.raises(ConfigError, match="no_such_layer name no layer"):
        add_adapters(load_policy(folder), rank=2, targets=["no_such_layer"])
