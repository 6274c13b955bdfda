"""The check of ``trainer.v1.m2flow.mode`` before Ray starts: devices that exist, chunks that make a mini-batch."""

from omegaconf import DictConfig, OmegaConf, open_dict

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.config import NODE, M2FlowConfig

_TRANSPORT = "actor_rollout_ref.rollout.checkpoint_engine.backend"


def check_mode(config: DictConfig, options: M2FlowConfig) -> None:
    """Check the mode against devices and batch sizes, and choose the weight transport of virtual devices.

    Raises:
        ConfigError: Devices that do not exist, a chunk larger than a mini-batch, or replicas that cannot be reached.
    """
    mini = int(config.actor_rollout_ref.actor.ppo_mini_batch_size)
    if options.granularity > mini:
        raise ConfigError(
            f"{NODE}.granularity={options.granularity} prompts cannot form a mini-batch of "
            f"actor.ppo_mini_batch_size={mini}: a chunk never spans two; set it to at most {mini}"
        )
    if options.mode == "temporal":
        return
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    asked, own = trainer.nnodes * trainer.n_gpus_per_node, rollout.nnodes * rollout.n_gpus_per_node
    if not own:
        raise ConfigError(
            f"{NODE}.mode={options.mode} gives rollout devices of its own, but none are set; set "
            "actor_rollout_ref.rollout.nnodes and actor_rollout_ref.rollout.n_gpus_per_node"
        )
    count = options.virtual_devices.count
    if count and asked + own > count:
        raise ConfigError(
            f"{NODE}.mode={options.mode} needs {asked} device(s) for training and {own} for rollout, but "
            f"{NODE}.virtual_devices.count is {count}; lower trainer.n_gpus_per_node or rollout.n_gpus_per_node, or "
            "raise the count"
        )
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    if own % replica:
        raise ConfigError(f"{own} rollout device(s) do not divide into replicas of {replica}")
    reward = OmegaConf.select(config, "reward.reward_model")
    if reward is not None and reward.get("enable") and not reward.get("enable_resource_pool"):
        raise ConfigError(
            f"{NODE}.mode={options.mode} cannot place a reward model on the trainer's devices; set "
            "reward.reward_model.enable_resource_pool=True and its n_gpus_per_node"
        )
    if OmegaConf.select(config, _TRANSPORT) == "naive":
        if not count:
            raise ConfigError(
                f"{_TRANSPORT}=naive reaches replicas in the trainer's own processes only; under "
                f"{NODE}.mode={options.mode} set it to nccl, nixl, mooncake or gloo"
            )
        with open_dict(config):
            config.actor_rollout_ref.rollout.checkpoint_engine.backend = "gloo"
