"""The token sequence ``[BOS][patches][proprio][padding][prompt][actions]`` and its masks.

Padding sits right after the image, so that whatever the lengths of the prompts, the end of every prompt and every
action position are the same column in all rows, a KV cache grows at one end, and no row starts with padding.
Positions count the real tokens, so rotary embeddings see each row as if it were alone.
"""

from typing import NamedTuple

import torch


class Sequence(NamedTuple):
    """Inputs of the language model.

    Attributes:
        embeds: ``[B, S, H]``.
        mask: ``[B, S]``, true where a token is real.
        positions: ``[B, S]``, index of the token among the real ones of its row.
        prompt_end: Column of the last prompt token, the one whose logits predict the first action token.
    """

    embeds: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    prompt_end: int


def align_prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move each row's padding to just behind its first token, wherever it was.

    Args:
        input_ids: ``[B, L]``, padded on the right, on the left, or behind the first token.
        attention_mask: ``[B, L]``, non-zero where a token is real; each row has at least one.

    Returns:
        Ids and boolean mask ``[B, L]``: first token, padding, remaining tokens.
    """
    mask = attention_mask.bool()
    length = mask.shape[1]
    padding = (length - mask.sum(dim=1, keepdim=True)).clamp(max=length - 1)
    order = torch.argsort(mask.to(torch.int8), dim=1, stable=True)  # padding first, order kept
    columns = torch.arange(length, device=mask.device).expand_as(mask)
    source = torch.where(columns == 0, padding, torch.where(columns <= padding, columns - 1, columns))
    index = order.gather(1, source)
    return input_ids.gather(1, index), mask.gather(1, index)


def assemble(
    prompt_embeds: torch.Tensor, prompt_mask: torch.Tensor, patches: torch.Tensor, tail: torch.Tensor
) -> Sequence:
    """Join prompt, image and action embeddings.

    Args:
        prompt_embeds: ``[B, L, H]`` of aligned prompts (see :func:`align_prompts`).
        prompt_mask: ``[B, L]``.
        patches: ``[B, P, H]``, the proprioceptive token included.
        tail: ``[B, T, H]`` embeddings after the prompt; ``T`` may be 0.
    """
    embeds = torch.cat([prompt_embeds[:, :1], patches, prompt_embeds[:, 1:], tail], dim=1)
    real = prompt_mask.new_ones
    mask = torch.cat([prompt_mask[:, :1], real(patches.shape[:2]), prompt_mask[:, 1:], real(tail.shape[:2])], dim=1)
    return Sequence(embeds, mask, positions_of(mask), patches.shape[1] + prompt_embeds.shape[1] - 1)


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Return ``[B, S]`` positions that count real tokens only."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def attention_bias(mask: torch.Tensor, queries: int, dtype: torch.dtype, causal: bool) -> torch.Tensor:
    """Return the additive attention mask of the last ``queries`` positions over all of them.

    Args:
        mask: ``[B, S]``, true where a key is real.
        queries: Query positions, the last of the ``S``.
        dtype: Type of the attention scores.
        causal: Let a position see only those up to itself; otherwise all real ones.

    Returns:
        ``[B, 1, queries, S]``: 0 where attention is allowed, else the type's lowest number.
    """
    batch, length = mask.shape
    allowed = mask[:, None, None, :].expand(batch, 1, queries, length)
    if causal:
        rows = torch.arange(length - queries, length, device=mask.device)
        columns = torch.arange(length, device=mask.device)
        allowed = allowed & (columns[None, :] <= rows[:, None])
    bias = torch.zeros(allowed.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill(~allowed, torch.finfo(dtype).min)
