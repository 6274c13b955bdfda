"""Question files to veRL's parquet, in Search-R1's columns; Search-R1's own parquet needs no preparation."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rlinf_plugins.core.errors import ConfigError, CorpusError, MissingAssetError
from rlinf_verl.search.actions import PROMPT

DATA_SOURCE = "searchR1_hotpotqa"
"""A source that veRL scores by exact match."""

_ANSWER_KEYS = ("golden_answers", "answers", "answer")


def read_questions(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (question, golden answers) from a jsonl file with ``question`` and ``answer`` (or ``golden_answers``).

    Raises:
        MissingAssetError: There is no such file.
        CorpusError: A line lacks one of them or is not JSON; the message names it.
    """
    if not path.is_file():
        raise MissingAssetError(f"no question file at {path}")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _question(line, f"{path}, line {number}")


def row(
    question: str, answers: list[str], *, split: str, index: int, template: str = PROMPT, source: str = DATA_SOURCE
) -> dict[str, Any]:
    """Return one row of a data set; ``template`` holds ``{question}`` once."""
    return {
        "data_source": source,
        "agent_name": "search_r1",
        "prompt": [{"role": "user", "content": template.replace("{question}", question)}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": split, "index": index},
    }


def prepare(
    questions: Path, folder: Path, *, test_rows: int, template: str = PROMPT, source: str = DATA_SOURCE
) -> dict[str, int]:
    """Write ``train.parquet`` and ``test.parquet``; the last ``test_rows`` questions are the test set.

    Returns:
        The number of rows per split.

    Raises:
        ConfigError: The template lacks ``{question}``, or no question would be left to train on.
    """
    if template.count("{question}") != 1:
        raise ConfigError(f"the prompt template must hold {{question}} exactly once, got {template[:80]!r}")
    found = list(read_questions(questions))
    if not 0 <= test_rows < len(found):
        raise ConfigError(f"test_rows={test_rows} leaves nothing to train on: {questions} holds {len(found)} questions")
    cut = len(found) - test_rows
    sizes = {}
    for split, part in (("train", found[:cut]), ("test", found[cut:])):
        rows = [
            row(question, answers, split=split, index=index, template=template, source=source)
            for index, (question, answers) in enumerate(part)
        ]
        write(rows, folder / f"{split}.parquet")
        sizes[split] = len(rows)
    return sizes


def write(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write rows as parquet."""
    import pandas

    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(list(rows)).to_parquet(path)


def _question(line: bytes, where: str) -> tuple[str, list[str]]:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorpusError(f"{where} is not JSON: {error}") from error
    question = record.get("question") if isinstance(record, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise CorpusError(f"{where} has no text under 'question'")
    answers = next((record[key] for key in _ANSWER_KEYS if key in record), None)
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise CorpusError(f"{where} has no text under any of {', '.join(_ANSWER_KEYS)}")
    return question.strip(), answers
