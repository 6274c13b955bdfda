"""Search-R1 in veRL: agent loop, native tool, data and reward."""

from types import ModuleType

AGENT_LOOP = "search_r1"
"""Value of ``actor_rollout_ref.rollout.agent.default_agent_loop``, or of a row's ``agent_name``."""


def register_agent_loop(agent_loop: ModuleType) -> None:
    """Enter the loop's path into veRL's registry, given veRL's agent-loop module; imported on use."""
    agent_loop._agent_loop_registry[AGENT_LOOP] = {"_target_": "rlinf_verl.search.loop.SearchR1AgentLoop"}
