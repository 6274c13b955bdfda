import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_plugins.core.errors import RequestRejectedError
from rlinf_verl.rollout.sampling import SamplingParams, sample


def draw(logits, params, *, seed=0, seen=None, banned=None, raw=False):
    rows = len(logits)
    return sample(
        torch.tensor(logits),
        params,
        [random.Random(seed + i) for i in range(rows)],
        seen=seen or [()] * rows,
        banned=banned or [()] * rows,
        raw_log_probs=raw,
    )


def naive(logits, p: SamplingParams):
    """The distribution one row is sampled from, written out."""
    scores = [x / (p.temperature or 1) for x in logits]
    ids = sorted(range(len(scores)), key=lambda i: -scores[i])
    if p.top_k > 0:
        ids = ids[: p.top_k]
    total = sum(math.exp(scores[i]) for i in ids)
    probability = {i: math.exp(scores[i]) / total for i in ids}
    kept, mass = [], 0.0
    for i in ids:
        if mass >= p.top_p and p.top_p < 1:
            break
        if probability[i] >= p.min_p * probability[ids[0]]:
            kept.append(i)
        mass += probability[i]
    total = sum(probability[i] for i in kept)
    return {i: probability[i] / total for i in kept}


rows = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=12, unique=True)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.5, 1.0, 1.6]),
    top_k=st.sampled_from([0, -1, 1, 3, 50]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
)


@settings(max_examples=200, deadline=None)
@given(logits=rows, p=params, seed=st.integers(0, 99))
def test_log_prob_is_that_of_the_distribution_sampled_from(logits, p, seed):
    got = draw([logits], [p], seed=seed)
    want = naive(logits, p)
    token = int(got.tokens[0])
    assert token in want
    assert float(got.log_probs[0]) == pytest.approx(math.log(want[token]), abs=1e-4)
    raw = torch.log_softmax(torch.tensor(logits), -1)[token]
    assert float(draw([logits], [p], seed=seed, raw=True).log_probs[0]) == pytest.approx(float(raw), abs=1e-5)


def test_draws_have_the_frequencies_of_the_distribution():
    n, logits = 4000, [0.0, 1.0, -1.0, 2.0]
    p = SamplingParams(max_tokens=1, temperature=0.8, top_k=3)
    counts = Counter(draw([logits] * n, [p] * n).tokens.tolist())
    for token, probability in naive(logits, p).items():
        sigma = math.sqrt(n * probability * (1 - probability))
        assert abs(counts[token] - n * probability) < 5 * sigma
    assert counts[2] == 0


def test_a_seeded_row_does_not_depend_on_its_neighbours():
    row, other = [0.1, 0.2, 0.3, 0.4], [3.0, -1.0, 0.0, 1.0]
    p = SamplingParams(max_tokens=1)
    for seed in range(30):
        alone = draw([row], [p], seed=seed)
        rngs = [random.Random(99), random.Random(seed)]
        both = sample(torch.tensor([other, row]), [p, p], rngs, seen=[(), ()], banned=[(), ()], raw_log_probs=False)
        assert int(alone.tokens[0]) == int(both.tokens[1])


def test_mixed_rows_keep_their_own_parameters():
    p = [
        SamplingParams(max_tokens=1, temperature=0),
        SamplingParams(max_tokens=1, top_k=1),
        SamplingParams(max_tokens=1),
    ]
    got = draw([[0.0, 1.0, 3.0]] * 3, p)
    assert got.tokens[:2].tolist() == [2, 2]
    assert float(got.log_probs[1]) == 0.0
    assert float(got.log_probs[0]) == pytest.approx(math.log(math.exp(3) / (1 + math.e + math.exp(3))), abs=1e-6)


def test_repetition_penalty_pushes_seen_tokens_down():
    p = SamplingParams(max_tokens=1, temperature=0, repetition_penalty=2.0)
    assert draw([[1.0, 1.9, -0.1]], [p], seen=[[1]]).tokens.tolist() == [0]
    assert draw([[-1.0, -0.9, -3.0]], [p], seen=[[1]]).tokens.tolist() == [0]


def test_banned_tokens_are_impossible():
    p = SamplingParams(max_tokens=2, min_tokens=1, temperature=0)
    assert draw([[1.0, 9.0]], [p], banned=[[1]]).tokens.tolist() == [0]


@pytest.mark.parametrize("bad", [[float("nan"), 0.0], [float("inf"), 0.0], [float("-inf")] * 2])
def test_a_row_that_is_not_finite_is_marked_and_the_others_are_not(bad):
    got = draw([bad, [0.0, 1.0], [0.0, float("-inf")]], [SamplingParams(max_tokens=1)] * 3)
    assert got.finite.tolist() == [False, True, True]
    assert got.log_probs[1:].isfinite().all()


def test_what_an_agent_loop_sends_is_understood():
    sent = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert SamplingParams.from_request(sent, max_tokens=7).max_tokens == 7
    assert SamplingParams.from_request({"max_new_tokens": 3, "stop": "x"}, max_tokens=7).max_tokens == 3


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"temperature": -0.1}, "temperature=-0.1 must be >= 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9}, "between 0 and max_tokens=5"),
        ({"n": 2}, "n=2"),
    ],
)
def test_bad_parameters_are_named(sent, says):
    with pytest.raises(RequestRejectedError, match=says):
        SamplingParams.from_request(sent, max_tokens=5)
