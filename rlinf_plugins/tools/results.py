"""What a tool call returns: a value or a typed failure, never an exception and never error text.

A failure is data: the caller decides whether to mask a trajectory, retry later or stop. The structs are C-backed so
that they cost little to create and to send between processes.
"""

from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from rlinf_plugins.core.errors import ToolCallError

V = TypeVar("V")


class FailureKind(StrEnum):
    """Why a call has no value."""

    INVALID_REQUEST = "invalid_request"
    """The request can never succeed: empty, too long, wrong type. Nothing was sent."""
    OVERLOADED = "overloaded"
    """The bounded queue was full and the tenant had its share of it."""
    DEADLINE = "deadline"
    """The caller's deadline passed before a reply came."""
    TIMEOUT = "timeout"
    """One attempt took longer than an attempt may."""
    UNAVAILABLE = "unavailable"
    """No back-end could be reached, or every circuit is open."""
    STATUS = "status"
    """The upstream answered with a status other than 200."""
    BAD_REPLY = "bad_reply"
    """The upstream answered 200 with something that is not a reply to the request."""
    TOOL_ERROR = "tool_error"
    """The tool itself raised or refused: a defect or a bad input, with its message."""
    CLOSED = "closed"
    """The pool was closed while the call waited."""


class Source(StrEnum):
    """Where a value came from."""

    FETCHED = "fetched"
    JOINED = "joined"
    CACHED = "cached"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A call without a value.

    Attributes:
        kind: Machine-readable reason.
        message: For logs and people; never shown to a model.
        retryable: Whether the same request may succeed later.
        retry_after_s: Earliest useful retry in seconds, where the upstream said so.
        whole_batch: The failure says nothing about this item in particular: it was in a batch that failed as one.
    """

    kind: FailureKind
    message: str
    retryable: bool = False
    retry_after_s: float | None = None
    whole_batch: bool = False

    def unwrap(self) -> None:
        """Raise this failure.

        Raises:
            ToolCallError: Always.
        """
        raise ToolCallError(f"{self.kind}: {self.message}")


class Success(msgspec.Struct, Generic[V], frozen=True):
    """A call's value and where it came from."""

    value: V
    source: Source = Source.FETCHED

    def unwrap(self) -> V:
        """Return the value."""
        return self.value


Outcome = Success[V] | Failure


class Query(msgspec.Struct, frozen=True):
    """A search: the text as the policy wrote it and how many passages are wanted."""

    text: str
    topk: int = 3


class Passage(msgspec.Struct, frozen=True):
    """One retrieved document in Search-R1's layout.

    Attributes:
        id: The corpus id; empty where the server sent none.
        contents: ``"Title"`` in quotes, a newline, then the text.
        score: The retriever's score, higher is better; None where the server sent none.
    """

    id: str
    contents: str
    score: float | None = None

    @property
    def title(self) -> str:
        """The first line without its quotes; empty where there is only one line."""
        head, newline, _ = self.contents.partition("\n")
        return head.strip().strip('"') if newline else ""

    @property
    def text(self) -> str:
        """Everything after the title line; the whole contents where there is only one line."""
        head, newline, tail = self.contents.partition("\n")
        return tail if newline else head


Passages = tuple[Passage, ...]
