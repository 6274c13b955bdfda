"""The sequences that are being generated now: one left-padded KV cache that rows join and leave between steps.

Columns of the cache are positions counted from the right, so rows of unlike length line up at their newest token;
what lies left of a row's first token is masked and never read. A row joins by padding the shorter of the two caches
on the left, leaves by dropping its row, and columns that no row uses any more are cut off.
"""

from collections.abc import Callable, Sequence

import torch
from transformers.cache_utils import Cache, DynamicLayer

_GROWTH = 64
"""Spare columns of a cache layer: appending a token copies the layer once in this many steps, not every step."""

Forward = Callable[..., torch.Tensor]


class _GrowingLayer(DynamicLayer):
    """A cache layer whose tensors are views of a larger buffer, so that a step writes in place.

    ``keys`` and ``values`` may be replaced from outside; the next append then starts a new buffer.
    """

    _buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, H, Q, D] states and return all of them, [B, H, T + Q, D]."""
        used, total = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._room_for(total, key_states)
        keys[:, :, used:total] = key_states
        values[:, :, used:total] = value_states
        self._buffers = keys, values
        self.keys, self.values = keys[:, :, :total], values[:, :, :total]
        return self.keys, self.values

    def _room_for(self, columns: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._buffers is not None:
            keys, _ = self._buffers
            mine = self.keys.data_ptr() == keys.data_ptr() and len(self.keys) == len(keys)
            if mine and columns <= keys.shape[2]:
                return self._buffers
        return self._grow(self.keys, like, columns), self._grow(self.values, like, columns)

    @staticmethod
    def _grow(old: torch.Tensor, like: torch.Tensor, columns: int) -> torch.Tensor:
        batch, heads, _, width = like.shape
        buffer = like.new_empty((batch, heads, columns + _GROWTH, width))
        if old.numel():
            buffer[:, :, : old.shape[2]] = old
        return buffer


class KVBatch:
    """KV cache of B sequences.

    Args:
        forward: ``forward(input_ids=, attention_mask=, position_ids=, past_key_values=)`` -> logits [B, V] of the
            last position; appends to the cache it is given.
        device: Where index tensors live.
    """

    def __init__(self, forward: Forward, device: torch.device | str = "cpu") -> None:
        self._forward = forward
        self._device = device
        self._cache: Cache | None = None
        self._mask = torch.zeros((0, 0), dtype=torch.long, device=device)

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self._mask.shape[0]

    @property
    def width(self) -> int:
        """Columns of the cache: tokens of the longest sequence."""
        return self._mask.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return sum(t.nbytes for k, v in self._layers(self._cache) for t in (k, v))

    def join(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run prompts through the model and append them as rows.

        Equal prompts (a group of samples of one question) are computed once.

        Args:
            prompts: N non-empty token lists.

        Returns:
            Logits of the next token, [N, V].
        """
        unique: dict[tuple[int, ...], int] = {}
        which = [unique.setdefault(tuple(p), len(unique)) for p in prompts]
        ids, mask = self._pad([list(p) for p in unique])
        cache = Cache(layer_class_to_replicate=_GrowingLayer)
        logits = self._forward(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
        )
        index = torch.tensor(which, device=self._device)
        if len(unique) < len(prompts):
            cache.batch_select_indices(index)
        self._append(cache, mask[index])
        return logits[index]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to every row.

        Args:
            tokens: [B] int64.

        Returns:
            Logits of the token after it, [B, V].
        """
        positions = self._mask.sum(-1, keepdim=True)
        self._mask = torch.cat([self._mask, self._mask.new_ones(self.rows, 1)], dim=1)
        return self._forward(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
        )

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only ``rows``, in this order, and cut the columns none of them uses."""
        if not rows:
            self._cache, self._mask = None, self._mask.new_zeros((0, 0))
            return
        index = torch.tensor(list(rows), device=self._device)
        mask = self._mask[index]
        cut = self.width - int(mask.sum(-1).max())
        self._mask = mask[:, cut:]
        for layer in self._cache.layers if self._cache else ():
            layer.keys = layer.keys[index, :, cut:]
            layer.values = layer.values[index, :, cut:]

    def _pad(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(p) for p in prompts)
        ids = torch.zeros((len(prompts), width), dtype=torch.long, device=self._device)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt, device=self._device)
            mask[i, width - len(prompt) :] = 1
        return ids, mask

    def _append(self, cache: Cache, mask: torch.Tensor) -> None:
        if self._cache is None:
            self._cache, self._mask = cache, mask
            return
        width = max(self.width, mask.shape[1])
        old, new = width - self.width, width - mask.shape[1]
        for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
            mine.keys = torch.cat([_pad_left(mine.keys, old), _pad_left(theirs.keys, new)])
            mine.values = torch.cat([_pad_left(mine.values, old), _pad_left(theirs.values, new)])
        pad = torch.nn.functional.pad
        self._mask = torch.cat([pad(self._mask, (old, 0)), pad(mask, (new, 0))])

    @staticmethod
    def _layers(cache: Cache | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [] if cache is None else [(layer.keys, layer.values) for layer in cache.layers]


def _pad_left(states: torch.Tensor, columns: int) -> torch.Tensor:
    """Pad [B, H, T, D] with ``columns`` zero columns on the left of T."""
    return torch.nn.functional.pad(states, (0, 0, columns, 0)) if columns else states
