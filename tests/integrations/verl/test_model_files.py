import json

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError, MissingAssetError
from rlinf_verl.model_files import check_model


def job(path):
    return OmegaConf.create({"actor_rollout_ref": {"model": {"path": str(path)}}})


@pytest.fixture
def model(tmp_path):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(4), "b": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_whole_model_passes(model):
    check_model(job(model))


def test_a_hub_name_is_left_to_verl(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    check_model(job("somebody/some-model"))


@pytest.mark.parametrize("path", ["nowhere/at/all", "./nowhere", "nowhere"])
def test_a_missing_model_is_named(path):
    with pytest.raises(MissingAssetError, match="is not a folder"):
        check_model(job(path))


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(MissingAssetError, match=r"no config\.json"):
        check_model(job(tmp_path))


def test_a_missing_shard_is_named(model):
    index = {"weight_map": {"a": "model.safetensors", "c": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MissingAssetError, match=r"absent: model-2\.safetensors"):
        check_model(job(model))


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_shard_is_named(model, keep):
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors is (truncated|corrupt)"):
        check_model(job(model))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_corrupt_configuration_is_named(model, text):
    (model / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json is corrupt"):
        check_model(job(model))


def test_a_mistyped_path_below_a_folder_is_no_hub_name(model, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(model.parent)
    with pytest.raises(MissingAssetError, match="is not a folder"):
        check_model(job(f"{model.name}/nope"))


def test_the_slash_that_shells_add_is_taken_off(model):
    config = job(f"{model}/")
    check_model(config)
    assert config.actor_rollout_ref.model.path == str(model)
