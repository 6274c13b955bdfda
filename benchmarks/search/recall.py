"""Answer string in the top 1, 3 and 10 passages for real HotpotQA questions, by retriever.

Usage: python benchmarks/search/recall.py [ENCODER_FOLDER]
"""

import json
import os
import re
import sys
import tempfile
import time

from common import CORPUS

from rlinf_plugins.tools.index import IndexConfig, open_index


def holds(contents: str, answer: str) -> bool:
    """Whether the answer stands in the passage, letters and digits only."""
    plain = [re.sub(r"\W+", " ", text.lower()).strip() for text in (contents, answer)]
    return plain[1] in plain[0]


def main(model: str | None) -> None:
    """Print one line per retriever."""
    rows = [json.loads(line) for line in (CORPUS.parent / "train_400.jsonl").open(encoding="utf-8")]
    ways: list[tuple[str, str, dict]] = [
        ("bm25 k1=.9 b=.4", "bm25", {}),
        ("bm25 k1=1.5 b=.75", "bm25", {"k1": 1.5, "b": 0.75}),
    ]
    ways.append(("tantivy", "tantivy", {}))
    if model:
        ways.append(("dense", "dense", {"encoder": {"model": model}}))
    folder = os.environ.get("INDEX", tempfile.mkdtemp())
    for title, name, options in ways:
        begin = time.process_time()
        retriever = open_index(IndexConfig(corpus=str(CORPUS), index=folder, retriever=name, options=options))
        built = time.process_time() - begin
        begin = time.process_time()
        found = retriever.search([row["question"] for row in rows], 10)
        per_query = 1e3 * (time.process_time() - begin) / len(rows)
        hits = {
            k: sum(any(holds(p.contents, row["answer"]) for p in ps[:k]) for row, ps in zip(rows, found, strict=True))
            for k in (1, 3, 10)
        }
        shares = "  ".join(f"top {k} {hits[k] / len(rows):.3f}" for k in hits)
        print(
            f"{title:20s} {shares}  {per_query:6.2f} CPU ms/query in one batch, opened in {built:.0f} CPU s", flush=True
        )
        retriever.close()


main(sys.argv[1] if len(sys.argv) > 1 else None)
