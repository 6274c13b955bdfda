"""Where independent implementations of OpenVLA go wrong: each slip is made on purpose and must show."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rlinf_plugins.core.errors import InstructionError, UnknownNameError
from rlinf_plugins.models.openvla import ActionSpec, Sampling, load_policy, load_statistics, modeling
from rlinf_plugins.models.openvla.actions import libero_gripper, widowx_gripper
from rlinf_plugins.models.openvla.images import centre_crop, libero_view
from rlinf_plugins.models.openvla.prompts import PromptEncoder, clean_instruction
from rlinf_plugins.models.openvla.sampling import ActionDistribution


def prompt(golden, number=0):
    ids = torch.from_numpy(golden.oft[f"moojink.p{number}.input_ids"])[None]
    return ids, torch.ones_like(ids)


def action_logits(policy, ids, mask, shift=0, **inputs):
    hidden, start = policy.hidden_states(ids, mask, None, **inputs)
    steps = hidden[0, start + shift : start + shift + policy.spec.tokens]
    return policy.language_model.lm_head(steps)[:, 31744:32000]


@pytest.fixture
def away(golden, oft_policy, pixels):
    """Function: distance of the (deliberately broken) OFT policy's logits from the reference."""

    def measure(policy=None, shift=0, **inputs):
        inputs = inputs or {"pixel_values": pixels[:1]}
        logits = action_logits(policy or oft_policy(), *prompt(golden), shift=shift, **inputs)
        return golden.distance(logits, golden.oft["moojink.p0.logits_action_slice"])

    return measure


# --- attention, stop token, placeholders, positions --------------------------------------------------------------


def test_causal_attention_in_parallel_decoding(golden, away, oft_policy, pixels, monkeypatch):
    bias = modeling.attention_bias
    monkeypatch.setattr(
        modeling, "attention_bias", lambda mask, queries, dtype, causal: bias(mask, queries, dtype, True)
    )
    assert away() > 5
    # and it is exactly the published wrong answer
    logits = action_logits(oft_policy(), *prompt(golden), pixel_values=pixels[:1])
    assert golden.distance(logits, golden.causal["moojink.p0.logits_action_slice"]) < 1e-3


def test_stop_token_left_out(away, oft_policy):
    assert away(oft_policy(stop_token=False)) > 1


def test_placeholders_not_zeroed(away, oft_policy, monkeypatch):
    policy = oft_policy()

    def embedded(embed, ids, tokens):
        placeholders = embed(ids.new_full((ids.shape[0], 56), 1))
        return torch.cat([placeholders, embed(ids.new_full((ids.shape[0], 1), 2))], dim=1)

    monkeypatch.setattr(policy, "_tail", embedded)
    assert away(policy) > 1


@pytest.mark.parametrize("shift", [-1, 1])
def test_first_action_position_off_by_one(away, shift):
    assert away(shift=shift) > 1


# --- vision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slip", ["last block", "final norm", "prefix tokens", "siglip first"])
def test_vision_features(golden, openvla, pixels, slip):
    backbone, reference = openvla.vision_backbone, golden.openvla["vision_features_img0"]

    def features(tower, images):
        layer = len(tower.blocks) - (1 if slip == "last block" else 2)
        (tokens,) = tower.forward_intermediates(
            images, indices=[layer], norm=slip == "final norm", output_fmt="NLC", intermediates_only=True
        )
        return tokens

    if slip == "prefix tokens":
        dino = backbone.featurizer
        seen = []
        hook = dino.blocks[-2].register_forward_hook(lambda module, args, output: seen.append(output))
        backbone(pixels[:1])
        hook.remove()
        assert seen[0].shape[1] == 256 + 5
        wrong = seen[0][0, :256]
        assert golden.distance(wrong, reference[:, :32]) > 1e-2
        return
    dino, siglip = features(backbone.featurizer, pixels[:1, :3]), features(backbone.fused_featurizer, pixels[:1, 3:])
    parts = [siglip, dino] if slip == "siglip first" else [dino, siglip]
    assert golden.distance(torch.cat(parts, dim=-1)[0], reference) > 1e-2


def test_channels_of_the_two_encoders_swapped(golden, openvla, pixels):
    swapped = torch.cat([pixels[:1, 3:], pixels[:1, :3]], dim=1)
    assert golden.distance(openvla.vision_backbone(swapped)[0], golden.openvla["vision_features_img0"]) > 1e-2


# --- vocabulary ---------------------------------------------------------------------------------------------------


def test_padding_rows_are_never_chosen(openvla, golden, pixels, seed):
    head = openvla.language_model.lm_head
    ids = torch.from_numpy(golden.openvla["p0.input_ids"])[None]
    saved = head.weight.data.clone()
    try:
        head.weight.data[32000:] *= 1e3  # would win every time if they took part
        for sampling in (Sampling(greedy=True), Sampling(temperature=2.0), Sampling(top_k=5)):
            out = openvla.act(
                ids,
                torch.ones_like(ids),
                pixel_values=pixels[:1],
                sampling=sampling,
                generator=torch.Generator().manual_seed(seed),
            )
            assert int(out.tokens.min()) >= 31744
            assert int(out.tokens.max()) < 32000
    finally:
        head.weight.data.copy_(saved)


def test_action_logits_are_not_the_last_256(golden, openvla, pixels):
    tokens = torch.from_numpy(golden.openvla["p0.greedy_tokens"])[None]
    ids = torch.from_numpy(golden.openvla["p0.input_ids"])[None]
    hidden, start = openvla.hidden_states(ids, torch.ones_like(ids), tokens, pixel_values=pixels[:1])
    logits = openvla.language_model.lm_head(hidden[0, start : start + 7])
    reference = golden.openvla["p0.logits_action_slice"]
    assert golden.distance(logits[:, -320:-64], reference) < 1e-5
    assert golden.distance(logits[:, -256:], reference) > 1
    ours = openvla._distribution(hidden[:, start : start + 7], Sampling())
    restricted = ActionDistribution(torch.from_numpy(reference)[None], 31744, Sampling())
    some = torch.full((1, 7), 31800)
    assert torch.allclose(ours.log_prob(some), restricted.log_prob(some), atol=1e-5)


# --- statistics ---------------------------------------------------------------------------------------------------


def test_statistics_replaced_or_merged(golden):
    folder = golden.folder / "tiny-openvla-oft"
    norm_stats = {"bridge_orig": {}}
    assert set(load_statistics(folder, norm_stats).datasets) == {"libero_10_no_noops"}
    assert set(load_statistics(folder, norm_stats, "merge").datasets) == {"bridge_orig", "libero_10_no_noops"}


def test_a_missing_data_set_is_an_error_that_lists_those_present(golden):
    with pytest.raises(UnknownNameError, match=r"'bridge'.*libero_10_no_noops"):
        load_statistics(golden.folder / "tiny-openvla-oft").resolve("bridge")


# --- text ---------------------------------------------------------------------------------------------------------


def test_every_prompt_ends_in_one_lone_space_token(golden):
    encoder = PromptEncoder.from_folder(golden.folder / "tiny-openvla")
    task = "pick up the black bowl between the plate and the ramekin and place it on the plate"
    ids = encoder.ids(task)
    assert ids[:-1] == golden.openvla["synthetic_tokenizer_input_ids_p0"][0].tolist()
    assert ids[-2:] == [29901, 29871]
    assert ids.count(1) == 1
    assert encoder.ids(task.upper() + "  ") == ids


@pytest.mark.parametrize("instruction", ["", "   ", "\n\t"])
def test_an_empty_instruction_is_refused(instruction):
    with pytest.raises(InstructionError, match="empty"):
        clean_instruction(instruction, [])


@pytest.mark.parametrize("token", ["<s>", "</s>", "<PAD>", "<unk>", "<pad>"])
def test_special_tokens_inside_an_instruction_are_refused(golden, token):
    encoder = PromptEncoder.from_folder(golden.folder / "tiny-openvla")
    with pytest.raises(InstructionError, match="special token"):
        encoder.ids(f"pick up {token} the bowl")


def test_leading_and_double_spaces_do_not_change_the_prompt(golden):
    encoder = PromptEncoder.from_folder(golden.folder / "tiny-openvla")
    assert encoder.ids("  pick   up\nthe bowl ") == encoder.ids("pick up the bowl")


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["None", "True"])
def test_a_published_folder_loads_without_a_question(golden, trust):
    code = (
        "from rlinf_plugins.models.openvla import config\n"
        "from transformers import AutoConfig, AutoTokenizer\n"
        f"folder = {str(golden.folder / 'tiny-openvla')!r}\n"
        f"print(type(AutoConfig.from_pretrained(folder, trust_remote_code={trust})).__name__)\n"
        f"print(AutoTokenizer.from_pretrained(folder, trust_remote_code={trust}).pad_token_id)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout.split() == ["OpenVLAConfig", "32000"], done.stderr


# --- images and grippers ------------------------------------------------------------------------------------------


def frame(golden, number):
    from PIL import Image

    return np.asarray(Image.open(sorted((golden.folder / "images").glob("*.png"))[number]))


def levels(ours, reference):
    return np.abs(ours.astype(int) - reference.astype(int))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_crop_of_the_area_not_the_side(golden, number):
    reference = golden.images[f"center_crop90_img{number}"]
    assert levels(centre_crop(frame(golden, number)), reference).max() <= 1
    assert levels(centre_crop(frame(golden, number), area=0.81), reference).mean() > 1


@pytest.mark.parametrize("number", [0, 2])
def test_libero_frames_are_rotated(golden, number):
    # TensorFlow decodes JPEG with a faster, coarser transform than Pillow: up to 10 levels, below 1 on average.
    reference, picture = golden.images[f"libero_image_img{number}"], frame(golden, number)
    assert levels(libero_view(picture), reference).mean() < 1
    assert levels(libero_view(picture), reference).max() <= 10
    for wrong in (picture[::-1, ::-1], picture[::-1], picture[:, ::-1]):
        assert levels(libero_view(wrong), reference).mean() > 5


def test_lanczos_without_jpeg(golden):
    from rlinf_plugins.models.openvla.images import _lanczos

    turned = np.ascontiguousarray(frame(golden, 0)[::-1, ::-1])
    assert levels(_lanczos(turned, 224), golden.images["lanczos_nojpeg_img0"]).max() <= 1


def test_gripper_signs():
    actions = np.array([[0.1, 1.0], [0.1, 0.0], [0.1, 0.6]])
    assert libero_gripper(actions)[:, -1].tolist() == [-1.0, 1.0, -1.0]
    assert widowx_gripper(actions)[:, -1].tolist() == [1.0, -1.0, 1.0]
    assert libero_gripper(actions)[:, 0].tolist() == [0.1] * 3
    assert actions[:, -1].tolist() == [1.0, 0.0, 0.6]


# --- batches, values, rollout against training --------------------------------------------------------------------

VARIANTS = [("openvla", {}), ("openvla-oft", {}), ("openvla-oft", {"stop_token": False})]


@pytest.mark.parametrize(("variant", "changes"), VARIANTS)
def test_a_batch_of_unequal_prompts_equals_the_singles(tiny, observe, variant, changes):
    folder = tiny(variant, value_head="chunk", **changes)
    policy, (inputs, _) = load_policy(folder), observe(folder)
    sampling = Sampling(greedy=True)
    patches = policy.encode(inputs.pixel_values)
    batch = policy.act(inputs.input_ids, inputs.attention_mask, patches=patches, sampling=sampling)
    for row in range(4):
        real = inputs.attention_mask[row].bool()
        ids = inputs.input_ids[row][real][None]
        single = policy.act(ids, torch.ones_like(ids), patches=patches[row : row + 1], sampling=sampling)
        assert single.tokens.tolist() == batch.tokens[row : row + 1].tolist()
        for name in ("log_probs", "values", "hidden"):
            ours, theirs = getattr(batch, name)[row : row + 1], getattr(single, name)
            assert torch.allclose(ours, theirs, atol=1e-5), name


@pytest.mark.parametrize(("variant", "changes"), VARIANTS)
@pytest.mark.parametrize("side", ["left", "right", "behind the first"])
def test_padding_on_any_side_is_the_same(tiny, observe, variant, changes, side):
    folder = tiny(variant, value_head="chunk", **changes)
    policy, (inputs, _) = load_policy(folder), observe(folder)
    patches = policy.encode(inputs.pixel_values)
    plain = policy.act(inputs.input_ids, inputs.attention_mask, patches=patches, sampling=Sampling(greedy=True))
    pad_ids, pad_mask = torch.full((4, 5), 32000), torch.zeros(4, 5, dtype=torch.long)
    order = {"left": (0, "all"), "right": ("all", 0), "behind the first": (1, "rest")}[side]
    ids, mask = inputs.input_ids, inputs.attention_mask
    cut = {0: 0, 1: 1, "all": ids.shape[1]}[order[0]]
    ids = torch.cat([ids[:, :cut], pad_ids, ids[:, cut:]], dim=1)
    mask = torch.cat([mask[:, :cut], pad_mask, mask[:, cut:]], dim=1)
    padded = policy.act(ids, mask, patches=patches, sampling=Sampling(greedy=True))
    assert padded.tokens.tolist() == plain.tokens.tolist()
    assert torch.allclose(padded.log_probs, plain.log_probs, atol=1e-5)
    assert torch.allclose(padded.values, plain.values, atol=1e-5)


def test_the_value_reads_the_end_of_the_prompt_with_and_without_stop_token(golden, oft_policy, pixels):
    ids, mask = prompt(golden)
    ends = []
    for stop in (True, False):
        policy = oft_policy(stop_token=stop)
        sequence = policy._sequence(ids, mask, None, pixels[:1], None, None)
        ends.append(sequence.prompt_end)
        marker = policy.language_model.get_input_embeddings()(torch.tensor([29871]))
        assert torch.equal(sequence.embeds[0, sequence.prompt_end], marker[0])
    assert ends[0] == ends[1] == 256 + ids.shape[1] - 1


@pytest.mark.parametrize(("variant", "changes"), VARIANTS)
def test_rollout_and_training_agree(tiny, observe, variant, changes, seed):
    folder = tiny(variant, **changes)
    policy, (inputs, _) = load_policy(folder), observe(folder)
    patches = policy.encode(inputs.pixel_values).detach()
    for temperature, top_k, greedy in itertools.product((0.6, 1.0, 1.6), (0, 1, 20, 50, 1000), (False, True)):
        sampling = Sampling(temperature=temperature, top_k=top_k, greedy=greedy)
        out = policy.act(
            inputs.input_ids,
            inputs.attention_mask,
            patches=patches,
            sampling=sampling,
            generator=torch.Generator().manual_seed(seed),
        )
        again = policy(inputs.input_ids, inputs.attention_mask, out.tokens, patches=patches, sampling=sampling)
        assert torch.isfinite(out.log_probs).all(), sampling
        assert torch.isfinite(again.entropy).all(), sampling
        assert torch.allclose(out.log_probs, again.log_probs, atol=1e-5), sampling


def test_training_log_probs_stay_finite_once_the_policy_has_moved(seed):
    generator = torch.Generator().manual_seed(seed)
    old, new = (torch.randn(4, 6, 256, generator=generator, requires_grad=True) for _ in range(2))
    sampling = Sampling(top_k=20)
    tokens = ActionDistribution(old, 31744, sampling).choose(generator)
    log_probs, entropy = ActionDistribution(new, 31744, sampling).log_prob_and_entropy(tokens)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.isfinite(log_probs).all()
    assert torch.isfinite(new.grad).all()
    assert new.grad.abs().sum() > 0


def test_specification_defaults_are_the_published_ones():
    assert ActionSpec() == ActionSpec(decoding="autoregressive", chunk=1, dim=7, stop_token=True, num_images=1)
