"""Requests that move: a replica gives up its devices, and another one continues its answers where they stopped."""

import asyncio
from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

_RETRY_S = 0.02
"""Pause before an answer is continued: the router may still send to the replica that has just left."""


class MigratingClient(LLMServerClient):  # type: ignore[misc]
    """veRL's client, continuing on another replica what one ended early; for weights that do not change meanwhile.

    veRL's own client for interrupted generation waits a second before it continues, which suits a weight sync.
    """

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Generate tokens; see :meth:`verl.workers.rollout.llm_server.LLMServerClient.generate`."""
        prompt = list(prompt_ids)
        limit = sampling_params.get("max_tokens") or int(self.config.actor_rollout_ref.rollout.response_length)
        whole: TokenOutput | None = None
        while True:
            done = [] if whole is None else whole.token_ids
            left = {**sampling_params, "max_tokens": limit - len(done)}
            part = await super().generate(
                request_id=request_id, prompt_ids=prompt + done, sampling_params=left, **kwargs
            )
            whole = part if whole is None else _joined(whole, part)
            if part.stop_reason not in ("aborted", "abort") or len(whole.token_ids) >= limit:
                return whole
            await asyncio.sleep(_RETRY_S)


def _joined(first: TokenOutput, second: TokenOutput) -> TokenOutput:
    """Return two parts of one answer as the answer; what the second says of itself holds for the whole."""
    versions = (first.extra_fields.get("min_global_steps"), second.extra_fields.get("max_global_steps"))
    second.token_ids = [*first.token_ids, *second.token_ids]
    if first.log_probs is not None and second.log_probs is not None:
        second.log_probs = [*first.log_probs, *second.log_probs]
    second.extra_fields["min_global_steps"], second.extra_fields["max_global_steps"] = versions
    return second
