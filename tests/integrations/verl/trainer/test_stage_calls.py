import pytest

from rlinf_plugins.core.clock import ManualClock
from rlinf_verl.trainer.measured import longest_by_prompt, prompts_in
from rlinf_verl.trainer.stage_calls import StageCalls


@pytest.fixture
def step():
    clock, waited = ManualClock(), [0.0]
    return StageCalls(lambda: waited[0], clock), clock, waited


def seconds(spans):
    return [(span.attributes["stage"], span.attributes["items"], span.attributes["seconds"]) for span in spans]


def test_waiting_for_devices_is_not_the_stages_time(step):
    calls, clock, waited = step
    with calls.call("actor", 4, 2):
        waited[0] += 3.0
        clock.advance(5.0)
    (span,) = calls.take(7)
    assert span.seconds == 5.0
    assert span.attributes == {"stage": "actor", "items": 4, "devices": 2, "seconds": 2.0, "step": 7}


def test_preparation_counts_for_the_next_call_and_the_end_for_all_calls_by_their_items(step):
    calls, clock, waited = step
    with calls.preparing():
        clock.advance(1.0)
    for items in (1, 3):
        with calls.call("actor", items, 1):
            clock.advance(2.0)
    with calls.finishing("actor"):
        waited[0] += 10.0
        clock.advance(18.0)
    assert seconds(calls.take(1)) == [("actor", 1, 2 + 1 + 2), ("actor", 3, 2 + 6)]
    assert calls.take(2) == []


def test_what_raises_or_has_no_prompts_is_no_sample(step):
    calls, clock, _ = step
    with pytest.raises(RuntimeError), calls.call("actor", 1, 1):
        raise RuntimeError
    with calls.call("actor", 0, 1):  # rows that only pad a batch
        clock.advance(1.0)
    assert calls.take(1) == []


def test_prompts_and_their_longest_trajectories_are_counted_without_padding():
    keys = ["a_0_0", "a_0_1", "a_1_0", "b_0_0", "c_0_0"]
    tags = [{"response_len": n} for n in (3, 4, 5, 0)] + [{"response_len": 99, "is_padding": True}]
    assert prompts_in(keys, tags) == 2
    assert longest_by_prompt(keys, tags) == [7.0, 1.0]  # an empty answer still takes a step
