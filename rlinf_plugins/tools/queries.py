"""What counts as a query, and when two queries are the same."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.tools.results import Failure, FailureKind, Outcome, Passages, Query, Success
from rlinf_plugins.tools.tool import Tool


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryConfig:
    """Rules for queries.

    Attributes:
        normalise: What is ignored when queries are compared for sharing and caching; the query itself is sent as it
            is. ``"whitespace"``: leading, trailing and repeated blanks. ``"case"``: letter case as well, which can
            change the results of dense retrievers. ``"none"``: nothing.
        max_chars: Longer queries are refused: they are runaway generations, and some servers fail on them.
        max_topk: Largest number of passages per query.
    """

    normalise: Literal["none", "whitespace", "case"] = "whitespace"
    max_chars: int = 2000
    max_topk: int = 100

    def validate(self, where: str) -> None:
        """Reject values outside their range."""
        if self.max_chars < 1 or self.max_topk < 1:
            raise ConfigError(f"{where} needs max_chars >= 1 and max_topk >= 1, got {self}")


class QueryRules:
    """Applies a :class:`QueryConfig`."""

    def __init__(self, config: QueryConfig) -> None:
        self._config = config

    def key(self, query: Query) -> tuple[int, str]:
        """Return what identifies the query's answer, given an index version."""
        if self._config.normalise == "none":
            return query.topk, query.text
        text = " ".join(query.text.split())
        return query.topk, text.casefold() if self._config.normalise == "case" else text

    def check(self, query: Query) -> Failure | None:
        """Return why the query is refused, or None."""
        if not isinstance(query.text, str):
            return _invalid(f"a query is text, got {type(query.text).__name__}")
        if not query.text or query.text.isspace():
            return _invalid("the query is empty")
        if len(query.text) > self._config.max_chars:
            return _invalid(f"the query has {len(query.text)} characters, the limit is {self._config.max_chars}")
        if not 1 <= query.topk <= self._config.max_topk:
            return _invalid(f"topk must be between 1 and {self._config.max_topk}, got {query.topk}")
        if "\x00" in query.text or any("\ud800" <= c <= "\udfff" for c in query.text):
            return _invalid("the query holds a null or a lone surrogate, which JSON cannot carry")
        return None

    @staticmethod
    def cut(outcome: Outcome[Passages], query: Query) -> Outcome[Passages]:
        """Keep the passages this query asked for, out of a batch that asked for the largest ``topk``."""
        if isinstance(outcome, Success) and len(outcome.value) > query.topk:
            return Success(outcome.value[: query.topk])
        return outcome


class QueryTool(Tool[Query, Passages]):
    """What all search tools share: which queries are refused, and which are the same.

    On its own it answers nothing; it serves where only keys and checks are needed.

    Args:
        queries: The rules.
    """

    name = "search"

    def __init__(self, queries: QueryConfig | None = None) -> None:
        self._rules = QueryRules(queries or QueryConfig())

    def key(self, request: Query) -> Hashable:
        """Equal after the configured normalisation."""
        return self._rules.key(request)

    def check(self, request: Query) -> Failure | None:
        """Refuse queries that are empty or too long."""
        return self._rules.check(request)

    async def run(self, requests: Sequence[Query], timeout_s: float) -> Sequence[Outcome[Passages]]:
        """Answer nothing: subclasses do."""
        raise NotImplementedError(f"{type(self).__name__} gives keys and checks only")


def _invalid(message: str) -> Failure:
    return Failure(kind=FailureKind.INVALID_REQUEST, message=message)
