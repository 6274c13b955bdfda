"""Search as a native veRL tool, for chat models that call tools (hermes style), and the loop that goes with it."""

import asyncio
from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.tools.results import Failure, FailureKind, Passage, Query
from rlinf_verl.search.actions import neutral
from rlinf_verl.search.clients import search_pool
from rlinf_verl.search.config import SearchR1Config

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find passages about one or more questions or topics.",
        "parameters": {
            "type": "object",
            "properties": {"query_list": {"type": "array", "description": "The queries, each a plain text."}},
            "required": ["query_list"],
        },
    },
}
_MAX_QUERIES = 8


class NativeSearchTool(BaseTool):  # type: ignore[misc]
    """Searches all queries of a call at once.

    Config keys: ``type: native``, ``search`` (options of :class:`~rlinf_verl.search.config.SearchR1Config`),
    ``max_chars`` (length of a response; default 2000).
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(_SCHEMA))
        self.options = from_mapping(SearchR1Config, config.get("search", {}), "tools.search")
        self.max_chars = int(config.get("max_chars", 2000))
        if self.max_chars < 100:
            raise ConfigError(f"tools.search.max_chars must be at least 100, got {self.max_chars}")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Search.

        What the model got wrong is told in the response. What the tool got wrong is not: the response is empty and
        ``agent_data.extra_fields["search_failure"]`` says why, for the loop to end and mask the trajectory.
        """
        queries = parameters.get("query_list")
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list) or not queries or not all(isinstance(q, str) for q in queries):
            return ToolResponse(text="query_list must be a list of one or more texts."), 0.0, {}
        queries = queries[:_MAX_QUERIES]
        pool = search_pool(self.options)
        outcomes = await asyncio.gather(
            *(pool.call(Query(q, self.options.topk), tenant="train", timeout_s=self.options.timeout_s) for q in queries)
        )
        failures = [o for o in outcomes if isinstance(o, Failure) and o.kind is not FailureKind.INVALID_REQUEST]
        if failures:
            agent_data = kwargs.get("agent_data")
            if agent_data is None or self.options.on_failure == "fail":
                failures[0].unwrap()
            else:
                agent_data.extra_fields["search_failure"] = failures[0].kind.value
            return ToolResponse(text=""), 0.0, {"search_failed": 1}
        found = [() if isinstance(o, Failure) else o.value for o in outcomes]
        text = fit(queries, found, self.max_chars)
        return ToolResponse(text=text), 0.0, {"search_calls": len(queries), "passages": sum(map(len, found))}


def fit(queries: Sequence[str], found: Sequence[Sequence[Passage]], max_chars: int) -> str:
    """Return the passages of all queries within ``max_chars``, whole ones only.

    Space is given by rank: the best passage of every query comes before the second of any. Only where not even one
    passage fits is it cut, at a word.
    """
    shown: list[list[str]] = [[] for _ in queries]
    heads = [f"Query: {neutral(query)[:100]}\n" for query in queries]
    left = max_chars - sum(map(len, heads))
    longest = max((len(passages) for passages in found), default=0)
    for rank in range(longest):
        for place, passages in enumerate(found):
            if rank < len(passages):
                passage = passages[rank]
                text = f'Doc {rank + 1}(Title: "{neutral(passage.title)}") {neutral(passage.text)}\n'
                if len(text) > left and not any(shown):
                    text = text[: max(left, 0)].rpartition(" ")[0] + "\n"
                if len(text) <= left:
                    shown[place].append(text)
                    left -= len(text)
    parts = [head + ("".join(texts) or "nothing found\n") for head, texts in zip(heads, shown, strict=True)]
    return "".join(parts).rstrip()[:max_chars]


@register("search_tool_agent")
class SearchToolAgentLoop(ToolAgentLoop):  # type: ignore[misc]
    """veRL's tool loop, which ends and masks a trajectory whose search failed instead of training on the failure."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # veRL cuts responses to 256 characters from the middle by default; the tool has fitted its own already.
        sizes = [tool.max_chars for tool in self.tools.values() if isinstance(tool, NativeSearchTool)]
        limit: int = self.rollout_config.multi_turn.max_tool_response_length
        self.max_tool_response_length = max([limit, *sizes])

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        state: AgentState = await super()._handle_processing_tools_state(agent_data)
        return AgentState.TERMINATED if agent_data.extra_fields.get("search_failure") else state

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run one trajectory; see veRL's ``ToolAgentLoop``."""
        output = await super().run(sampling_params, **kwargs)
        if output.extra_fields.get("search_failure"):
            output.response_mask = [0] * len(output.response_mask)
        output.extra_fields.setdefault("search_failure", "")
        return output
