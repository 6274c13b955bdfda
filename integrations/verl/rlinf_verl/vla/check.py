"""What of an embodied job can be refused before Ray starts: does the checkpoint fit the settings?"""

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.models.openvla import ActionSpec, OpenVLAProcessor
from rlinf_verl.rollout.options import options
from rlinf_verl.vla.loop_config import WHERE, EmbodiedConfig, embodied_config
from rlinf_verl.vla.loss_gae import ESTIMATOR
from rlinf_verl.vla.loss_level import level_of
from rlinf_verl.vla.loss_value import value_options
from rlinf_verl.vla.rollout_options import NAME, VLAOptions


def check_policy(config: DictConfig) -> None:
    """Check the options of policy server and losses, and the checkpoint's files around the weights against them.

    Args:
        config: veRL's whole configuration.

    Raises:
        ConfigError: An impossible option, PPO without a value head, or environments the policy cannot act in.
        MissingAssetError: The tokenizer is absent.
        CheckpointError: Statistics of another dimension, or unreadable ones.
        UnknownNameError: A data set the checkpoint has no statistics of; those present are listed.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    given = OmegaConf.to_container(model.override_config or OmegaConf.create())
    level_of(given)  # type: ignore[arg-type]
    value_options(given)  # type: ignore[arg-type]
    chosen: VLAOptions = options(rollout, NAME, VLAOptions)
    folder = Path(os.path.expanduser(str(model.path)))
    if not folder.is_dir():
        return  # on a remote storage: veRL fetches it
    spec = OpenVLAProcessor.from_folder(
        folder, unnorm_key=chosen.unnorm_key, statistics=chosen.statistics, extremes=chosen.extremes
    ).spec
    if config.algorithm.adv_estimator == ESTIMATOR and not spec.values:
        raise ConfigError(
            f"algorithm.adv_estimator={ESTIMATOR} needs a policy with a value head, and {folder / 'config.json'} has "
            'none; add "value_head": "chunk" (or "action") to its action_spec'
        )
    _check_environments(embodied_config(config), spec)


def _check_environments(envs: EmbodiedConfig, spec: ActionSpec) -> None:
    if envs.cameras is not None and len(envs.cameras) != spec.num_images:
        raise ConfigError(
            f"{WHERE}.cameras={envs.cameras} are {len(envs.cameras)} images, the policy takes {spec.num_images}"
        )
    if (envs.proprio is None) == bool(spec.proprio_dim):
        wants = f"a state of {spec.proprio_dim} numbers" if spec.proprio_dim else "no state"
        raise ConfigError(f"{WHERE}.proprio={envs.proprio}, but the policy takes {wants}")
    if envs.execute is not None and envs.execute > spec.chunk:
        raise ConfigError(f"{WHERE}.execute={envs.execute} actions, but the policy predicts {spec.chunk} at once")
