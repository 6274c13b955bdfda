"""The Search-R1 text protocol: actions, observations and the prompt. Pure text; tokens are in :mod:`.tokens`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from rlinf_plugins.tools.results import Passage

# The innermost complete span, so that a tag which was opened and abandoned does not swallow what follows it.
_ACTION = re.compile(r"<(search|answer)>((?:(?!<(?:search|answer)>).)*?)</\1>", re.DOTALL)
_PROTOCOL_TAG = re.compile(r"<(/?\s*(?:search|answer|information|think|tool_call|tool_response)\s*)>", re.IGNORECASE)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

STOP_STRINGS = ("</search>", "</answer>")

OBSERVATION_HEAD = "\n\n<information>"
OBSERVATION_TAIL = "</information>\n\n"

INVALID_ACTION = (
    "\n\nThat step held no valid action. To look something up, end the step with one query between <search> and "
    "</search>. To finish, end it with the final answer between answer tags in the same way. Try again.\n\n"
)
"""Holds no answer tag on purpose: veRL's reward reads the last answer span of the whole response, observed or not."""

PROMPT = (
    "Answer the question below. Whenever you receive new information, first reason inside <think> and </think>. "
    "If you find that you lack knowledge, you can call a search engine by <search> query </search>, and it returns "
    "the best passages between <information> and </information>. Search as often as you need. As soon as nothing "
    "more has to be looked up, give the answer itself inside <answer> and </answer>, without explanation, for "
    "example <answer> Beijing </answer>. Question: {question}\n"
)
"""Prompt for questions that come without one; a data set that holds its own prompts keeps them."""


class ActionKind(StrEnum):
    """What a turn asked for."""

    SEARCH = "search"
    ANSWER = "answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One complete span.

    Attributes:
        kind: Search or answer.
        text: What stands between the tags, stripped.
        end: Character after the closing tag.
    """

    kind: ActionKind
    text: str
    end: int


def actions(text: str) -> list[Action]:
    """Return all complete actions in ``text``, in order."""
    return [
        Action(kind=ActionKind(match[1]), text=match[2].strip(), end=match.end()) for match in _ACTION.finditer(text)
    ]


def chosen_action(text: str, match: Literal["first", "last"]) -> Action | None:
    """Return the first or last complete action, or None where the turn holds none."""
    found = actions(text)
    if not found:
        return None
    return found[0] if match == "first" else found[-1]


def final_answer(response: str) -> str | None:
    """Return the last answer span of a response, as veRL's Search-R1 reward does, or None."""
    found = _ANSWER.findall(response)
    return found[-1].strip() if found else None


def documents(passages: Sequence[Passage]) -> str:
    """Return the passages as an observation shows them: ``Doc 1(Title: "...") text`` and a newline each.

    Tags of the protocol inside a passage lose their brackets: a passage must neither close the observation nor hand
    the reward an answer.
    """
    lines = []
    for number, passage in enumerate(passages, start=1):
        title, text = neutral(passage.title), neutral(passage.text)
        lines.append(f'Doc {number}(Title: "{title}") {text}' if title else f"Doc {number} {text}")
    return "\n".join(lines)


def neutral(text: str) -> str:
    """Return ``text`` with the protocol's own tags made harmless (``<answer>`` becomes ``(answer)``)."""
    return _PROTOCOL_TAG.sub(r"(\1)", text)
