"""The wire format: both layouts are read alike, and every bad reply becomes a typed failure."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_plugins.core.errors import ToolCallError
from rlinf_plugins.testing.retrieval_server import passages
from rlinf_plugins.tools import protocol
from rlinf_plugins.tools.results import Failure, FailureKind, Passage, Success

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
