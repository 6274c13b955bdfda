"""Hydra presets: ``+recipe=NAME`` sets veRL's keys and ours; the options' defaults come with every recipe."""

from dataclasses import asdict
from importlib.resources import files

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from rlinf_plugins.core.cpu import has_bf16
from rlinf_verl.config import NODE, M2FlowConfig


def register() -> None:
    """Store the presets in Hydra's ConfigStore, which is on every search path.

    ``${rlinf.cpu_dtype:}`` in a preset is the type in which this machine's processor multiplies matrices fastest.
    """
    OmegaConf.register_new_resolver("rlinf.cpu_dtype", lambda: "bfloat16" if has_bf16() else "float32", replace=True)
    store = ConfigStore.instance()
    options = DictConfig(asdict(M2FlowConfig()), flags={"struct": False})
    # Not struct: an unknown option must reach our own check, which lists the valid ones.
    store.store(group="m2flow", name="default", node=options, package=NODE, provider="rlinf-plugins")
    for name in names():
        node = OmegaConf.create(files("rlinf_verl.recipes").joinpath(f"{name}.yaml").read_text())
        store.store(group="recipe", name=name, node=node, package="_global_", provider="rlinf-plugins")


def names() -> list[str]:
    """Return the names of the shipped recipes."""
    folder = files("rlinf_verl.recipes")
    return sorted(entry.name[: -len(".yaml")] for entry in folder.iterdir() if entry.name.endswith(".yaml"))
