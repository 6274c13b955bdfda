"""Registers the plugin's parts with veRL: what at once, what when which veRL module is imported."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from rlinf_plugins.core.errors import RlinfError
from rlinf_verl import handshake
from rlinf_verl.patches import PatchSpec, apply


def attach() -> None:
    """Attach to veRL in this process; called once, while ``import verl`` runs."""
    from rlinf_verl import hydra_groups
    from rlinf_verl.cpu import platform  # noqa: F401  registers the cpu platform

    hydra_groups.register()
    _on_import("verl.utils.config", _check_before_ray)
    _on_import("verl.utils.distributed", _patch_on_cpu("SINGLE_GLOO_BACKEND"))
    _on_import("verl.workers.engine.fsdp.transformer_impl", _patch_on_cpu("UNPINNED_OFFLOAD"))
    _on_import("verl.workers.engine.fsdp.transformer_impl", _register_cpu_engines)
    _on_import("verl.utils.model", _patch_on_cpu("VALUE_HEAD_ATTENTION"))
    _on_import("verl.workers.rollout.replica", _register_rollouts)
    _on_import("verl.checkpoint_engine.base", _register_weight_transport)
    _on_import("verl.experimental.agent_loop.agent_loop", _register_agent_loops)
    _on_import("verl.trainer.ppo.v1", _register_trainer)
    handshake.record_attached()


def _on_import(module: str, action: Callable[[ModuleType], None]) -> None:
    """Run ``action`` on ``module`` when it is imported, or now; a failure is recorded and breaks that import."""

    def hook(loaded: ModuleType) -> None:
        try:
            action(loaded)
        except Exception as error:
            handshake.record_failure(error)
            raise

    wrapt.register_post_import_hook(hook, module)


def _check_before_ray(module: ModuleType) -> None:
    """Run our checks inside veRL's own configuration check; without our flags it behaves as before."""
    original = module.validate_config

    @functools.wraps(original)
    def validate_config(*args: Any, **kwargs: Any) -> Any:
        from rlinf_verl import preflight

        try:
            preflight.run(kwargs["config"] if "config" in kwargs else args[0])
        except RlinfError as error:
            sys.exit(f"{type(error).__name__}: {error}")  # a mistake of the user's: the message, without our frames
        return original(*args, **kwargs)

    module.validate_config = validate_config  # type: ignore[attr-defined]


def _patch_on_cpu(name: str) -> Callable[[ModuleType], None]:
    def action(_: ModuleType) -> None:
        from verl.utils.device import get_device_name

        if get_device_name() == "cpu":
            from rlinf_verl.cpu import patches

            spec: PatchSpec = getattr(patches, name)
            apply(spec)

    return action


def _register_cpu_engines(module: ModuleType) -> None:
    from verl.workers.engine.base import EngineRegistry

    for model_type, engine in (
        ("language_model", module.FSDPEngineWithLMHead),
        ("value_model", module.FSDPEngineWithValueHead),
    ):
        EngineRegistry.register(model_type=model_type, backend="fsdp2", device="cpu")(engine)


def _register_rollouts(_: ModuleType) -> None:
    from rlinf_verl.rollout import register

    own, policy = "rlinf_verl.rollout.replica", "rlinf_verl.vla.rollout_server"
    register("hf", replica=f"{own}.InProcessReplica", adapter=f"{own}.InProcessAdapter")
    # Here, as a worker that only receives weights does not import model.external_lib.
    register("openvla", replica=f"{policy}.VLAReplica", adapter=f"{policy}.VLAAdapter")


def _register_weight_transport(module: ModuleType) -> None:
    from rlinf_verl.trainer.gloo_weights import BACKEND, GlooCheckpointEngine

    module.CheckpointEngineRegistry.register(BACKEND)(GlooCheckpointEngine)


def _register_agent_loops(module: ModuleType) -> None:
    from rlinf_verl import search

    search.register_agent_loop(module)


def _register_trainer(_: ModuleType) -> None:
    from rlinf_verl.trainer import m2flow  # noqa: F401  registers itself under its name
