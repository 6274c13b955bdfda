import pytest
from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.trainer.barriers import streaming_of, whole_batch_reasons


def job(*dotted, **critic):
    config = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
            "critic": {"enable": False, "strategy": "fsdp2", "loss_agg_mode": "token-mean"} | critic,
            "actor_rollout_ref": {"actor": {"strategy": "fsdp2", "loss_agg_mode": "token-mean", "shuffle": False}},
            "reward": {"reward_model": {"enable": False}},
            "trainer": {"v1": {"sampler": {"custom_sampler": {"path": None}}}},
        }
    )
    return OmegaConf.merge(config, OmegaConf.from_dotlist(list(dotted)))


ACTOR = "actor_rollout_ref.actor."


@pytest.mark.parametrize(
    ("changes", "actor"),
    [
        ([], "tokens"),
        ([ACTOR + "loss_agg_mode=seq-mean-token-mean"], "rows"),
        ([ACTOR + "loss_agg_mode=token-sum"], "none"),
        ([ACTOR + "loss_agg_mode=seq-mean-token-sum-norm", ACTOR + "loss_scale_factor=512"], "rows"),
        ([ACTOR + "policy_loss.loss_mode=gspo"], "tokens"),
        (["algorithm.adv_estimator=rloo"], "tokens"),
    ],
)
def test_what_streams(changes, actor):
    found = streaming_of(job(*changes))
    assert (found.actor, found.critic, found.reasons) == (actor, None, ())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (["algorithm.adv_estimator=reinforce_plus_plus"], "reinforce_plus_plus"),
        (["algorithm.adv_estimator=somebodys_own"], "somebodys_own"),
        ([ACTOR + "policy_loss.loss_mode=clip_cov"], "clip_cov"),
        ([ACTOR + "policy_loss.loss_mode=sapo"], "sapo"),
        ([ACTOR + "strategy=megatron"], "megatron"),
        ([ACTOR + "shuffle=true"], "shuffle"),
        (["algorithm.rollout_correction.rollout_is_batch_normalize=true"], "batch_normalize"),
        (["algorithm.rollout_correction.rollout_rs=seq_mean_k1"], "rollout_rs"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"], "adaptive"),
    ],
)
def test_what_waits_says_why(changes, word):
    found = streaming_of(job(*changes))
    assert found.actor is None
    assert len(found.reasons) == 1
    assert word in found.reasons[0]


def test_with_a_critic_the_critic_streams_and_the_actor_waits():
    found = streaming_of(job("algorithm.adv_estimator=gae", enable=True))
    assert (found.actor, found.critic) == (None, "tokens")
    assert len(found.reasons) == 1


def test_a_loss_that_divides_by_the_padded_width_is_refused():
    with pytest.raises(ConfigError, match="loss_scale_factor"):
        streaming_of(job(ACTOR + "loss_agg_mode=seq-mean-token-sum-norm"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("algorithm.filter_groups.enable=true", "filter_groups"),
        ("trainer.v1.sampler.sync_refill_failed_groups=true", "refill"),
        ("trainer.v1.sampler.custom_sampler.path=mine.py", "custom_sampler"),
        ("reward.reward_model.enable=true", "reward model"),
    ],
)
def test_what_needs_the_whole_batch_first(change, word):
    assert whole_batch_reasons(job()) == []
    (reason,) = whole_batch_reasons(job(change))
    assert word in reason
