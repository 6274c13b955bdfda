"""Search-R1 in veRL: agent loop, native tool, data and reward."""

from types import ModuleType

AGENT_LOOP = "search_r1"
"""Value of ``actor_rollout_ref.rollout.agent.default_agent_loop``, or of a row's ``agent_name``."""


TOOL_AGENT_LOOP = "search_tool_agent"
"""The same for chat models that call the native tool."""


def register_agent_loop(agent_loop: ModuleType) -> None:
    """Enter the loops' paths into veRL's registry, given veRL's agent-loop module; they are imported on use."""
    registry = agent_loop._agent_loop_registry
    registry[AGENT_LOOP] = {"_target_": "rlinf_verl.search.loop.SearchR1AgentLoop"}
    registry[TOOL_AGENT_LOOP] = {"_target_": "rlinf_verl.search.tool.SearchToolAgentLoop"}
