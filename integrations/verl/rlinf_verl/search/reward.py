"""Rewards for question answering: veRL's exact match, and Search-R1's variant that also pays for the format.

Both look at the response alone. ``actor_rollout_ref`` data of the seven ``searchR1_*`` sources needs neither: veRL
scores it by exact match itself.
"""

import re
from typing import Any

from rlinf_verl.search.actions import final_answer

_TAG = re.compile(r"<(/?)(think|search|information|answer)>")

_NEXT = {
    "start": {"think"},
    "think": {"search", "answer"},
    "search": {"information"},
    "information": {"think"},
    "answer": set[str](),
}
"""Which span may follow which; only white space may stand between them."""


def is_well_formed(response: str) -> bool:
    """Say whether a response is a chain of think, search, information, think, ..., answer, each closed in order."""
    state, position, open_tag = "start", 0, ""
    for tag in _TAG.finditer(response):
        closing, name = bool(tag[1]), tag[2]
        if open_tag:
            if not closing or name != open_tag:
                return False
            state, open_tag = name, ""
        else:
            if closing or name not in _NEXT[state] or response[position : tag.start()].strip():
                return False
            open_tag = name
        position = tag.end()
    return state == "answer" and not open_tag


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: dict[str, Any] | str,
    extra_info: dict[str, Any] | None = None,
    *,
    well_formed: float = 0.2,
    answered: float = 0.1,
    **_: Any,
) -> dict[str, float]:
    """Exact match with credit for the format (Search-R1's ``qa_em_format``); veRL's reward-function contract.

    Right and well formed 1, right otherwise ``1 - well_formed``, wrong but well formed ``well_formed``, wrong
    otherwise ``answered``, no answer 0.

    Args:
        data_source: Not used: the caller chose this reward.
        solution_str: The response, observations included.
        ground_truth: ``{"target": [answers]}``, or one answer.
        extra_info: Not used.
        well_formed: Worth of the format.
        answered: Worth of any answer.
        **_: What else veRL passes.

    Returns:
        ``score``, ``acc`` (exact match) and ``format`` (well formed), each a float.
    """
    answer = final_answer(solution_str)
    formed = is_well_formed(_without_special_tokens(solution_str))
    right = answer is not None and matches(answer, ground_truth)
    if answer is None:
        score = 0.0
    elif right:
        score = 1.0 if formed else 1.0 - well_formed
    else:
        score = well_formed if formed else answered
    return {"score": score, "acc": float(right), "format": float(formed)}


def compute_score_answered(
    data_source: str,
    solution_str: str,
    ground_truth: dict[str, Any] | str,
    extra_info: dict[str, Any] | None = None,
    *,
    answered: float = 0.1,
    **_: Any,
) -> dict[str, float]:
    """Exact match, plus ``answered`` for giving an answer at all; for small models that first must learn to."""
    answer = final_answer(solution_str)
    right = answer is not None and matches(answer, ground_truth)
    return {"score": float(right) + answered * (answer is not None), "acc": float(right), "format": float(bool(answer))}


def matches(answer: str, ground_truth: dict[str, Any] | str) -> bool:
    """Say whether ``answer`` equals one of the golden answers after veRL's normalisation."""
    from verl.utils.reward_score.search_r1_like_qa_em import em_check

    target = ground_truth["target"] if isinstance(ground_truth, dict) else ground_truth
    golden = [target] if isinstance(target, str) else [str(one) for one in target]  # parquet gives numpy arrays
    return bool(em_check(answer, golden))


def _without_special_tokens(text: str) -> str:
    return re.sub(r"<\|[a-z_]+\|>", "", text)
