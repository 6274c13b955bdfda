"""Long-tail GRPO on a small Llama: the model, the data, and an agent loop that plays the committed lengths."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from rlinf_verl import tiny_text

LENGTHS = Path(__file__).with_name("lengths.json")
BATCH, ROLLOUTS = 16, 4


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
    (folder / "loops.yaml").write_text("- {name: long_tail, _target_: workload.LongTailLoop}\n")


WORKLOAD = [
    "+recipe=text_grpo_tiny",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
    "actor_rollout_ref.rollout.agent.default_agent_loop=long_tail",
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
