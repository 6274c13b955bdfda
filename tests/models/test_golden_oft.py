"""OpenVLA-OFT against the reference vectors.

The reference network amplifies rounding: exact arithmetic lies 3e-4 from the reference's own float32 logits, and so do
the kernels of one torch build among each other (fused or plain attention, AVX2 or AVX-512). The bound on logits is
therefore 1e-3 on a scale of 8.5; whatever does not pass through the decoder is held to 1e-5, tokens and actions are
equal. The wrong variants are further away than 1, see ``test_pitfalls.py``.
"""

import numpy as np
import pytest
import torch

from rlinf_plugins.models.openvla import ActionCodec, ActionSpec, Sampling, load_policy, load_statistics
from rlinf_plugins.models.openvla.sequence import align_prompts

ATOL = 1e-5
LOGITS = 1e-3
LOG_PROBS = 3e-4
VALUES = 5e-5


def prompt(golden, number):
    ids = torch.from_numpy(golden.oft[f"moojink.p{number}.input_ids"])[None]
    return ids, torch.ones_like(ids)


def logits_of(policy, ids, mask, **inputs):
    hidden, start = policy.hidden_states(ids, mask, None, **inputs)
    steps = hidden[0, start : start + policy.spec.tokens]
    return policy.language_model.lm_head(steps), steps


def to_actions(golden, tokens):
    bounds = load_statistics(golden.folder / "tiny-openvla-oft").bounds("libero_10", "action", dim=7)
    return ActionCodec().to_actions(tokens, bounds, ActionSpec(decoding="parallel", chunk=8))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_pass_logits(golden, oft_policy, pixels, number):
    policy = oft_policy()
    logits, steps = logits_of(policy, *prompt(golden, number), pixel_values=pixels[number : number + 1])
    vectors = golden.oft
    assert golden.distance(logits[:, 31744:32000], vectors[f"moojink.p{number}.logits_action_slice"]) < LOGITS
    assert golden.distance(logits.logsumexp(-1), vectors[f"moojink.p{number}.logsumexp_full"]) < LOGITS
    assert golden.distance(steps[::7], vectors[f"moojink.p{number}.action_hidden_sub"]) < LOGITS
    assert logits.argmax(-1).tolist() == vectors[f"moojink.p{number}.greedy_full_vocab_tokens"].tolist()


def test_the_embedded_sequence(golden, oft_policy, pixels):
    ids, mask = prompt(golden, 0)
    sequence = oft_policy()._sequence(ids, mask, None, pixels[:1], None, None)
    assert golden.distance(sequence.embeds[0].norm(dim=-1), golden.oft["moojink.p0.mm_embedding_row_norms"]) < ATOL


@pytest.mark.parametrize("number", [0, 1, 2])
def test_unrestricted_greedy_actions(golden, oft_policy, pixels, number):
    out = oft_policy().act(
        *prompt(golden, number),
        pixel_values=pixels[number : number + 1],
        sampling=Sampling(greedy=True, vocabulary="full"),
    )
    actions = to_actions(golden, out.tokens[0].numpy())
    assert golden.distance(actions, golden.oft[f"moojink.p{number}.actions"]) < ATOL


def test_two_images_with_proprio(golden, oft_policy, pixels):
    policy = oft_policy(num_images=2, proprio_dim=8)
    bounds = load_statistics(golden.folder / "tiny-openvla-oft").bounds("libero_10", "proprio", dim=8)
    state = bounds.normalise(golden.oft["proprio_raw"])
    assert golden.distance(state, golden.oft["proprio_normalized"]) < 1e-12
    logits, _ = logits_of(
        policy,
        *prompt(golden, 0),
        pixel_values=torch.cat([pixels[0:1], pixels[1:2]], dim=1),
        proprio=torch.from_numpy(state)[None],
    )
    assert golden.distance(logits[:, 31744:32000], golden.oft["moojink.2img_proprio.logits_action_slice"]) < LOGITS
    tokens = logits.argmax(-1)
    assert tokens.tolist() == golden.oft["moojink.2img_proprio.tokens"].tolist()
    assert golden.distance(to_actions(golden, tokens.view(8, 7)), golden.oft["moojink.2img_proprio.actions"]) < ATOL


def test_left_padded_batch_with_stop_token(golden, oft_policy, pixels):
    policy, vectors = oft_policy(), golden.oft
    ids, mask = (torch.from_numpy(vectors[f"simple.{key}"]) for key in ("input_ids_leftpad", "attention_mask"))
    patches = policy.encode(pixels)
    greedy = policy.act(ids, mask, patches=patches, sampling=Sampling(greedy=True))
    assert greedy.tokens.flatten(1).tolist() == vectors["simple.greedy_tokens"].tolist()
    assert golden.distance(to_actions(golden, greedy.tokens), vectors["simple.greedy_actions"]) < ATOL
    sampled = torch.from_numpy(vectors["simple.sample_tokens"])
    out = policy(ids, mask, sampled, patches=patches, sampling=Sampling(temperature=1.6))
    assert golden.distance(out.log_probs.flatten(1), vectors["simple.sample_logp_T1.6"]) < LOG_PROBS
    assert golden.distance(out.entropy.flatten(1), vectors["simple.entropy_T1.6"]) < LOG_PROBS
    assert golden.distance(to_actions(golden, out.tokens), vectors["simple.sample_actions"]) < ATOL


@pytest.mark.parametrize(("case", "rollout_temperature"), [("greedy", 1.0), ("sample", 1.6)])
def test_batch_padded_behind_bos_without_stop_token(golden, oft_policy, case, rollout_temperature):
    policy, vectors = oft_policy(stop_token=False, value_head="action"), golden.oft
    ids, mask = (torch.from_numpy(vectors[f"rlinf.{key}"]) for key in ("input_ids", "attention_mask"))
    patches = policy.encode(torch.from_numpy(vectors["rlinf.pixel_values"]))
    tokens = torch.from_numpy(vectors[f"rlinf.{case}.action_tokens"])
    rollout = policy(ids, mask, tokens, patches=patches, sampling=Sampling(temperature=rollout_temperature))
    train = policy(ids, mask, tokens, patches=patches, sampling=Sampling(temperature=1.6))
    assert golden.distance(rollout.log_probs.flatten(1), vectors[f"rlinf.{case}.prev_logprobs"]) < LOG_PROBS
    assert golden.distance(train.log_probs.flatten(1), vectors[f"rlinf.{case}.train_logprobs"]) < LOG_PROBS
    assert golden.distance(train.entropy.flatten(1), vectors[f"rlinf.{case}.train_entropy"]) < LOG_PROBS
    assert golden.distance(rollout.values, vectors[f"rlinf.{case}.prev_values"]) < VALUES
    assert golden.distance(train.values, vectors[f"rlinf.{case}.train_values"]) < VALUES
    assert golden.distance(to_actions(golden, tokens.numpy()), vectors[f"rlinf.{case}.actions"]) < ATOL
    if case == "greedy":
        out = policy.act(ids, mask, patches=patches, sampling=Sampling(greedy=True))
        assert out.tokens.tolist() == tokens.tolist()


def test_both_padding_layouts_are_one(golden, oft_policy, pixels):
    vectors = golden.oft
    left = [torch.from_numpy(vectors[f"simple.{key}"]) for key in ("input_ids_leftpad", "attention_mask")]
    inner = [torch.from_numpy(vectors[f"rlinf.{key}"]) for key in ("input_ids", "attention_mask")]
    ours, theirs = align_prompts(*left), align_prompts(*inner)
    for row in range(3):
        assert ours[0][row][ours[1][row]].tolist() == theirs[0][row][theirs[1][row]].tolist()
    policy, patches = oft_policy(), oft_policy().encode(pixels)
    first, second = (policy.act(*layout, patches=patches, sampling=Sampling(greedy=True)) for layout in (left, inner))
    assert torch.allclose(first.log_probs, second.log_probs, atol=LOG_PROBS)


def test_the_bound_is_the_networks_own_amplification(golden, oft_policy, pixels):
    """In float64, moving the patches by float32's rounding moves the logits by as much as the reference is away."""
    policy = load_policy(
        golden.folder / "tiny-openvla-oft", spec=ActionSpec(decoding="parallel", chunk=8), dtype=torch.float64
    )
    exact = policy.encode(pixels[:1]).detach()
    rounded = oft_policy().encode(pixels[:1]).detach().double()
    reference = golden.oft["moojink.p0.logits_action_slice"]
    with torch.no_grad():
        ours, moved = (logits_of(policy, *prompt(golden, 0), patches=patches)[0] for patches in (exact, rounded))
    assert float((exact - rounded).abs().max()) < ATOL
    amplified = float((ours - moved).abs().max())
    distance = float(np.abs(ours[:, 31744:32000].numpy() - reference).max())
    assert 1e-4 < amplified < LOGITS
    assert 1e-4 < distance < LOGITS
