"""Between rows of action chunks and the policy: inputs on the way in, veRL's nested layout on the way out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlinf_plugins.models.openvla.config import TEXT_VOCABULARY, ActionSpec
from rlinf_plugins.models.openvla.images import ImageProcessor
from rlinf_plugins.models.openvla.modeling import ActionOutput
from rlinf_plugins.models.openvla.sampling import Sampling
from rlinf_verl.vla.rows import read_chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInputs:
    """Arguments of the policy's ``forward`` for one micro-batch.

    Attributes:
        arguments: Keyword arguments.
        real: bool [B]; false for rows veRL added to fill a mini-batch.
    """

    arguments: dict[str, Any]
    real: torch.Tensor


def read_inputs(
    data: Mapping[str, Any], spec: ActionSpec, images: ImageProcessor, device: torch.device | str
) -> EngineInputs:
    """Prepare the policy's inputs from rows.

    Args:
        data: Rows as ``rlinf_verl.vla.rows`` defines them, on the CPU.
        spec: How the policy decodes.
        images: Turns camera frames into pixels.
        device: Where the policy computes.
    """
    batch = read_chunks(data, spec.tokens, TEXT_VOCABULARY)
    pixels = torch.stack([images(list(frames)) for frames in batch.images])
    return EngineInputs(
        arguments={
            "input_ids": batch.input_ids.to(device),
            "attention_mask": batch.attention_mask.to(device),
            "tokens": batch.tokens.to(device),
            "pixel_values": pixels.to(device),
            "proprio": None if batch.proprio is None else batch.proprio.float().to(device),
            "sampling": Sampling(temperature=batch.temperature, top_k=batch.top_k),
        },
        real=batch.real.to(device),
    )


def pack_outputs(output: ActionOutput, data: Mapping[str, Any], real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Lay the policy's output out as veRL reads it.

    veRL expects one number per token of ``[prompt, response]``, in the column before the token it is about; prompt
    columns are 0 here, since the policy only speaks about actions.

    Args:
        output: The policy's output.
        data: Rows; ``prompts``, ``responses`` and ``input_ids`` are read for their lengths.
        real: bool [B]; other rows get zeros that keep their place in the graph.

    Returns:
        ``log_probs`` and ``entropy`` nested ``[B, L + N]``; ``state_values`` nested ``[B, V]`` with a value head.
    """
    offsets = data["input_ids"].offsets()
    prompts, responses = (data[name].offsets().diff().tolist() for name in ("prompts", "responses"))
    weight = real.to(output.log_probs.dtype).unsqueeze(1)
    packed = {
        name: torch.nested.nested_tensor_from_jagged(_spread(values.flatten(1) * weight, prompts, responses), offsets)
        for name, values in (("log_probs", output.log_probs), ("entropy", output.entropy))
        if values is not None
    }
    if output.values is not None:
        packed["state_values"] = torch.nested.as_nested_tensor(list(output.values.unbind()), layout=torch.jagged)
    return packed


def _spread(values: torch.Tensor, prompts: list[int], responses: list[int]) -> torch.Tensor:
    """``[B, N]`` to packed ``[sum(L + N)]``."""
    pieces = []
    for row, prompt, response in zip(values, prompts, responses, strict=True):
        pieces += [row.new_zeros(prompt - 1), row[:response], row.new_zeros(1)]
    return torch.cat(pieces)
