"""Images, statistics, action tokens and the processor that joins them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rlinf_plugins.core.errors import CheckpointError, ConfigError, ObservationError, UnknownNameError
from rlinf_plugins.models.openvla import ActionCodec, ActionSpec, ImageProcessor, OpenVLAProcessor, Statistics
from rlinf_plugins.models.openvla.statistics import load_statistics
from rlinf_plugins.models.openvla.tiny import tiny_statistics


def picture(golden, number):
    return np.asarray(Image.open(sorted((golden.folder / "images").glob("*.png"))[number]))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_pixels_are_the_references(golden, number):
    ours = ImageProcessor()([picture(golden, number)])
    assert golden.distance(ours, golden.openvla["pixel_values"][number]) < 1e-6


@pytest.mark.parametrize("strategy", ["letterbox", "resize-crop"])
def test_other_resizing_strategies(golden, strategy):
    ours = ImageProcessor(strategy)([picture(golden, 2)])
    vectors = golden.openvla
    assert golden.distance(ours[None, :, ::8, ::8], vectors[f"pixel_values_{strategy}_img2_sub8"]) < 1e-6
    assert golden.distance(ours.mean((1, 2))[None], vectors[f"pixel_values_{strategy}_img2_mean"]) < 1e-6
    assert golden.distance(ours.std((1, 2))[None], vectors[f"pixel_values_{strategy}_img2_std"]) < 1e-6


def test_arrays_tensors_and_pil_images_are_the_same(golden):
    array = picture(golden, 0)
    processor = ImageProcessor()
    expected = processor([array])
    assert torch.equal(processor([Image.fromarray(array)]), expected)
    assert torch.equal(processor([torch.from_numpy(array.copy())]), expected)
    assert torch.equal(processor([array, array]), torch.cat([expected, expected]))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (np.zeros((224, 224), np.uint8), r"image 0 must have shape \[height, width, 3\], got \[224, 224\]"),
        (np.zeros((224, 224, 4), np.uint8), r"got \[224, 224, 4\]"),
        (np.zeros((3, 224, 224), np.uint8), r"got \[3, 224, 224\]"),
        (np.zeros((224, 224, 3), np.float32), "must be uint8 in .* got float32"),
        (np.zeros((0, 224, 3), np.uint8), "image 0 is empty"),
        (Image.new("RGBA", (4, 4)), "mode 'RGBA'"),
    ],
)
def test_wrong_images_are_named(frame, message):
    with pytest.raises(ObservationError, match=message):
        ImageProcessor()([frame])


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ConfigError, match="one of resize-naive, letterbox, resize-crop, got 'stretch'"):
        ImageProcessor("stretch")


def test_action_tokens_are_the_references(golden):
    codec, vectors = ActionCodec(), golden.openvla
    assert golden.distance(codec.decode(vectors["debin.token_ids"]), vectors["debin.normalized"]) == 0
    assert golden.distance(codec.centres, vectors["debin.bin_centers"]) == 0
    assert golden.distance(codec.edges, vectors["debin.bins"]) == 0
    assert codec.encode(vectors["encode.values"]).tolist() == vectors["encode.token_ids"].tolist()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_actions_are_the_references(golden, number):
    statistics = load_statistics(golden.folder / "tiny-openvla")
    key = ["libero_spatial", "libero_spatial_no_noops", "bridge_orig"][number]
    tokens = golden.openvla[f"p{number}.greedy_tokens"]
    actions = ActionCodec().to_actions(tokens, statistics.bounds(key, "action", dim=7), ActionSpec())
    assert golden.distance(actions, golden.openvla[f"p{number}.actions"]) < 1e-12


@settings(deadline=None, max_examples=200)
@given(bins=st.integers(2, 256), value=st.floats(-3, 3))
def test_encoding_then_decoding_is_within_one_bin(bins, value):
    codec = ActionCodec(bins)
    token = codec.encode(value)
    assert 32000 - bins <= int(token) < 32000
    assert abs(float(codec.decode(token)) - np.clip(value, -1, 1)) <= 2 / (bins - 1) / 2 + 1e-9


def test_statistics_of_another_dimension_are_refused():
    statistics = Statistics({"tiny": tiny_statistics(ActionSpec(dim=4))})
    with pytest.raises(CheckpointError, match=r"action\.q01 has 4 numbers, the policy works with 7"):
        statistics.bounds("tiny", "action", dim=7)


def test_statistics_without_states_are_refused():
    statistics = Statistics({"tiny": tiny_statistics(ActionSpec())})
    with pytest.raises(UnknownNameError, match="hold no 'proprio'"):
        statistics.bounds("tiny", "proprio", dim=8)


def test_extremes_take_minimum_and_maximum():
    table = tiny_statistics(ActionSpec(dim=2)) | {}
    table["action"] |= {"min": [-4.0, -4.0], "max": [4.0, 4.0]}
    bounds = Statistics({"aloha": table}).bounds("aloha", "action", dim=2, extremes=True)
    assert bounds.denormalise(np.array([[1.0, 0.25]])).tolist() == [[4.0, 0.25]]


def test_a_broken_statistics_file_is_named(tmp_path):
    file = tmp_path / "dataset_statistics.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_statistics(tmp_path)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match="object of data sets, got list"):
        load_statistics(tmp_path)


def test_the_processor_names_what_does_not_fit(tiny):
    folder = tiny("openvla-oft", num_images=2, proprio_dim=4)
    processor = OpenVLAProcessor.from_folder(folder, unnorm_key="tiny")
    frame = np.zeros((32, 32, 3), np.uint8)
    with pytest.raises(ObservationError, match="2 instructions but 1 observations"):
        processor(["a", "b"], [[frame, frame]], np.zeros((1, 4)))
    with pytest.raises(ObservationError, match="observation 0 has 1 images, the policy takes 2"):
        processor(["a"], [[frame]], np.zeros((1, 4)))
    with pytest.raises(ObservationError, match=r"proprio must have shape \[1, 4\], got \[1, 3\]"):
        processor(["a"], [[frame, frame]], np.zeros((1, 3)))
    with pytest.raises(ObservationError, match=r"proprio must have shape \[1, 4\]"):
        processor(["a"], [[frame, frame]])
    with pytest.raises(UnknownNameError, match="present: tiny"):
        OpenVLAProcessor.from_folder(folder, unnorm_key="bridge")
    with pytest.raises(CheckpointError, match="the policy works with 5"):
        OpenVLAProcessor.from_folder(folder, unnorm_key="tiny", spec=ActionSpec(dim=5))


def test_policy_inputs_of_other_sizes_are_named(tiny, observe):
    from rlinf_plugins.models.openvla import Sampling, load_policy

    folder = tiny("openvla-oft", num_images=2, proprio_dim=4)
    policy, (inputs, processor) = load_policy(folder), observe(folder)
    out = policy.act(**inputs.kwargs(), sampling=Sampling(greedy=True))
    assert processor.actions(out.tokens).shape == (4, 2, 3)
    with pytest.raises(ObservationError, match=r"pixel_values must be \[B, 12, 224, 224\], got \[4, 6, 224, 224\]"):
        policy.encode(inputs.pixel_values[:, :6], inputs.proprio)
    with pytest.raises(ObservationError, match=r"224, 224\], got \[4, 12, 112, 112\]"):
        policy.encode(inputs.pixel_values[..., ::2, ::2], inputs.proprio)
    with pytest.raises(ConfigError, match="needs proprio"):
        policy.encode(inputs.pixel_values)
    with pytest.raises(ConfigError, match="either pixel_values or the patches"):
        policy.act(inputs.input_ids, inputs.attention_mask, sampling=Sampling(greedy=True))
    with pytest.raises(ObservationError, match=r"tokens must hold 6 action tokens a row, got \[4, 2, 2\]"):
        policy(**inputs.kwargs(), tokens=out.tokens[:, :, :2], sampling=Sampling())
