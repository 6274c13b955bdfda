"""What a tool is to the pool: something that answers batches of requests. Subclass :class:`Tool` to add one."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from rlinf_plugins.tools.results import Failure, Outcome

Request = TypeVar("Request")
Value = TypeVar("Value")


class Tool(ABC, Generic[Request, Value]):
    """A tool: one replica of something that answers requests.

    Only :meth:`run` must be written. A tool whose answers depend on the request alone should also give a
    :meth:`key`, which makes equal requests share one execution and its result.
    """

    name: str = "tool"
    """Label in metrics and messages."""

    version: str = ""
    """Identity of the data behind the tool, e.g. of an index; values cached under another version are not used."""

    @abstractmethod
    async def run(self, requests: Sequence[Request], timeout_s: float) -> Sequence[Outcome[Value]]:
        """Answer a batch.

        Args:
            requests: One or more requests.
            timeout_s: Seconds after which nobody waits any more; the call is then cancelled.

        Returns:
            One outcome per request, in order. Raising fails the whole batch with the exception's message.
        """

    def key(self, request: Request) -> Hashable | None:
        """Return what identifies the request's answer, or None where answers must not be shared or cached."""
        return None

    def check(self, request: Request) -> Failure | None:
        """Return why the request can never succeed, or None; called before it is queued."""
        return None

    async def close(self) -> None:
        """Release what the tool holds."""
        return None
