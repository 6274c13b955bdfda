"""A step's searches as metrics; a step whose searches mostly failed stops the job."""

import pytest

from rlinf_plugins.core.errors import RolloutFailedError
from rlinf_verl.search.metrics import search_metrics


def row(calls=1, failure="", end="answer", wait=0.5):
    return {
        "search_calls": calls,
        "search_invalid_actions": 0,
        "search_cut_observations": 1,
        "search_wait_s": wait,
        "search_failure": failure,
        "search_end": end,
    }


def test_means_ends_and_failures_without_padding():
    rows = [row(2), row(1, end="budget", wait=1.5), row(0, "timeout", "tool_failed"), row(9), {"other": 1}]
    tags = [{}, {}, {}, {"is_padding": True}, {}]
    assert search_metrics(tags, rows, 0.5) == {
        "search/calls/mean": 1.0,
        "search/calls/max": 2.0,
        "search/invalid_actions/mean": 0.0,
        "search/invalid_actions/max": 0.0,
        "search/cut_observations/mean": 1.0,
        "search/cut_observations/max": 1.0,
        "search/wait_s/mean": pytest.approx(2.5 / 3),
        "search/wait_s/max": 1.5,
        "search/end/answer": pytest.approx(1 / 3),
        "search/end/budget": pytest.approx(1 / 3),
        "search/end/tool_failed": pytest.approx(1 / 3),
        "search/failed/timeout": 1.0,
        "search/failed_fraction": pytest.approx(1 / 3),
    }


def test_jobs_that_do_not_search_have_none():
    assert search_metrics([{}], [{"turn_scores": []}], 0.0) == {}


def test_rows_of_the_native_tool_count_their_failures():
    assert search_metrics([{}, {}], [{"search_failure": ""}] * 2, 0.5) == {"search/failed_fraction": 0.0}


def test_more_failures_than_allowed_stop_the_job_with_their_kinds():
    rows = [row(failure="unavailable")] * 3 + [row(failure="timeout"), row(), row()]
    with pytest.raises(RolloutFailedError, match=r"4 of 6 .*=0\.5 allows: unavailable \(3\), timeout \(1\)"):
        search_metrics([{}] * 6, rows, 0.5)
    assert search_metrics([{}] * 6, rows, 0.7)["search/failed/unavailable"] == 3
