"""Every veRL symbol the integration uses, with the signature it was written against.

``SYMBOLS`` is the whole surface. A veRL that changes a signature fails here and says which; code that uses a symbol not
listed here fails too. ``python tests/contracts/test_verl_symbols.py`` prints the table anew.
"""

import ast
import importlib
import inspect
import json
import sys
from pathlib import Path

import pytest

from rlinf_verl import patches

ROOT = Path(__file__).parents[2] / "integrations" / "verl" / "rlinf_verl"
TABLE = Path(__file__).with_name("verl_symbols.json")

OVERRIDDEN = {
    # Methods we override or call on veRL's classes, and private attributes we rely on.
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._build_replay_buffer",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_resource_pool_mgr",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._resolve_filter_groups_metric",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._add_prompts_to_generate",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.fit",
    "verl.trainer.ppo.v1.trainer_base:TRAINER_REGISTRY",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.__init__",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.sample",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._select_prompt_uids",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._metrics_prefix",
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker.__init__",
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_actor_class__._run_prompt",
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences",
    "verl.workers.engine.base:EngineRegistry.register",
    "verl.workers.engine.base:EngineRegistry._engines",
    "verl.plugin.platform.platform_manager:PlatformRegistry.register",
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register",
    "verl.workers.rollout.replica:RolloutReplicaRegistry._registry",
    "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    "verl.utils.config:validate_config",
    "verl.utils.distributed:initialize_global_process_group_ray",
    "verl.workers.engine.fsdp.transformer_impl:CPUOffloadPolicy",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithValueHead",
}


def used() -> set[str]:
    """Symbols imported from veRL anywhere in the integration, plus what is overridden."""
    found = set(OVERRIDDEN)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "verl":
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return found


def describe(symbol: str) -> str:
    """Return the kind and signature of a symbol, or why it cannot be found."""
    module, _, path = symbol.partition(":")
    thing = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(thing, part) and inspect.ismodule(thing):
            thing = importlib.import_module(f"{thing.__name__}.{part}")
        else:
            thing = getattr(thing, part)
    thing = patches._originals.get(getattr(thing, "__rlinf_patch__", ""), thing)  # on the CPU platform some are patched
    thing = inspect.unwrap(thing) if inspect.isfunction(thing) else thing
    if inspect.isclass(thing):
        return f"class {inspect.signature(thing.__init__)}"
    if inspect.isroutine(thing):
        return f"function {inspect.signature(thing)}"
    return type(thing).__name__


def test_no_symbol_is_used_without_being_listed():
    listed = set(json.loads(TABLE.read_text()))
    assert used() - listed == set(), "add these by printing the table anew"
    assert listed - used() == set(), "no longer used: print the table anew"


@pytest.mark.slow
def test_every_symbol_is_as_it_was():
    changed = {}
    for symbol, expected in json.loads(TABLE.read_text()).items():
        try:
            actual = describe(symbol)
        except (ImportError, AttributeError) as error:
            actual = f"gone: {error}"
        if actual != expected:
            changed[symbol] = {"expected": expected, "actual": actual}
    assert changed == {}


if __name__ == "__main__":
    json.dump({symbol: describe(symbol) for symbol in sorted(used())}, sys.stdout, indent=1)
    sys.stdout.write("\n")
