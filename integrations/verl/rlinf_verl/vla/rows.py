"""The row of an action chunk in TransferQueue: its fields, written by the embodied agent loop and read by the engine.

One row is one decision of the policy: a prompt, the images it saw, the action tokens it chose. The key is veRL's
``{uid}_{session}_{index}``: ``uid`` is the (task, initial state) of a group, ``session`` one of its episodes, ``index``
the decision within the episode. A group's rows share the key's first part, an episode's rows the first two, so GRPO
and episode-wise GAE find whole episodes by key alone.

Fields of veRL's own layout (``L`` prompt tokens, ``N = chunk * dim`` action tokens):

===================== ================= ==============================================================================
``prompts``           int64 [L]         prompt ids, from BOS to the lone space token
``responses``         int64 [N]         action token ids, flattened from [chunk, dim]
``input_ids``         int64 [L + N]     both
``position_ids``      int64 [L + N]     0, 1, ...; the policy computes its own
``response_mask``     int64 [N]         1 for tokens of steps that were taken, the step of success included
``loss_mask``         int64 [N]         the same
``rollout_log_probs`` float32 [N]       of the chosen tokens under the distribution they were drawn from
``rm_scores``         float32 [N]       the **episode's** return at the row's last valid token, in every row of it:
                                        veRL's GRPO reads a session's last row and broadcasts
``num_turns``         int               decisions in the episode
``extra_fields``      dict              ``reward_extra_info``: ``acc`` (success), ``return``, ``length``
===================== ================= ==============================================================================

Fields of the policy (``I`` images, ``V`` outputs of the value head):

========================= ======================== ===================================================================
``images``                uint8 [I, H, W, 3]       as the environment drew them; TransferQueue's storage holds them,
                                                   neither the driver nor the trainer's controller touches a pixel
``proprio``               float32 [D]              normalised; absent where the policy takes none
``sampling``              float32 [2]              temperature and top_k the tokens were drawn with; training must use
                                                   the same
``rollout_values``        float32 [V]              value head at the decision; absent without one
``final_values``          float32 [V]              value of what the episode left behind: of its last observation
                                                   where it was truncated, 0 where it terminated; meant for its last
                                                   row, 0 in the others
``chunk_rewards``         float32 [chunk]          reward of each step, 0 after the end
``chunk_valid``           bool [chunk]             steps that were taken
``terminated``            bool [1]                 the episode reached its end in this chunk
``truncated``             bool [1]                 the episode was cut off in this chunk
``chunk_index``           int64 [1]                ``index`` of the key
``policy_version``        int64 [1]                version of the weights that decided; -1 unknown
``episode_id``            str                      ``{uid}_{session}``
========================= ======================== ===================================================================

The fields of the prompt's own row (``task``, ``trial``, ``data_source``, ...) travel along. veRL may append synthetic
rows to fill a mini-batch: their ``response_mask`` is all zero and has length 1, and ``read_chunks`` gives them
placeholder tokens. They contribute nothing to any loss, so an engine may leave them out of its forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_SYNTHETIC_TOKEN = 31999  # any action token: masked everywhere, but it must index the action vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One decision and what came of it.

    Attributes:
        prompt: Prompt ids.
        images: uint8 [I, H, W, 3].
        proprio: float32 [D], normalised, or None.
        tokens: int64 [chunk, dim].
        log_probs: float32 [chunk, dim].
        values: float32 [V], or None.
        temperature: Of the draw.
        top_k: Of the draw.
        version: Version of the weights, or None.
        rewards: float32 [steps], steps <= chunk.
        valid: bool [steps].
        terminated: Whether the episode reached its end in this chunk.
        truncated: Whether it was cut off in this chunk.
    """

    prompt: Sequence[int]
    images: np.ndarray
    proprio: np.ndarray | None
    tokens: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray | None
    temperature: float
    top_k: int
    version: int | None
    rewards: np.ndarray
    valid: np.ndarray
    terminated: bool
    truncated: bool


@dataclass(kw_only=True, slots=True)
class EpisodeTrace:
    """The decisions of one episode, in order, and how it went.

    Attributes:
        uid: Of the group; no underscore.
        session: Number of the episode in its group.
        chunks: Its decisions.
        success: Whether the task was solved at any step.
        final_values: float32 [V] of the last observation where the episode was truncated; None otherwise.
        extra: Further numbers for ``reward_extra_info``.
    """

    uid: str
    session: int
    chunks: list[Chunk] = field(default_factory=list)
    success: bool = False
    final_values: np.ndarray | None = None
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """``{uid}_{session}``."""
        return f"{self.uid}_{self.session}"

    @property
    def ret(self) -> float:
        """Sum of the rewards of valid steps."""
        return float(sum(chunk.rewards[chunk.valid].sum() for chunk in self.chunks))

    @property
    def steps(self) -> int:
        """Number of valid steps."""
        return int(sum(chunk.valid.sum() for chunk in self.chunks))

    def keys(self) -> list[str]:
        """TransferQueue keys of the rows."""
        return [f"{self.id}_{index}" for index in range(len(self.chunks))]

    def fields(self, prompt_row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Fields of the rows.

        Args:
            prompt_row: Fields of the dataset's row, carried along.
        """
        return [{**prompt_row, **self._fields(index)} for index in range(len(self.chunks))]

    def tags(self, global_steps: int) -> list[dict[str, Any]]:
        """Tags of the rows, as veRL's agent loop writes them; the versions are those of the whole episode."""
        versions = [-1 if chunk.version is None else chunk.version for chunk in self.chunks]
        tags = []
        for chunk in self.chunks:
            prompt, response = len(chunk.prompt), chunk.tokens.size
            tags.append(
                {
                    "status": "success",
                    "prompt_len": prompt,
                    "response_len": response,
                    "seq_len": prompt + response,
                    "global_steps": global_steps,
                    "min_global_steps": min(versions),
                    "max_global_steps": max(versions),
                }
            )
        return tags

    def _fields(self, index: int) -> dict[str, Any]:
        chunk = self.chunks[index]
        valid = np.zeros(len(chunk.tokens), dtype=bool)
        valid[: len(chunk.valid)] = chunk.valid
        rewards = np.zeros(len(chunk.tokens), dtype=np.float32)
        rewards[: len(chunk.rewards)] = np.where(chunk.valid, chunk.rewards, 0)
        prompts = torch.tensor(list(chunk.prompt), dtype=torch.int64)
        responses = torch.from_numpy(np.ascontiguousarray(chunk.tokens, dtype=np.int64).reshape(-1))
        mask = torch.from_numpy(np.repeat(valid, chunk.tokens.shape[1]).astype(np.int64))
        scores = torch.zeros(len(responses), dtype=torch.float32)
        scores[int(mask.nonzero().max())] = self.ret
        input_ids = torch.cat([prompts, responses])
        row = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": input_ids,
            "position_ids": torch.arange(len(input_ids)),
            "response_mask": mask,
            "loss_mask": mask,
            "rollout_log_probs": torch.from_numpy(np.asarray(chunk.log_probs, dtype=np.float32).reshape(-1)),
            "rm_scores": scores,
            "num_turns": len(self.chunks),
            "extra_fields": {"reward_extra_info": self._reward_info()},
            "images": torch.from_numpy(np.ascontiguousarray(chunk.images)),
            "sampling": torch.tensor([chunk.temperature, chunk.top_k], dtype=torch.float32),
            "chunk_rewards": torch.from_numpy(rewards),
            "chunk_valid": torch.from_numpy(valid),
            "terminated": torch.tensor([chunk.terminated]),
            "truncated": torch.tensor([chunk.truncated]),
            "chunk_index": torch.tensor([index]),
            "policy_version": torch.tensor([-1 if chunk.version is None else chunk.version]),
            "episode_id": self.id,
        }
        if chunk.proprio is not None:
            row["proprio"] = torch.from_numpy(np.asarray(chunk.proprio, dtype=np.float32))
        if chunk.values is not None:
            row["rollout_values"] = torch.from_numpy(np.asarray(chunk.values, dtype=np.float32))
            last = index == len(self.chunks) - 1 and self.final_values is not None
            final = self.final_values if last else np.zeros_like(chunk.values)
            row["final_values"] = torch.from_numpy(np.asarray(final, dtype=np.float32))
        return row

    def _reward_info(self) -> dict[str, float]:
        return {"acc": float(self.success), "return": self.ret, "length": float(self.steps), **self.extra}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkBatch:
    """Rows as the policy takes them.

    Attributes:
        input_ids: int64 [B, L], prompts padded on the right.
        attention_mask: int64 [B, L].
        tokens: int64 [B, N].
        images: B arrays, uint8 [I, H, W, 3].
        proprio: float32 [B, D], or None.
        temperature: Of the draws; equal in all rows.
        top_k: Of the draws; equal in all rows.
        real: bool [B]: not a synthetic row.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    tokens: torch.Tensor
    images: list[np.ndarray]
    proprio: torch.Tensor | None
    temperature: float
    top_k: int
    real: torch.Tensor


def column(data: Mapping[str, Any], name: str) -> torch.Tensor:
    """Stack a field whose rows all have the same shape; TransferQueue gives every field back as a nested tensor."""
    return torch.stack(list(data[name].unbind()))


def read_chunks(data: Mapping[str, Any], tokens: int, pad_token: int) -> ChunkBatch:
    """Read rows that came out of TransferQueue (a TensorDict, or a mapping of its tensors).

    Args:
        data: Dense or nested tensors by field.
        tokens: Action tokens of a row, ``chunk * dim``.
        pad_token: Fills prompts up to the longest.
    """
    prompts = list(data["prompts"].unbind())
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), width), pad_token, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    responses = torch.full((len(prompts), tokens), _SYNTHETIC_TOKEN, dtype=torch.int64)
    real = torch.zeros(len(prompts), dtype=torch.bool)
    for row, (prompt, response) in enumerate(zip(prompts, data["responses"].unbind(), strict=True)):
        input_ids[row, : len(prompt)] = prompt
        attention_mask[row, : len(prompt)] = 1
        real[row] = len(response) == tokens
        if real[row]:
            responses[row] = response
    sampling = data["sampling"].unbind()[0]
    return ChunkBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        tokens=responses,
        images=[image.numpy() for image in data["images"].unbind()],
        proprio=column(data, "proprio") if "proprio" in data else None,
        temperature=float(sampling[0]),
        top_k=int(sampling[1]),
        real=real,
    )
