import pytest
import torch
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError, MissingAssetError
from rlinf_verl.resume_files import check_resume


def job(folder, devices=2, **changes):
    trainer = {"n_gpus_per_node": devices, "nnodes": 1, "resume_mode": "auto", "default_local_dir": str(folder)}
    return OmegaConf.create({"trainer": {**trainer, **changes}})


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of two devices after steps 5, 10 and 20, as veRL writes them."""
    for step in (5, 10, 20):
        actor = tmp_path / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        for rank in (0, 1):
            for kind in ("model", "optim", "extra_state"):
                torch.save({"x": torch.zeros(64)}, actor / f"{kind}_world_size_2_rank_{rank}.pt")
        torch.save({}, actor.parent / "data.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    return tmp_path


def test_a_whole_checkpoint_passes(saved):
    check_resume(job(saved))
    check_resume(job(saved, resume_mode="resume_path", resume_from_path=str(saved / "global_step_5")))


def test_a_job_that_starts_anew_is_left_alone(tmp_path, saved):
    check_resume(job(tmp_path / "empty"))
    (saved / "global_step_20" / "data.pt").write_bytes(b"")
    check_resume(job(saved, resume_mode="disable"))


@pytest.mark.parametrize(
    "name", ["actor/model_world_size_2_rank_1.pt", "actor/optim_world_size_2_rank_0.pt", "data.pt"]
)
@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_file_is_named_with_the_way_on(saved, name, keep):
    file = saved / "global_step_20" / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=rf"{file} is truncated.*resume_from_path={saved / 'global_step_10'}$"):
        check_resume(job(saved))


def test_a_missing_shard_is_named(saved):
    (saved / "global_step_20" / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(MissingAssetError, match=r"lacks model_world_size_2_rank_1\.pt, or resume from another"):
        check_resume(job(saved))


def test_another_number_of_devices_is_refused(saved):
    with pytest.raises(ConfigError, match=r"was written by 2 device\(s\) and this job trains on 4"):
        check_resume(job(saved, devices=4))


def test_a_missing_folder_is_refused(saved, tmp_path):
    with pytest.raises(MissingAssetError, match="give a global_step_N folder"):
        check_resume(job(saved, resume_mode="resume_path", resume_from_path=str(saved / "global_step_7")))
    (saved / "latest_checkpointed_iteration.txt").write_text("30")
    with pytest.raises(MissingAssetError, match=rf"names step '30'.*{saved / 'global_step_20'}"):
        check_resume(job(saved))


def test_without_another_checkpoint_the_way_on_is_a_new_start(saved):
    for step in (5, 10):
        (saved / f"global_step_{step}").rename(saved / f"old_{step}")
    (saved / "global_step_20" / "data.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="or start anew with trainer.resume_mode=disable"):
        check_resume(job(saved))
