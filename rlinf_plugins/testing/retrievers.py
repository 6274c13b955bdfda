"""Conformance suite for retrievers: subclass it, give a fixture ``retriever``, and pytest does the rest.

The fixture must open an index over :data:`CORPUS`, written with :func:`write_corpus`.
"""

import json
from pathlib import Path
from typing import Any

from rlinf_plugins.tools.results import Passage

CORPUS = (
    ("0", "Berlin", "Berlin is the capital of Germany."),
    ("1", "Paris", "Paris is the capital of France and lies on the Seine."),
    ("2", "Seine", "The Seine is a river in France."),
    ("3", "Apple", "An apple is a fruit that grows on trees."),
    ("4", "Guitar", "The guitar is a musical instrument with six strings."),
    ("5", "日本", "東京 は 日本 の 首都 です。"),
    ("6", "Quotes", 'A "quoted" title\nand a second line <b>with</b> tags.'),
)
"""(id, title, text) of the passages."""


def write_corpus(path: Path) -> Path:
    """Write :data:`CORPUS` in Search-R1's layout and return ``path``."""
    lines = [json.dumps({"id": i, "contents": f'"{title}"\n{text}'}) for i, title, text in CORPUS]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class RetrieverConformance:
    """What the pool and the server rely on."""

    def test_it_says_what_it_holds(self, retriever: Any) -> None:
        """Length, name and version."""
        assert len(retriever) == len(CORPUS)
        assert retriever.name
        assert retriever.version

    def test_one_list_per_query_in_order(self, retriever: Any) -> None:
        """Replies cannot be crossed."""
        found = retriever.search(["capital of Germany", "musical instrument strings", "capital of Germany"], 2)
        assert [passages[0].id for passages in found] == ["0", "4", "0"]

    def test_passages_are_whole_and_scores_descend(self, retriever: Any) -> None:
        """Contents come from the corpus unchanged."""
        (passages,) = retriever.search(["the capital of France on the Seine"], 3)
        contents = {i: f'"{title}"\n{text}' for i, title, text in CORPUS}
        assert 1 <= len(passages) <= 3
        assert all(isinstance(p, Passage) and contents[p.id] == p.contents for p in passages)
        scores = [p.score for p in passages]
        assert scores == sorted(scores, reverse=True)
        assert len({p.id for p in passages}) == len(passages)

    def test_a_smaller_topk_is_a_prefix(self, retriever: Any) -> None:
        """The pool asks for the largest topk of a batch and cuts."""
        few, many = (retriever.search(["river in France"], k)[0] for k in (1, 3))
        assert [p.id for p in many[:1]] == [p.id for p in few]

    def test_more_than_the_corpus_holds_is_not_an_error(self, retriever: Any) -> None:
        """``topk`` beyond the corpus returns what there is, each passage once."""
        (passages,) = retriever.search(["capital"], 50)
        assert len(passages) <= len(CORPUS)
        assert len({p.id for p in passages}) == len(passages)

    def test_a_batch_gives_what_single_queries_give(self, retriever: Any) -> None:
        """Results do not depend on the neighbours in a batch."""
        queries = ["fruit that grows on trees", "river", "guitar strings", "capital of Germany"]
        alone = [[p.id for p in retriever.search([q], 1)[0]] for q in queries]
        together = [[p.id for p in passages] for passages in retriever.search(queries, 1)]
        assert together == alone

    def test_odd_queries_are_answered(self, retriever: Any) -> None:
        """Other scripts, tags, operators and punctuation find something or nothing; they do not fail."""
        odd = ["首都", "<search> x </search>", 'AND OR NOT ("', "contents:foo^2 [a TO b]", "!!!", "é" * 300, "🎉"]
        found = retriever.search(odd, 2)
        assert len(found) == len(odd)
        assert all(len(passages) <= 2 for passages in found)
