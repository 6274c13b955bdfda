"""The OpenVLA recipes compose with veRL's configuration, pass our checks, and hold the published hyper-parameters."""

import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import UnknownNameError
from rlinf_verl.modes import check_mode
from rlinf_verl.preflight import check_model, check_sizes
from rlinf_verl.vla import smoke
from rlinf_verl.vla.check import check_policy
from rlinf_verl.vla.loop_config import embodied_config
from rlinf_verl.vla.loss_level import level_of
from rlinf_verl.vla.loss_value import value_options

PUBLISHED = [
    "openvla_maniskill_ppo",
    "openvla_maniskill_grpo",
    "openvla_oft_libero_grpo",
    "openvla_oft_libero_grpo_rlinf",
]


@pytest.fixture(scope="module")
def compose():
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    from rlinf_verl import hydra_groups
    from rlinf_verl.config import m2flow_config

    hydra_groups.register()

    def run(recipe, *overrides):
        with initialize_config_module("verl.trainer.config", version_base=None):
            command = [f"+recipe={recipe}", "trainer.v1.trainer_mode=m2flow", *overrides]
            config = hydra_compose("ppo_trainer", command)
        return config, embodied_config(config), m2flow_config(config)

    return run


@pytest.mark.parametrize("recipe", [*PUBLISHED, *smoke.SPECS])
def test_a_recipe_composes_and_passes_the_checks(compose, recipe):
    config, envs, options = compose(recipe)
    check_sizes(config, options)
    envs.make_factory()
    model = config.actor_rollout_ref.model
    assert model.model_type == config.actor_rollout_ref.rollout.name == "openvla"
    assert not config.critic.enable
    assert config.actor_rollout_ref.rollout.calculate_log_probs
    assert (recipe in smoke.SPECS) == recipe.endswith("_tiny") == bool(options.virtual_devices.count)
    if config.algorithm.adv_estimator == "episode_gae":
        assert config.actor_rollout_ref.rollout.n == 1


@pytest.mark.parametrize("recipe", smoke.SPECS)
def test_a_smoke_run_passes_preflight_with_the_checkpoint_it_makes(compose, recipe, tmp_path):
    smoke.make_checkpoint(recipe, tmp_path)
    config, _, options = compose(recipe, f"actor_rollout_ref.model.path={tmp_path}")
    check_model(config)
    check_policy(config)
    check_mode(config, options)


def actor(config):
    part = config.actor_rollout_ref.actor
    return part.clip_ratio_low, part.clip_ratio_high, part.grad_clip, part.optim.lr


def test_rlinfs_ppo(compose):
    config, envs, _ = compose("openvla_maniskill_ppo")
    override = OmegaConf.to_container(config.actor_rollout_ref.model.override_config)
    assert actor(config) == (0.2, 0.2, 10.0, 1e-4)
    value = value_options(override)
    assert (value.value_lr, value.value_clip, value.value_huber, value.value_bootstrap) == (3e-3, 0.2, 10.0, "always")
    assert level_of(override) == "action"
    assert (config.algorithm.gamma, config.algorithm.lam) == (0.99, 0.95)
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    assert (model.lora_rank, model.lora_alpha) == (32, 32)
    assert (envs.num_envs, rollout.n, rollout.temperature, rollout.top_k) == (128, 1, 1.0, 0)
    assert (envs.pool.episode.max_steps, rollout.val_kwargs.temperature) == (80, 0.6)
    assert (envs.gripper, envs.pool.reward.mode, envs.pool.reward.relative) == ("widowx", "shaped", True)


def test_rlinfs_grpo(compose):
    config, envs, _ = compose("openvla_maniskill_grpo")
    assert actor(config) == (0.2, 0.28, 1.0, 1e-5)
    rollout = config.actor_rollout_ref.rollout
    assert (envs.num_envs, rollout.n, rollout.temperature, rollout.top_k) == (256, 8, 1.0, 50)
    assert config.data.train_batch_size * rollout.n == 256
    assert level_of(config.actor_rollout_ref.model.override_config) == "token"
    assert config.actor_rollout_ref.model.lora_rank == 0
    assert (envs.pool.episode.max_steps, config.algorithm.adv_estimator) == (80, "grpo")


def test_simple_vla_rls_grpo(compose):
    config, envs, _ = compose("openvla_oft_libero_grpo")
    assert actor(config) == (0.2, 0.28, 1.0, 5e-6)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.n, config.data.train_batch_size, rollout.temperature) == (8, 64, 1.6)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size * rollout.n == 128
    assert (config.algorithm.filter_groups.enable, config.algorithm.filter_groups.metric) == (True, "acc")
    assert (envs.pool.reward.mode, envs.pool.reward.coefficient, envs.view) == ("sparse", 5.0, "libero")
    assert (envs.kwargs["max_episode_steps"], envs.kwargs["settle_steps"]) == (512, 10)
    assert level_of(config.actor_rollout_ref.model.override_config) == "token"
    assert (config.actor_rollout_ref.model.lora_rank, rollout.top_k, envs.gripper) == (0, 0, "libero")


def test_rlinfs_libero_grpo(compose):
    config, envs, _ = compose("openvla_oft_libero_grpo_rlinf")
    assert actor(config) == (0.2, 0.28, 1.0, 2e-5)
    assert (envs.num_envs, config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (64, 128, 8)
    assert (envs.keep_groups, config.algorithm.filter_groups.enable) == ([0.5, 4.5], False)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.temperature, envs.pool.reward.coefficient, envs.kwargs["max_episode_steps"]) == (1.6, 5.0, 512)
    assert rollout.engine_kwargs.openvla.statistics == "merge"


def test_a_mistyped_smoke_run_is_named(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'openvla_maniskill_ppo_tiny'"):
        smoke.run("openvla_maniskill_ppo_tinny", tmp_path)
