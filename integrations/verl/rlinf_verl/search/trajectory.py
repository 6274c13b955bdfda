"""A trajectory as tokens: what was sampled, with its log-probs, and what was put in between, masked."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlinf_plugins.core.errors import TokenAlignmentError


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """Prompt and response; the response grows by sampled turns and by observations.

    Attributes:
        prompt: Token ids of the prompt.
        response: Token ids after it, sampled and observed.
        mask: 1 for a sampled token, 0 for an observed one; as long as ``response``.
        log_probs: The engine's log-prob of each sampled token, 0.0 for observed ones; None where it reports none.
    """

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None

    @property
    def ids(self) -> list[int]:
        """All token ids: the next turn's prompt."""
        return self.prompt + self.response

    def sampled(self, ids: Sequence[int], log_probs: Sequence[float] | None) -> None:
        """Append sampled tokens.

        Raises:
            TokenAlignmentError: Tokens and log-probs differ in number, or some turns have log-probs and others none.
        """
        if log_probs is not None and len(log_probs) != len(ids):
            raise TokenAlignmentError(f"the engine sampled {len(ids)} tokens and reported {len(log_probs)} log-probs")
        if self.log_probs is None and log_probs is not None and not any(self.mask):
            self.log_probs = [0.0] * len(self.response)
        if ids and (self.log_probs is None) != (log_probs is None):
            raise TokenAlignmentError("some turns of a trajectory have log-probs and others have none")
        self.response.extend(ids)
        self.mask.extend([1] * len(ids))
        if self.log_probs is not None and log_probs is not None:
            self.log_probs.extend(log_probs)

    def observed(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled."""
        self.response.extend(ids)
        self.mask.extend([0] * len(ids))
        if self.log_probs is not None:
            self.log_probs.extend([0.0] * len(ids))

    def segments(self) -> list[tuple[int, list[int]]]:
        """Return the response as runs of equal mask: (mask, ids)."""
        runs: list[tuple[int, list[int]]] = []
        for token, bit in zip(self.response, self.mask, strict=True):
            if not runs or runs[-1][0] != bit:
                runs.append((bit, []))
            runs[-1][1].append(token)
        return runs

    def mask_all(self) -> None:
        """Take the whole trajectory out of the loss."""
        self.mask = [0] * len(self.mask)
