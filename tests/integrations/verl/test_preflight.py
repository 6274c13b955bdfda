import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError, MissingAssetError, RlinfError
from rlinf_verl import preflight
from rlinf_verl.config import M2FlowConfig, VirtualDevicesConfig


def job(**changes):
    config = OmegaConf.create(
        {
            "data": {"train_batch_size": 16},
            "trainer": {
                "n_gpus_per_node": 2,
                "nnodes": 1,
                "device": "cuda",
                "v1": {"trainer_mode": "m2flow", "m2flow": {"virtual_devices": {"count": 2}}},
            },
            "ray_kwargs": {"ray_init": {"num_cpus": None}},
            "actor_rollout_ref": {
                "model": {"path": "somebody/some-model"},
                "actor": {
                    "ppo_mini_batch_size": 8,
                    "ppo_micro_batch_size_per_gpu": 4,
                    "use_dynamic_bsz": False,
                },
                "rollout": {
                    "n": 4,
                    "log_prob_use_dynamic_bsz": False,
                    "log_prob_micro_batch_size_per_gpu": 8,
                    "tensor_model_parallel_size": 1,
                    "data_parallel_size": 1,
                    "agent": {"agent_loop_manager_class": None},
                },
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


OPTIONS = M2FlowConfig(virtual_devices=VirtualDevicesConfig(count=2))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"trainer__n_gpus_per_node": 3}, ["n_gpus_per_node=3", "count is 2"]),
        ({"trainer__nnodes": 2}, ["one machine", "nnodes=2"]),
        ({"data__train_batch_size": 12}, ["train_batch_size=12", "ppo_mini_batch_size=8", "fits is 6"]),
        ({"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 5}, ["32 rows", "=5", "micro-batch of 4 fits"]),
        (
            {"actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 24},
            ["64 rows", "log_prob_micro_batch_size_per_gpu=24", "micro-batch of 16 fits"],
        ),
        ({"actor_rollout_ref__rollout__tensor_model_parallel_size": 4}, ["2 devices", "replicas of 4"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_arithmetic(changes, parts):
    with pytest.raises(ConfigError) as caught:
        preflight.check_sizes(job(**changes), OPTIONS)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("key", [*preflight._SIZES, *preflight._SIZES_OR_NONE])
@pytest.mark.parametrize("value", ["banana", 0, -2, 1.5, True])
def test_sizes_that_are_no_whole_numbers_are_refused(key, value):
    with pytest.raises(ConfigError, match=f"{key} must be a positive whole number, got {value!r}"):
        preflight.check_sizes(job(**{key.replace(".", "__"): value}), OPTIONS)


@pytest.mark.parametrize("key", preflight._SIZES_OR_NONE)
def test_a_micro_batch_may_be_left_to_verl(key):
    preflight.check_sizes(job(**{key.replace(".", "__"): None}), OPTIONS)


def test_sizes_that_fit_pass():
    preflight.check_sizes(job(), OPTIONS)


@pytest.mark.parametrize("micro", [1, 4, 10])
def test_rows_that_do_not_divide_over_the_devices_are_no_fault_of_the_micro_batch(micro):
    changes = {"trainer__n_gpus_per_node": 3, "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": micro}
    options = M2FlowConfig(virtual_devices=VirtualDevicesConfig(count=3))
    with pytest.raises(ConfigError, match=r"32 rows do not divide over 3 devices; train on 1, 2 or make"):
        preflight.check_sizes(job(**changes), options)


@pytest.mark.parametrize("key", ["train_files", "val_files"])
@pytest.mark.parametrize("as_list", [False, True])
def test_missing_data_is_named(tmp_path, key, as_list):
    there, absent = tmp_path / "there.parquet", tmp_path / "absent.parquet"
    there.touch()
    files = {"data__train_files": str(there), "data__val_files": "hdfs://far/away.parquet"}
    preflight.check_data(job(**files))
    files[f"data__{key}"] = [str(there), str(absent)] if as_list else str(absent)
    with pytest.raises(MissingAssetError, match=rf"data\.{key}={absent} does not exist"):
        preflight.check_data(job(**files))
    preflight.check_data(job(**files, data__custom_cls__path="pkg://somebody.dataset"))  # reads what it likes


@pytest.mark.parametrize("leftover", [{"recipe": "text_grpo_tiny"}, {}])
def test_our_options_without_our_mode_are_refused(leftover):
    config = job(**leftover)
    config.trainer.v1.trainer_mode = "sync"
    with pytest.raises(ConfigError, match="trainer_mode=m2flow"):
        preflight.run(config)


def test_without_our_flags_nothing_is_touched():
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "sync"}}})
    before = OmegaConf.to_container(config)
    preflight.run(config)
    assert OmegaConf.to_container(config) == before


class BlindFactory:
    """A simulator that finds no display driver."""

    def __init__(self, task: str) -> None:
        self.task = task

    def check(self) -> None:
        raise MissingAssetError(f"no Vulkan driver for {self.task}")


@pytest.fixture
def embodied(monkeypatch):
    import sys
    import types

    module = types.ModuleType("blind_simulator")
    module.Factory = BlindFactory
    monkeypatch.setitem(sys.modules, "blind_simulator", module)
    return lambda **envs: job(
        trainer__v1__m2flow__envs={"factory": "blind_simulator:Factory", "kwargs": {"task": "x"}, **envs}
    )


def test_a_simulator_that_cannot_run_is_refused(embodied):
    with pytest.raises(MissingAssetError, match="no Vulkan driver for x"):
        preflight.check_environments(embodied())


@pytest.mark.parametrize(
    ("envs", "parts"),
    [
        ({"num_env": 4}, ["envs.num_env", "did you mean 'num_envs'"]),
        ({"kwargs": {"tusk": 1}}, ["kwargs do not fit", "tusk"]),
        ({"factory": "nowhere:Factory"}, ["nowhere", "cannot be imported"]),
        ({"workers": 9}, ["workers", "num_envs=4", "9"]),
    ],
)
def test_options_of_an_embodied_job_are_checked(embodied, envs, parts):
    with pytest.raises(RlinfError) as caught:
        preflight.check_environments(embodied(**envs))
    for part in parts:
        assert part in str(caught.value)


def test_virtual_devices_refuse_a_running_ray(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:6379.*unset it"):
        preflight.use_virtual_devices(job(), OPTIONS)
