"""GRPO on a small Llama: the model, the data, and agent loops that play the committed traces.

``long_tail`` answers in one turn. ``search`` takes turns: after each but the last it waits for a tool as long as a
remote search takes, and reads its result.
"""

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from rlinf_verl import tiny_text
from rlinf_verl.search.trajectory import Trajectory

LENGTHS = Path(__file__).with_name("lengths.json")
TURNS = Path(__file__).with_name("turns.json")
BATCH, ROLLOUTS = 16, 4
TOOL_S, RESULT_TOKENS = 0.3, 24


@cache
def lengths() -> list[list[int]]:
    """Tokens of each response, by prompt."""
    return json.loads(LENGTHS.read_text())


class LongTailLoop(SingleTurnAgentLoop):
    """One turn whose response has the length that the trace gives its prompt and session."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Answer with as many tokens as the trace says."""
        tokens = lengths()[int(kwargs["index"])][int(kwargs["session_id"])]
        fixed = {**sampling_params, "max_tokens": tokens, "ignore_eos": True}
        return await super().run(fixed, **kwargs)


@cache
def turns() -> list[list[list[int]]]:
    """Tokens of each turn of each response, by prompt."""
    return json.loads(TURNS.read_text())


class SearchLoop(SingleTurnAgentLoop):
    """Turns of the lengths that the trace gives, with a tool's latency and result between them."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play a trajectory."""
        plan = turns()[int(kwargs["index"])][int(kwargs["session_id"])]
        found = Trajectory(prompt=list(await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))))
        fields: dict[str, Any] = {}
        for number, tokens in enumerate(plan):
            if number:
                await asyncio.sleep(TOOL_S)
                found.observed([2 + (number + place) % 8 for place in range(RESULT_TOKENS)])
            said = await self.server_manager.generate(
                request_id=f"{kwargs['uid']}-{kwargs['session_id']}-{number}",
                prompt_ids=found.ids,
                sampling_params={**sampling_params, "max_tokens": tokens, "ignore_eos": True},
            )
            found.sampled(said.token_ids, said.log_probs)
            first = fields.get("min_global_steps", said.extra_fields.get("min_global_steps"))
            fields = {**said.extra_fields, "min_global_steps": first}
        return AgentLoopOutput(
            prompt_ids=found.prompt,
            response_ids=found.response,
            response_mask=found.mask,
            response_logprobs=found.log_probs,
            num_turns=2 * len(plan),
            metrics={},
            extra_fields={**fields, "turn_scores": [], "tool_rewards": []},
        )


def make(folder: Path) -> None:
    """Write the model, the data and the agent loop's configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    task = folder / "runs" / "tiny-text"
    tiny_text.make(task, train_rows=len(lengths()))
    config = LlamaConfig.from_pretrained(task / "model")
    config.update(
        {
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "head_dim": 32,
            "max_position_embeddings": 512,
        }
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(task / "model")
    (folder / "loops.yaml").write_text(
        "- {name: long_tail, _target_: workload.LongTailLoop}\n- {name: search, _target_: workload.SearchLoop}\n"
    )


WORKLOAD = [
    "+recipe=text_grpo_tiny",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
    "data.shuffle=false",
    "data.max_response_length=400",
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.rollout.n={ROLLOUTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "trainer.v1.m2flow.virtual_devices.count=2",
    "trainer.v1.m2flow.virtual_devices.cores_per_device=1",
]
