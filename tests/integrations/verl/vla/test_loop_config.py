import dataclasses

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError, UnknownNameError
from rlinf_plugins.envs import EnvSpec
from rlinf_verl.vla.dataset import EpisodeDataset, check_episodes
from rlinf_verl.vla.loop_config import EmbodiedConfig, embodied_config


def config_of(**envs):
    return OmegaConf.create({"trainer": {"v1": {"m2flow": {"envs": envs}}}})


TOY = "rlinf_plugins.testing.envs:ToyFactory"


def test_options_reach_the_pool():
    options = embodied_config(
        config_of(factory=TOY, kwargs={"image": 8}, num_envs=5, workers=2, pool={"episode": {"max_steps": 9}})
    )
    assert options.make_factory().image == 8
    assert [options.share(i) for i in range(2)] == [3, 2]
    assert options.pool.episode.max_steps == 9


@pytest.mark.parametrize(
    ("envs", "says"),
    [
        ({"factory": TOY, "num_env": 2}, "did you mean 'num_envs'"),
        ({"factory": TOY, "pool": {"episode": {"max_step": 2}}}, "did you mean 'max_steps'"),
        ({"factory": "toy"}, "module:name"),
        ({"factory": TOY, "num_envs": 1, "workers": 2}, "between 1 and num_envs=1"),
        ({"factory": TOY, "gripper": "x"}, "gripper"),
        ({}, "factory"),
    ],
)
def test_mistakes_are_named(envs, says):
    with pytest.raises(ConfigError, match=says):
        embodied_config(config_of(**envs))


def test_a_factory_that_does_not_exist_or_fit_is_named():
    with pytest.raises(UnknownNameError, match="NoFactory"):
        EmbodiedConfig(factory="rlinf_plugins.testing.envs:NoFactory").make_factory()
    with pytest.raises(ConfigError, match="imagine"):
        EmbodiedConfig(factory=TOY, kwargs={"imagine": 1}).make_factory()


def test_the_dataset_names_task_and_initial_state():
    data = EpisodeDataset({"tasks": [0, 2], "trials": 2, "first_trial": 10}, None, OmegaConf.create({}))
    assert [(data[i]["task"], data[i]["trial"]) for i in range(len(data))] == [(0, 10), (2, 10), (0, 11), (2, 11)]
    assert len(EpisodeDataset(OmegaConf.create({"trials": 9}), None, OmegaConf.create({}), max_samples=4)) == 4


@pytest.mark.parametrize("files", ["~/data/train.parquet", {"trials": 0}, {"trial": 3}])
def test_the_dataset_refuses_what_is_no_set_of_episodes(files):
    with pytest.raises(ConfigError):
        EpisodeDataset(files, None, OmegaConf.create({}))


def job(*, train, val=None, test_freq=-1):
    return OmegaConf.create(
        {
            "trainer": {"val_before_train": False, "test_freq": test_freq},
            "data": {"train_files": train, "val_files": val, "train_max_samples": -1, "val_max_samples": -1},
        }
    )


SPEC = EnvSpec(
    name="Toy", action_low=(-1.0,), action_high=(1.0,), observation={}, metrics=(), tasks=("stack", "pour"), trials=5
)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (job(train={"tasks": [0], "trials": 6}), r"data\.train_files=.*Toy has no initial state 5 of a task; it has 5"),
        (job(train={"tasks": [0, 2], "trials": 2}), r"data\.train_files=.*Toy has no task 2; it has 0: stack, 1: pour"),
        (job(train={"trials": 5}, val={"trials": 1, "first_trial": 64}, test_freq=5), r"data\.val_files=.*state 64"),
    ],
)
def test_initial_states_that_do_not_exist_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        check_episodes(config, SPEC)


def test_prompts_are_held_to_the_environments_only_where_they_are_used():
    check_episodes(job(train={"tasks": [0, 1], "trials": 5}, val={"trials": 1, "first_trial": 64}), SPEC)
    check_episodes(job(train="prompts.parquet", val="prompts.parquet", test_freq=5), SPEC)
    endless = dataclasses.replace(SPEC, trials=None)
    check_episodes(job(train={"trials": 10**6}), endless)
