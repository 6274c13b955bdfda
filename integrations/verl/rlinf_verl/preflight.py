"""Everything that can be refused before Ray starts, checked in the driver on veRL's own configuration.

veRL's ``main`` calls ``validate_config`` between composing the configuration and starting Ray; the plugin wraps that
call (see ``plugin.py``) and runs :func:`run` first. Without our trainer mode nothing happens here, except that a
recipe of ours without the mode is refused: the recipe would otherwise train plain veRL.
"""

import os
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from rlinf_plugins.core.errors import ConfigError, MissingAssetError
from rlinf_verl import auto, handshake
from rlinf_verl.config import NODE, TRAINER_MODE, M2FlowConfig, is_requested, m2flow_config
from rlinf_verl.cpu.devices import DEVICES_ENV, VirtualDevices, listen_on_loopback
from rlinf_verl.model_files import check_model
from rlinf_verl.modes import check_mode
from rlinf_verl.profiles import open_profile
from rlinf_verl.resume_files import check_resume
from rlinf_verl.trainer.sharing_sizes import check_plan
from rlinf_verl.versions import check_host

MANAGER_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
DEFAULT_MANAGER = "rlinf_verl.trainer.agent_loop.ArrivalAgentLoopManager"


def run(config: DictConfig) -> None:
    """Check the job and complete veRL's configuration in place.

    Raises:
        PluginNotLoadedError: The plugin is broken in this process.
        UnsupportedVersionError: The host is not one the plugin was tested with.
        ConfigError: An option is unknown, of the wrong type, out of range or in conflict with another.
        MissingAssetError: The model's folder, one of its files, a data file or a checkpoint to resume from is absent.
    """
    ours = "recipe" in config or OmegaConf.select(config, NODE) is not None
    if not is_requested(config) and not ours:
        return
    if not is_requested(config) and not _mode_was_chosen():
        raise ConfigError(
            f"a recipe or {NODE} options are given, but not the trainer that reads them; add "
            f"trainer.v1.trainer_mode={TRAINER_MODE} (or name another of veRL's trainers explicitly)"
        )
    handshake.require()
    check_host()
    options = m2flow_config(config)
    check_model(config)
    check_data(config)
    if options.mode == "auto" and is_requested(config):
        auto.choose(config, options, check_runnable)
        options = m2flow_config(config)
    check_sizes(config, options)
    check_resume(config)
    if options.envs:
        check_environments(config)
        if config.actor_rollout_ref.model.get("model_type") == "openvla":
            from rlinf_verl.vla.check import check_policy

            check_policy(config)
    check_search(config)
    if options.virtual_devices.count:
        devices = use_virtual_devices(config, options)
        if is_requested(config):
            check_plan(config, options, devices.memory_bytes)
    if is_requested(config):
        check_mode(config, options)
        profile = open_profile(config, options)
        with open_dict(config):
            if profile is not None:  # the trainer may have another working directory
                OmegaConf.update(config, f"{NODE}.profile.path", str(profile.path.resolve()))
            agent = config.actor_rollout_ref.rollout.agent
            if agent.get("agent_loop_manager_class") is None:
                agent.agent_loop_manager_class = DEFAULT_MANAGER


def check_runnable(config: DictConfig) -> None:
    """Refuse a mode and device split that cannot run; ``auto`` passes over what this refuses.

    Raises:
        ConfigError: Sizes that do not divide, or devices that do not exist.
        ExceedsCapacityError: A stage that does not fit a virtual device.
    """
    options = m2flow_config(config)
    check_sizes(config, options)
    check_mode(config, options)
    if options.virtual_devices.count:
        check_plan(config, options, virtual_devices_of(options).memory_bytes)


def virtual_devices_of(options: M2FlowConfig) -> VirtualDevices:
    """Return the virtual devices this machine is divided into."""
    asked = options.virtual_devices
    return VirtualDevices.divide(asked.count, cores_per_device=asked.cores_per_device, memory_gb=asked.memory_gb)


def _mode_was_chosen() -> bool:
    """Whether the command line names a trainer, so that another one than ours is a choice and not an omission."""
    if not HydraConfig.initialized():
        return False
    return any(
        override.lstrip("+").startswith("trainer.v1.trainer_mode=") for override in HydraConfig.get().overrides.task
    )


def check_sizes(config: DictConfig, options: M2FlowConfig) -> None:
    """Check devices and batch sizes against each other.

    Raises:
        ConfigError: A size that is no positive whole number, more devices than exist, or a batch that does not divide;
            the message does the arithmetic.
    """
    _check_whole_numbers(config)
    trainer, actor, rollout = config.trainer, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    asked = trainer.n_gpus_per_node * trainer.nnodes
    if options.virtual_devices.count:
        if trainer.nnodes != 1:
            raise ConfigError(
                f"virtual devices exist on one machine only, got trainer.nnodes={trainer.nnodes}; set it to 1"
            )
        if asked > options.virtual_devices.count:
            raise ConfigError(
                f"trainer.n_gpus_per_node={asked} devices are asked for, but {NODE}.virtual_devices.count is "
                f"{options.virtual_devices.count}; lower the first or raise the second"
            )
    tensor_parallel = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if asked % tensor_parallel:
        raise ConfigError(
            f"{asked} devices do not divide into rollout replicas of {tensor_parallel} "
            "(tensor_model_parallel_size x data_parallel_size)"
        )
    batch, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    if batch % mini:
        raise ConfigError(
            f"data.train_batch_size={batch} is not a multiple of actor.ppo_mini_batch_size={mini} prompts; "
            f"the largest mini-batch that fits is {_largest_divisor(batch, mini)}"
        )
    _check_micro_batches(config, asked)


_SIZES = (
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
)
_SIZES_OR_NONE = (
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
)


def _check_whole_numbers(config: DictConfig) -> None:
    """Check the sizes that are counted with here."""
    for key in (*_SIZES, *_SIZES_OR_NONE):
        value = OmegaConf.select(config, key)
        if value is None and key in _SIZES_OR_NONE:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key} must be a positive whole number, got {value!r}")


def _check_micro_batches(config: DictConfig, devices: int) -> None:
    """Check the fixed micro-batches; veRL refuses a remainder only when the step is reached."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mini, whole = actor.ppo_mini_batch_size * rollout.n, config.data.train_batch_size * rollout.n
    sizes = [
        ("actor.ppo_micro_batch_size_per_gpu", actor.use_dynamic_bsz, mini, "actor.ppo_mini_batch_size"),
        ("rollout.log_prob_micro_batch_size_per_gpu", rollout.log_prob_use_dynamic_bsz, whole, "data.train_batch_size"),
    ]
    for key, dynamic, rows, source in sizes:
        micro = OmegaConf.select(config.actor_rollout_ref, key)
        if dynamic or micro is None:
            continue
        if rows % devices:
            fitting = ", ".join(str(d) for d in range(1, devices) if rows % d == 0)
            raise ConfigError(
                f"{source} x rollout.n = {rows} rows do not divide over {devices} devices; train on {fitting} or make "
                f"{source} x rollout.n a multiple of {devices}"
            )
        if rows % (micro * devices):
            raise ConfigError(
                f"{source} x rollout.n = {rows} rows do not divide into micro-batches of {key}={micro} on {devices} "
                f"device(s); a micro-batch of {_largest_divisor(rows // devices, micro)} fits"
            )


def check_data(config: DictConfig) -> None:
    """Check that data files on this machine exist; a dataset class of the user's own reads what it likes.

    Raises:
        MissingAssetError: A file is absent.
    """
    if OmegaConf.select(config, "data.custom_cls.path"):
        return
    for key in ("train_files", "val_files"):
        given = OmegaConf.select(config, f"data.{key}")
        for text in [given] if isinstance(given, str) else list(given or ()):
            if "://" not in str(text) and not Path(os.path.expanduser(str(text))).exists():
                raise MissingAssetError(f"data.{key}={text} does not exist (looked in {Path.cwd()})")


def check_environments(config: DictConfig) -> None:
    """Check the options of an embodied job, and that its simulator can run on this machine.

    Factories may define ``check()``, which refuses what would fail in every worker without starting the simulator.

    Raises:
        ConfigError: An option is unknown, of the wrong type or impossible.
        RlinfError: Whatever the factory refuses: a missing extra, no display driver.
    """
    from rlinf_verl.vla.loop_config import embodied_config

    factory = embodied_config(config).make_factory()
    check = getattr(factory, "check", None)
    if check is not None:
        check()


def check_search(config: DictConfig) -> None:
    """Check the options of a job whose trajectories search.

    Raises:
        ConfigError: An option is unknown, of the wrong type or impossible, or the turns do not fit the response.
        MissingAssetError: The corpus, or the tool's file, is absent.
    """
    from rlinf_verl.search import AGENT_LOOP, TOOL_AGENT_LOOP

    loop = OmegaConf.select(config, "actor_rollout_ref.rollout.agent.default_agent_loop")
    if loop in (AGENT_LOOP, TOOL_AGENT_LOOP) or OmegaConf.select(config, f"{NODE}.search"):
        from rlinf_verl.search import checks

        checks.check(config, loop)


def use_virtual_devices(config: DictConfig, options: M2FlowConfig) -> VirtualDevices:
    """Point veRL and Ray at virtual devices: platform, resources, loopback, environment of every worker.

    Returns:
        The devices.
    """
    from verl.plugin.platform import set_platform

    from rlinf_verl.cpu.platform import PlatformCPU

    if os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"virtual devices need a Ray of their own on this machine, but RAY_ADDRESS={os.environ['RAY_ADDRESS']} "
            "names a running one; unset it"
        )
    devices = virtual_devices_of(options)
    environment = {
        "VERL_PLATFORM": "cpu",
        DEVICES_ENV: devices.to_json(),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": str(min(len(cores) for cores in devices.cores)),
    }
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]  # Ray would hide the virtual devices behind an empty list
    os.environ.update(environment)
    listen_on_loopback()
    set_platform(PlatformCPU())
    with open_dict(config):
        config.trainer.device = "cpu"
        init = config.ray_kwargs.ray_init
        _default(init, "num_gpus", devices.count)
        _default(init, "num_cpus", 8 + 8 * devices.count)  # logical: placement bundles and helper actors ask for these
        _default(init, "include_dashboard", False)
        _default(init, "_node_ip_address", "127.0.0.1")
        env_vars = OmegaConf.select(init, "runtime_env.env_vars") or {}
        OmegaConf.update(init, "runtime_env.env_vars", {**environment, **env_vars}, force_add=True)
    return devices


def _default(node: DictConfig, key: str, value: Any) -> None:
    if node.get(key) is None:
        node[key] = value


def _largest_divisor(total: int, limit: int) -> int:
    return next(d for d in range(min(total, limit), 0, -1) if total % d == 0)
