"""veRL's agent loop ``search_r1``: Search-R1's protocol on the tool pool, exact to the token."""

from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.rollout_trace import rollout_trace_op

from rlinf_plugins.tools.results import Outcome, Passages, Query
from rlinf_verl.search.clients import search_pool
from rlinf_verl.search.config import search_options
from rlinf_verl.search.engines import stop_mode, stop_params
from rlinf_verl.search.policy import End, Report, SearchPolicy
from rlinf_verl.search.tokens import TokenText
from rlinf_verl.search.trajectory import Trajectory

_completing_ids: "WeakKeyDictionary[Any, list[int]]" = WeakKeyDictionary()


@register("search_r1")
class SearchR1AgentLoop(AgentLoopBase):
    """Think, search, read, answer. Options: :class:`~rlinf_verl.search.config.SearchR1Config`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = search_options(self.config)
        engine = str(self.rollout_config.name)
        mode = stop_mode(self.options, self.rollout_config)
        text = TokenText(self.tokenizer)
        completing = self._completing(text) if mode == "ids" else []
        self.policy = SearchPolicy(
            self.options,
            text,
            response_length=self.rollout_config.response_length,
            stop=stop_params(mode, engine, completing),
            goes_on=completing,
        )

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """Run one trajectory.

        Args:
            sampling_params: veRL's, for the engine.
            priority: The sample's place in the batch.
            **kwargs: The row of the data set; ``raw_prompt`` holds its messages.

        Returns:
            Prompt and response tokens with mask and log-probs. ``extra_fields`` tells what happened, under names
            that begin with ``search_``.

        Raises:
            ToolCallError: A search failed and ``on_failure`` is ``"fail"``.
            TokenAlignmentError: The engine's tokens and log-probs do not line up.
        """
        deterministic = getattr(self.rollout_config, "full_determinism", False)
        request_id = f"det-{int(priority)}" if deterministic else uuid4().hex
        engine_fields: dict[str, Any] = {}
        metrics: dict[str, Any] = {"num_preempted": -1}

        async def sample(prompt_ids: list[int], stop: dict[str, Any]) -> Any:
            output = await self.server_manager.generate(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling_params={**sampling_params, **stop},
                priority=int(priority),
            )
            _merge(engine_fields, output.extra_fields)
            if output.num_preempted is not None:
                metrics["num_preempted"] = max(0, metrics["num_preempted"]) + output.num_preempted
            return output

        pool, tenant = search_pool(self.options), _tenant(kwargs)

        async def look_up(query: Query) -> Outcome[Passages]:
            return await pool.call(query, tenant=tenant, timeout_s=self.options.timeout_s)

        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        trajectory, report = await self.policy.run(prompt_ids, sample, look_up)
        if report.failure is not None and self.options.on_failure == "fail":
            report.failure.unwrap()
        return self._output(trajectory, report, metrics, engine_fields)

    def _output(
        self, trajectory: Trajectory, report: Report, metrics: dict[str, Any], engine_fields: dict[str, Any]
    ) -> AgentLoopOutput:
        if report.end in (End.TOOL_FAILED, End.ABORTED):
            trajectory.mask_all()
        if not trajectory.response:  # veRL cannot hold an empty response; this token is masked
            trajectory.observed([self.tokenizer.eos_token_id])
        return AgentLoopOutput(
            prompt_ids=trajectory.prompt,
            response_ids=trajectory.response,
            response_mask=trajectory.mask,
            response_logprobs=trajectory.log_probs,
            num_turns=2 * report.turns,
            metrics={**metrics, "generate_sequences": report.generate_s, "tool_calls": report.search_s},
            extra_fields={
                **engine_fields,
                "turn_scores": [],
                "tool_rewards": [],
                "search_end": report.end.value,
                "search_calls": report.searches,
                "search_invalid_actions": report.invalid_actions,
                "search_cut_observations": report.cut_observations,
                "search_wait_s": report.search_s,
                "search_failure": report.failure.kind.value if report.failure else "",
            },
        )

    def _completing(self, text: TokenText) -> list[int]:
        # The scan of the vocabulary takes a second; veRL makes a new agent loop for every trajectory.
        if self.tokenizer not in _completing_ids:
            _completing_ids[self.tokenizer] = text.completing_ids()
        return _completing_ids[self.tokenizer]


def _merge(fields: dict[str, Any], new: dict[str, Any]) -> None:
    """Keep the first turn's fields, but the latest weight version and the sums of speculative decoding."""
    for key, value in new.items():
        if key not in fields or key == "max_global_steps" and value is not None:
            fields[key] = value
        elif key.startswith("spec_num_"):
            fields[key] = int(fields[key]) + int(value)


def _tenant(row: dict[str, Any]) -> str:
    split = (row.get("extra_info") or {}).get("split", "train")
    return "train" if split == "train" else "val"
