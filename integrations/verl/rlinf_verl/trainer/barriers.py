"""What of a step may run on a part of the batch: a table of estimators and losses, and the choice for a job.

Streaming must not change the algorithm. An advantage estimator may need nothing beyond a prompt's group, or statistics
of the whole batch; a policy loss may weigh each row by itself, or compare rows within a micro-batch. What is not listed
here runs on the whole batch.
"""

from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from rlinf_plugins.core.errors import ConfigError

Denominator = Literal["tokens", "rows", "none"]

GROUP_ESTIMATORS = frozenset({"grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized", "opo"})
"""Estimators whose advantages depend on a prompt's own group only (read in verl/trainer/ppo/core_algos.py)."""

ROW_LOSSES = frozenset({"vanilla", "dppo_tv", "dppo_kl", "gspo", "gpg", "cispo", "dro", "sapo"})
"""Policy losses that treat each row on its own; the others take statistics of a micro-batch."""

PROVEN_ENGINES = frozenset({"fsdp2"})
"""Engines whose streamed step has a parity test."""

DENOMINATORS: dict[str, Denominator] = {
    "token-mean": "tokens",
    "token-sum": "none",
    "seq-mean-token-sum": "rows",
    "seq-mean-token-mean": "rows",
    "seq-mean-token-sum-norm": "rows",
}
"""veRL's ``loss_agg_mode`` -> what the loss is divided by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """What of a step is streamed.

    Attributes:
        actor: Denominator of the actor's loss; None: its update waits for the whole batch.
        critic: Same for the critic; None also where there is none.
        reasons: For each part that waits, why.
    """

    actor: Denominator | None
    critic: Denominator | None
    reasons: tuple[str, ...]


def streaming_of(config: DictConfig) -> Streaming:
    """Return what of a job's step may be streamed.

    Args:
        config: veRL's whole configuration.

    Raises:
        ConfigError: A loss that no partial batch can reproduce.
    """
    shared = _shared_reasons(config)
    enabled = OmegaConf.select(config, "critic.enable")
    critic_on = _estimator(config) == "gae" if enabled is None else bool(enabled)
    actor = shared + _actor_reasons(config)
    critic = shared + _critic_reasons(config) if critic_on else []
    reasons = [f"the actor's update waits for the whole batch: {reason}" for reason in actor]
    reasons += [f"the critic's update waits for the whole batch: {reason}" for reason in critic]
    return Streaming(
        actor=None if actor else _denominator(config.actor_rollout_ref.actor, "actor_rollout_ref.actor"),
        critic=_denominator(config.critic, "critic") if critic_on and not critic else None,
        reasons=tuple(reasons),
    )


def whole_batch_reasons(config: DictConfig) -> list[str]:
    """Return why no stage at all may start before the whole batch is there; empty where streaming is possible."""
    reasons = []
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        reasons.append("algorithm.filter_groups may yet replace a group, and with it which prompts make the batch")
    if OmegaConf.select(config, "trainer.v1.sampler.sync_refill_failed_groups"):
        reasons.append("trainer.v1.sampler.sync_refill_failed_groups may yet replace a group")
    if OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path"):
        reasons.append("trainer.v1.sampler.custom_sampler samples the whole batch")
    reward = OmegaConf.select(config, "reward.reward_model")
    if reward is not None and reward.get("enable") and not reward.get("enable_resource_pool"):
        reasons.append("the reward model shares the trainer's devices and scores the whole batch")
    if OmegaConf.select(config, "distillation.enabled"):
        reasons.append("distillation needs the teacher's outputs of the whole batch")
    return reasons


def _shared_reasons(config: DictConfig) -> list[str]:
    algorithm, reasons = config.algorithm, []
    if algorithm.get("use_kl_in_reward") and OmegaConf.select(algorithm, "kl_ctrl.type") == "adaptive":
        reasons.append("algorithm.kl_ctrl.type=adaptive adapts to the batch's mean divergence")
    if _corrects_rollout(config):
        correction = algorithm.rollout_correction
        if correction.get("rollout_is_batch_normalize"):
            reasons.append("rollout_correction.rollout_is_batch_normalize divides by the batch's mean weight")
        if correction.get("rollout_rs"):
            reasons.append("rollout_correction.rollout_rs rejects rows of the whole batch")
    return reasons


def _actor_reasons(config: DictConfig) -> list[str]:
    actor, reasons = config.actor_rollout_ref.actor, []
    estimator = _estimator(config)
    if estimator not in GROUP_ESTIMATORS:
        reasons.append(f"algorithm.adv_estimator={estimator} is not known to need a prompt's group only")
    loss = str(OmegaConf.select(actor, "policy_loss.loss_mode") or "vanilla")
    if loss not in ROW_LOSSES:
        reasons.append(f"policy_loss.loss_mode={loss} is not known to treat each row on its own")
    if loss == "sapo" and not str(actor.loss_agg_mode).startswith("seq-mean"):
        reasons.append(f"policy_loss.loss_mode=sapo divides by rows, loss_agg_mode={actor.loss_agg_mode} does not")
    return reasons + _update_reasons(actor, "actor")


def _critic_reasons(config: DictConfig) -> list[str]:
    reasons = _update_reasons(config.critic, "critic")
    if _estimator(config) != "gae":
        reasons.append(f"the returns of algorithm.adv_estimator={_estimator(config)} are not known to be row by row")
    return reasons


def _update_reasons(part: DictConfig, name: str) -> list[str]:
    reasons = []
    if part.strategy not in PROVEN_ENGINES:
        known = ", ".join(sorted(PROVEN_ENGINES))
        reasons.append(f"{name}.strategy={part.strategy} has no parity test yet ({known} has)")
    if part.get("shuffle"):
        reasons.append(f"{name}.shuffle draws mini-batches from the whole batch")
    if str(OmegaConf.select(part, "fsdp_config.dtype")) in ("fp16", "float16"):
        reasons.append(f"{name}.fsdp_config.dtype=float16 scales the loss, and sums may overflow")
    return reasons


def _denominator(part: DictConfig, name: str) -> Denominator:
    mode = str(part.loss_agg_mode)
    if mode == "seq-mean-token-sum-norm" and part.get("loss_scale_factor") is None:
        raise ConfigError(
            f"{name}.loss_agg_mode={mode} without loss_scale_factor divides by the width the batch happens to be "
            f"padded to, which no part of it knows; set {name}.loss_scale_factor (e.g. data.max_response_length), or "
            "trainer.v1.m2flow.mode=temporal with granularity=0"
        )
    if mode not in DENOMINATORS:
        raise ConfigError(f"{name}.loss_agg_mode={mode} is unknown; known: {', '.join(DENOMINATORS)}")
    return DENOMINATORS[mode]


def _estimator(config: DictConfig) -> str:
    return str(config.algorithm.adv_estimator)


def _corrects_rollout(config: DictConfig) -> bool:
    correction: Any = config.algorithm.get("rollout_correction")
    return bool(correction) and not correction.get("bypass_mode")
