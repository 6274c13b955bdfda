"""Fixtures of the model tests: the reference vectors, tiny checkpoints and their policies."""

from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


class Golden:
    """The reference checkpoints and vectors, with a comparison that prints the distance."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.openvla = np.load(folder / "openvla_vectors.npz")
        self.oft = np.load(folder / "oft_vectors_bidirectional.npz")
        self.causal = np.load(folder / "oft_vectors_causal.npz")
        self.images = np.load(folder / "tf_image_vectors.npz")

    @staticmethod
    def distance(ours, reference) -> float:
        ours = ours.detach().numpy() if isinstance(ours, torch.Tensor) else np.asarray(ours)
        reference = np.asarray(reference)
        assert ours.shape == reference.shape, f"shape {ours.shape}, reference {reference.shape}"
        return float(np.abs(ours.astype(np.float64) - reference).max())


@pytest.fixture(scope="session")
def golden() -> Golden:
    """The reference data beside the repository; skipped with its reason where absent."""
    folder = ROOT.parent / "shared" / "golden" / "openvla"
    if not (folder / "openvla_vectors.npz").is_file():
        pytest.skip(f"the OpenVLA reference vectors are not at {folder}")
    _register_tiny_timm()
    return Golden(folder)


def _register_tiny_timm() -> None:
    """Register the two timm models that the reference checkpoints name."""
    import timm
    from timm.models import register_model
    from timm.models.vision_transformer import VisionTransformer

    def build(defaults, extra):
        for key in ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
            extra.pop(key, None)
        return VisionTransformer(**defaults | extra)

    def vit_tinytest_patch14_reg4_dinov2(**extra):
        sizes = dict(patch_size=14, embed_dim=32, depth=3, num_heads=2)
        return build(sizes | dict(init_values=1e-5, reg_tokens=4, no_embed_class=True), extra)

    def vit_tinytest_patch14_siglip_224(**extra):
        sizes = dict(patch_size=14, embed_dim=48, depth=3, num_heads=3, mlp_ratio=3.7362)
        return build(sizes | dict(class_token=False, global_pool="map"), extra)

    for model in (vit_tinytest_patch14_reg4_dinov2, vit_tinytest_patch14_siglip_224):
        if not timm.is_model(model.__name__):
            register_model(model)


@pytest.fixture(scope="session")
def pixels(golden):
    """``[3, 6, 224, 224]`` of the three reference images."""
    return torch.from_numpy(golden.openvla["pixel_values"])


@pytest.fixture(scope="session")
def openvla(golden):
    """The reference OpenVLA with its value head."""
    from rlinf_plugins.models.openvla import ActionSpec, load_policy

    policy = load_policy(golden.folder / "tiny-openvla", spec=ActionSpec(value_head="chunk"))
    _load_value_head(policy, golden.folder / "value_head_openvla.safetensors")
    return policy


@pytest.fixture(scope="session")
def oft_policy(golden):
    """Function from specification changes to the reference OFT policy; each is loaded once."""
    from rlinf_plugins.models.openvla import ActionSpec, load_policy

    loaded = {}

    def build(**changes):
        key = tuple(sorted(changes.items()))
        if key not in loaded:
            spec = ActionSpec(**{"decoding": "parallel", "chunk": 8} | changes)
            loaded[key] = load_policy(golden.folder / "tiny-openvla-oft", spec=spec)
            if spec.value_head == "action":
                _load_value_head(loaded[key], golden.folder / "value_head_oft.safetensors")
        return loaded[key]

    return build


def _load_value_head(policy, file) -> None:
    from safetensors.torch import load_file

    policy.value_head.load_state_dict(load_file(file))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Function from variant and specification changes to a tiny checkpoint's folder; each is made once."""
    from rlinf_plugins.models.openvla import ActionSpec, TinySizes, make_tiny_checkpoint

    made = {}

    def build(variant="openvla", **changes):
        key = (variant, *sorted(changes.items()))
        if key not in made:
            base = {"dim": 3} if variant == "openvla" else {"decoding": "parallel", "chunk": 2, "dim": 3}
            folder = tmp_path_factory.mktemp(variant)
            made[key] = make_tiny_checkpoint(
                folder, variant=variant, seed=3, sizes=TinySizes(patch_size=56), spec=ActionSpec(**base | changes)
            )
        return made[key]

    return build


@pytest.fixture(scope="session")
def observe():
    """Function from a folder to a processor's inputs for prompts of different lengths, with the processor."""
    from rlinf_plugins.models.openvla import OpenVLAProcessor

    tasks = ["push the cube to the goal", "pick up the red mug and put it on the wooden table", "lift it", "open"]

    def build(folder, batch=4, **kwargs):
        processor = OpenVLAProcessor.from_folder(folder, unnorm_key="tiny", **kwargs)
        rng = np.random.default_rng(11)
        frames = [
            [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(processor.spec.num_images)]
            for _ in range(batch)
        ]
        states = rng.uniform(-1, 1, (batch, processor.spec.proprio_dim)) if processor.spec.proprio_dim else None
        return processor(tasks[:batch], frames, states), processor

    return build
