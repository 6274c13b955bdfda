"""The wire format: both layouts are read alike, and every bad reply becomes a typed failure."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_plugins.core.errors import ToolCallError
from rlinf_plugins.testing.retrieval_server import Response, ScriptedRetrievalServer, passages
from rlinf_plugins.tools import protocol
from rlinf_plugins.tools.http import HttpAccessTool, HttpConfig, HttpSearchTool
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.results import Failure, FailureKind, Passage, Query, Success
from rlinf_plugins.tools.retry import RetryConfig

DOCUMENT = {"id": "7", "contents": '"A title"\nSome text.'}


def test_a_request_always_asks_for_scores():
    assert json.loads(protocol.encode_retrieve(["a", "ü"], 3)) == {
        "queries": ["a", "ü"],
        "topk": 3,
        "return_scores": True,
    }


@pytest.mark.parametrize(
    ("entry", "score"),
    [
        ({"document": DOCUMENT, "score": 2}, 2.0),
        ({"document": DOCUMENT}, None),
        (DOCUMENT, None),
        ({**DOCUMENT, "extra": [1]}, None),
        ({"id": "7", "title": "A title", "text": "Some text."}, None),
        ({"document": {"id": 7, "contents": DOCUMENT["contents"]}, "score": 1.5}, 1.5),
    ],
)
def test_both_layouts_give_the_same_passage(entry, score):
    (outcome,) = protocol.decode_retrieve(json.dumps({"result": [[entry]]}).encode(), 1, 3)
    assert outcome == Success((Passage("7", DOCUMENT["contents"], score),))
    assert (outcome.value[0].title, outcome.value[0].text) == ("A title", "Some text.")


def test_finding_nothing_is_a_success():
    assert protocol.decode_retrieve(b'{"result": [[], []]}', 2, 3) == [Success(()), Success(())]


def test_more_documents_than_asked_for_are_cut():
    (outcome,) = protocol.decode_retrieve(passages(["q"], topk=9), 1, 2)
    assert len(outcome.value) == 2


WHOLE = [
    (b"", "empty"),
    (b"  \n", "empty"),
    (b"<html><body>502 Bad Gateway</body></html>", "not JSON"),
    (passages(["a", "b"])[:-20], "not JSON"),
    (b'\xff\xfe{"result": []}', "not JSON"),
    (b'{"result": null}', "NoneType"),
    (b'{"result": {"0": []}}', "dict"),
    (b'{"detail": "boom"}', "not an object with 'result'"),
    (b"[[], []]", "not an object with 'result'"),
    (b'"result"', "not an object with 'result'"),
    (passages(["a"]), "1 results for 2 queries"),
    (passages(["a", "b", "c"]), "3 results for 2 queries"),
]


@pytest.mark.parametrize(("body", "says"), WHOLE)
def test_a_reply_that_cannot_be_told_apart_fails_all_queries(body, says):
    outcomes = protocol.decode_retrieve(body, 2, 3)
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome.kind is FailureKind.BAD_REPLY
        assert outcome.whole_batch
        assert says in outcome.message


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (None, "NoneType"),
        ({"document": DOCUMENT}, "dict"),
        (["text"], "str"),
        ([None], "NoneType"),
        ([{"document": None, "score": 1}], "NoneType"),
        ([{"document": "text", "score": 1}], "str"),
        ([{"document": {"id": "1"}, "score": 1}], "no 'contents'"),
        ([{"id": "1"}], "no 'contents'"),
        ([{"id": "1", "contents": None}], "no 'contents'"),
        ([{"id": "1", "contents": 5}], "no 'contents'"),
        ([{"id": "1", "contents": " "}], "no 'contents'"),
        ([{"document": DOCUMENT, "score": "high"}], "score"),
        ([{"document": DOCUMENT, "score": True}], "score"),
    ],
)
def test_a_bad_list_fails_its_own_query_only(row, says):
    body = json.dumps({"result": [[DOCUMENT], row, []]}).encode()
    good, bad, empty = protocol.decode_retrieve(body, 3, 3)
    assert good.value[0].id == "7"
    assert empty == Success(())
    assert bad.kind is FailureKind.BAD_REPLY
    assert not bad.whole_batch
    assert says in bad.message
    with pytest.raises(ToolCallError, match="bad_reply"):
        bad.unwrap()


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just("result"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["result", "document", "contents", "id", "score", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.binary(max_size=60) | json_values.map(lambda v: json.dumps(v).encode()), st.integers(1, 3))
def test_any_body_gives_one_typed_outcome_per_query(body, expected):
    for outcomes in (protocol.decode_retrieve(body, expected, 3), protocol.decode_access(body, expected)):
        assert len(outcomes) == expected
        assert all(isinstance(o, Success | Failure) for o in outcomes)


@given(
    st.lists(
        st.lists(st.builds(Passage, st.text(max_size=5), st.text(min_size=1).filter(str.strip), st.floats(-5, 5)))
    ),
    st.booleans(),
)
def test_what_our_server_writes_our_client_reads(results, scores):
    outcomes = protocol.decode_retrieve(protocol.encode_reply(results, scores=scores), len(results), 10**6)
    for passages_sent, outcome in zip(results, outcomes, strict=True):
        assert [(p.id, p.contents) for p in outcome.value] == [(p.id, p.contents) for p in passages_sent]
        assert all((p.score is not None) == scores for p in outcome.value)


def test_access_reads_every_known_layout_of_a_page():
    body = json.dumps({"result": ["text", [DOCUMENT], {"document": DOCUMENT}, {"url": "u", "page": "p"}, "", 3]})
    pages = protocol.decode_access(body.encode(), 6)
    assert [o.value[0].contents if isinstance(o, Success) else o.kind for o in pages] == [
        "text",
        DOCUMENT["contents"],
        DOCUMENT["contents"],
        "p",
        FailureKind.BAD_REPLY,
        FailureKind.BAD_REPLY,
    ]


STATUSES = [
    (Response(status=500), FailureKind.STATUS, True, None),
    (Response(status=500, headers={"retry-after": "7"}), FailureKind.STATUS, True, 7.0),
    (Response(status=503, headers={"retry-after": "soon"}), FailureKind.OVERLOADED, True, None),
    (Response(status=429, headers={"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}), FailureKind.OVERLOADED, True, 0.0),
    (Response(status=404), FailureKind.STATUS, False, None),
    (Response(status=422), FailureKind.STATUS, False, None),
    (Response(status=307, headers={"location": "http://127.0.0.1:1/x"}), FailureKind.STATUS, False, None),
    (Response(body=passages(["q"]), cut_after=30), FailureKind.BAD_REPLY, True, None),
    (Response(body=b"<html>"), FailureKind.BAD_REPLY, True, None),
    (Response(never=True), FailureKind.TIMEOUT, True, None),
]


@pytest.mark.parametrize(("response", "kind", "retryable", "retry_after"), STATUSES)
async def test_every_way_a_server_fails_has_its_type(response, kind, retryable, retry_after):
    async with ScriptedRetrievalServer(lambda queries, number: response) as server:
        tool = HttpSearchTool(HttpConfig(url=server.url))
        (failure,) = await tool.run([Query("q")], 0.3)
        assert (failure.kind, failure.retryable, failure.retry_after_s) == (kind, retryable, retry_after)
        await tool.close()


async def test_a_server_that_is_not_there_is_unavailable():
    tool = HttpSearchTool(HttpConfig(url="http://127.0.0.1:9"))
    (failure,) = await tool.run([Query("q")], 1.0)
    assert failure.kind is FailureKind.UNAVAILABLE
    await tool.close()


async def test_a_reply_beyond_the_limit_is_refused():
    async with ScriptedRetrievalServer(lambda queries, number: Response(body=b" " * 5000)) as server:
        tool = HttpSearchTool(HttpConfig(url=server.url, max_reply_bytes=1000))
        (failure,) = await tool.run([Query("q")], 1.0)
        assert "exceeds 1000 bytes" in failure.message
        await tool.close()


ODD_QUERIES = ["", "   ", "\n\t", "x" * 5000, "a\x00b", "\ud800"]


async def test_odd_queries_are_refused_before_they_are_sent_and_strange_ones_are_sent_whole():
    strange = ["的 中文 查询", "<search>x</search>", '"}]}', "émoji 🎉", "<|im_end|>", "a\nb"]
    async with ScriptedRetrievalServer() as server:
        pool = ToolPool(HttpSearchTool(HttpConfig(url=server.url + "/retrieve")), PoolConfig())
        outcomes = await pool.call_many([Query(q) for q in ODD_QUERIES + strange])
        assert [o.kind for o in outcomes[: len(ODD_QUERIES)]] == [FailureKind.INVALID_REQUEST] * len(ODD_QUERIES)
        assert [o.value[0].text for o in outcomes[len(ODD_QUERIES) :]] == strange
        assert server.requests == [strange]
        await pool.close()


async def test_access_goes_to_access_and_refuses_what_is_no_url():
    body = json.dumps({"result": ["page"]}).encode()
    async with ScriptedRetrievalServer(lambda urls, number: Response(body=body)) as server:
        pool = ToolPool(HttpAccessTool(HttpConfig(url=server.url)), PoolConfig(retry=RetryConfig(retries=0)))
        good, bad = await pool.call_many(["http://a/b", "file:///etc/passwd"])
        assert good.value[0].contents == "page"
        assert bad.kind is FailureKind.INVALID_REQUEST
        assert server.requests == [["http://a/b"]]
        await pool.close()


async def test_a_batch_is_sent_once_with_the_largest_topk_and_cut_per_caller():
    async with ScriptedRetrievalServer(lambda queries, number: Response(body=passages(queries, 5))) as server:
        pool = ToolPool(HttpSearchTool(HttpConfig(url=server.url)), PoolConfig())
        outcomes = await pool.call_many([Query("a", 1), Query("b", 5), Query("a", 5)])
        assert [len(o.value) for o in outcomes] == [1, 5, 5]
        assert len(server.requests) == 1
        await pool.close()
