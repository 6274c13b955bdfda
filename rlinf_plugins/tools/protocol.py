"""The ``/retrieve`` and ``/access`` wire formats of Search-R1 and RLinf: requests, replies, both layouts.

Request ``{"queries": [str], "topk": int | null, "return_scores": bool}``; reply
``{"result": [[{"document": {"id", "contents"}, "score": float}, ...], ...]}``, or with bare documents in place of
``{"document", "score"}`` where scores were not asked for. Nothing here does I/O or raises on bad input.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from rlinf_plugins.tools.results import Failure, FailureKind, Outcome, Passage, Passages, Success

_encoder = msgspec.json.Encoder()
_SHOWN = 160
"""Characters of a bad body that a failure's message quotes."""


class RetrieveRequest(msgspec.Struct):
    """Body of ``POST /retrieve`` as a server reads it; ``topk`` null means the server's default."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class AccessRequest(msgspec.Struct):
    """Body of RLinf's ``POST /access``."""

    urls: list[str]


def encode_retrieve(queries: Sequence[str], topk: int) -> bytes:
    """Return the body of a ``/retrieve`` request.

    Scores are always asked for: Search-R1's own server fails without them.
    """
    return _encoder.encode({"queries": list(queries), "topk": topk, "return_scores": True})


def encode_access(urls: Sequence[str]) -> bytes:
    """Return the body of an ``/access`` request."""
    return _encoder.encode({"urls": list(urls)})


def encode_reply(results: Sequence[Sequence[Passage]], *, scores: bool) -> bytes:
    """Return the body of a ``/retrieve`` reply, with scores or as bare documents."""
    if scores:
        rows: list[list[Any]] = [
            [{"document": {"id": p.id, "contents": p.contents}, "score": p.score or 0.0} for p in passages]
            for passages in results
        ]
    else:
        rows = [[{"id": p.id, "contents": p.contents} for p in passages] for passages in results]
    return _encoder.encode({"result": rows})


def decode_retrieve(body: bytes, expected: int, topk: int) -> list[Outcome[Passages]]:
    """Read a ``/retrieve`` reply.

    Args:
        body: The raw body of a reply with status 200.
        expected: Number of queries that were sent.
        topk: Passages asked for per query; a longer list is cut.

    Returns:
        One outcome per query, in order. A body that is not a reply to ``expected`` queries fails all of them alike;
        one bad list of documents fails only its own query.
    """
    rows = _rows(body, expected)
    if isinstance(rows, Failure):
        return [rows] * expected
    return [_passages(row, index, topk) for index, row in enumerate(rows)]


def decode_access(body: bytes, expected: int) -> list[Outcome[Passages]]:
    """Read an ``/access`` reply: one page per URL, as a document, a list of one, or bare text."""
    rows = _rows(body, expected)
    if isinstance(rows, Failure):
        return [rows] * expected
    return [_page(row, index) for index, row in enumerate(rows)]


def _rows(body: bytes, expected: int) -> list[Any] | Failure:
    if not body.strip():
        return _bad("the body is empty")
    try:
        reply = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _bad(f"the body is not JSON ({error}): {_shown(body)}")
    if not isinstance(reply, dict) or "result" not in reply:
        return _bad(f"the body is not an object with 'result': {_shown(body)}")
    rows = reply["result"]
    if not isinstance(rows, list):
        return _bad(f"'result' is {type(rows).__name__}, not a list: {_shown(body)}")
    if len(rows) != expected:
        return _bad(f"{len(rows)} results for {expected} queries: which belongs to which cannot be known")
    return rows


def _passages(row: Any, index: int, topk: int) -> Outcome[Passages]:
    if not isinstance(row, list):
        return _bad(f"result {index} is {type(row).__name__}, not a list", whole_batch=False)
    passages = []
    for place, entry in enumerate(row[:topk]):
        passage = _passage(entry)
        if isinstance(passage, str):
            return _bad(f"document {place} of result {index} {passage}", whole_batch=False)
        passages.append(passage)
    return Success(tuple(passages))


def _page(row: Any, index: int) -> Outcome[Passages]:
    if isinstance(row, list) and len(row) == 1:
        row = row[0]
    if isinstance(row, str):
        return Success((Passage("", row),)) if row.strip() else _bad(f"page {index} is empty", whole_batch=False)
    if isinstance(row, dict) and "page" in row:  # RLinf's layout for fetched pages
        row = {"id": row.get("url", ""), "contents": row["page"]}
    passage = _passage(row)
    if isinstance(passage, str):
        return _bad(f"page {index} {passage}", whole_batch=False)
    return Success((passage,))


def _passage(entry: Any) -> Passage | str:
    """Return the passage, or what is wrong with it."""
    if not isinstance(entry, dict):
        return f"is {type(entry).__name__}, not an object"
    document, score = (entry["document"], entry.get("score")) if "document" in entry else (entry, entry.get("score"))
    if not isinstance(document, dict):
        return f"has a 'document' that is {type(document).__name__}, not an object"
    contents = document.get("contents")
    if contents is None and isinstance(document.get("text"), str):  # published corpora with separate columns
        title = document.get("title")
        contents = f'"{title}"\n{document["text"]}' if isinstance(title, str) else document["text"]
    if not isinstance(contents, str) or not contents.strip():
        return "has no 'contents'"
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        return f"has a score that is {type(score).__name__}, not a number"
    identity = document.get("id", "")
    return Passage(str(identity), contents, None if score is None else float(score))


def _bad(message: str, *, whole_batch: bool = True) -> Failure:
    return Failure(kind=FailureKind.BAD_REPLY, message=message, retryable=whole_batch, whole_batch=whole_batch)


def _shown(body: bytes) -> str:
    text = body[: _SHOWN * 4].decode("utf-8", errors="replace")
    return repr(text[:_SHOWN] + ("..." if len(text) > _SHOWN else ""))
