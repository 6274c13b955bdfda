"""The recipes compose with veRL's configuration and pass our own check of the search options."""

import pytest

pytest.importorskip("verl")

from rlinf_verl.search.config import search_options


def compose(recipe, *overrides):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    from rlinf_verl import hydra_groups

    hydra_groups.register()
    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", [f"+recipe={recipe}", "trainer.v1.trainer_mode=m2flow", *overrides])


@pytest.mark.parametrize("recipe", ["search_r1_grpo", "search_r1_ppo", "search_r1_grpo_tiny"])
def test_a_recipe_composes(recipe):
    config = compose(recipe)
    options = search_options(config)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.agent.default_agent_loop == "search_r1"
    turns = (options.max_turns + 1) * options.turn_tokens + options.max_turns * options.observation_tokens
    assert config.data.max_response_length <= turns
    assert rollout.calculate_log_probs


def test_the_published_hyper_parameters():
    grpo, ppo = compose("search_r1_grpo"), compose("search_r1_ppo")
    actor = grpo.actor_rollout_ref.actor
    assert (grpo.data.train_batch_size, actor.ppo_mini_batch_size) == (512, 256)
    assert (actor.optim.lr, actor.optim.lr_warmup_steps_ratio) == (1e-6, 0.285)
    assert (actor.use_kl_loss, actor.kl_loss_type, actor.kl_loss_coef) == (True, "low_var_kl", 0.001)
    assert (grpo.actor_rollout_ref.rollout.n, grpo.actor_rollout_ref.rollout.temperature) == (5, 1.0)
    options = search_options(grpo)
    assert (options.max_turns, options.topk, options.turn_tokens, options.observation_tokens) == (4, 3, 500, 500)
    assert (ppo.algorithm.adv_estimator, ppo.critic.optim.lr, ppo.actor_rollout_ref.rollout.n) == ("gae", 1e-5, 1)
    assert grpo.actor_rollout_ref.rollout.name == ppo.actor_rollout_ref.rollout.name == "sglang"


def test_a_mistyped_option_is_named():
    from rlinf_plugins.core.errors import ConfigError

    with pytest.raises(ConfigError, match="did you mean 'topk'"):
        search_options(compose("search_r1_grpo", "+trainer.v1.m2flow.search.topkk=3"))


@pytest.mark.parametrize(("bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_tiny_recipe_computes_in_what_the_processor_is_fast_at(monkeypatch, bf16, dtype):
    monkeypatch.setattr("rlinf_verl.hydra_groups.has_bf16", lambda: bf16)
    actor_rollout = compose("search_r1_grpo_tiny").actor_rollout_ref
    assert actor_rollout.rollout.dtype == actor_rollout.actor.fsdp_config.mixed_precision.param_dtype == dtype
