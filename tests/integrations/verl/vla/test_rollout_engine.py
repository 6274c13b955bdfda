import numpy as np
import pytest
import torch

from rlinf_plugins.core.clock import ManualClock
from rlinf_plugins.core.errors import (
    ConfigError,
    EngineStepError,
    InstructionError,
    NonFiniteLogitsError,
    ObservationError,
    RequestRejectedError,
    WeightsNotLoadedError,
)
from rlinf_plugins.models.openvla import Sampling
from rlinf_verl.vla.rollout_engine import sampling_of


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    ended = {}
    while engine.busy:
        ended |= {d.request_id: d for d in engine.step()}
    return ended


def test_a_batch_of_unlike_requests_equals_the_singles(make_policy_engine, observation):
    asked = [observation(str(i), i, "push the cube" + " to the far left" * (i % 3)) for i in range(4)]
    together = run(make_policy_engine(), *asked)
    for request in asked:
        alone = run(make_policy_engine(), request)[request.id]
        got = together[request.id]
        assert np.array_equal(got.tokens, alone.tokens)
        assert np.allclose(got.log_probs, alone.log_probs, atol=1e-5)
        assert np.allclose(got.values, alone.values, atol=1e-5)


def test_log_probs_and_values_are_those_of_training(make_policy_engine, observation, vla_policy, vla_processor):
    sampling = Sampling(temperature=1.6, top_k=20)
    request = observation("a", 3, sampling=sampling)
    got = run(make_policy_engine(), request)["a"]
    inputs = vla_processor([request.instruction], [list(request.images)])
    with torch.no_grad():
        new = vla_policy(**inputs.kwargs(), tokens=torch.from_numpy(got.tokens)[None], sampling=sampling)
    assert np.allclose(got.log_probs, new.log_probs[0].numpy(), atol=1e-5)
    assert np.allclose(got.values, new.values[0].numpy(), atol=1e-5)
    assert got.prompt == inputs.input_ids[0].tolist()
    assert np.array_equal(got.actions, vla_processor.actions(torch.from_numpy(got.tokens)[None])[0])


def test_requests_wait_for_company_up_to_the_bound(make_policy_engine, observation):
    clock = ManualClock()
    engine = make_policy_engine(max_batch=3, max_wait_s=0.5, clock=clock)
    engine.submit(observation("a"))
    clock.advance(0.2)
    engine.submit(observation("b"))
    assert engine.delay == pytest.approx(0.3)
    clock.advance(0.4)
    assert engine.delay == 0
    engine.submit(observation("c"))
    assert len(engine.step()) == 3
    for name in "defg":
        engine.submit(observation(name))
    assert engine.delay == 0
    assert [d.request_id for d in engine.step()] == ["d", "e", "f"]
    assert engine.delay == pytest.approx(0.5)


def test_settings_are_not_mixed_in_one_forward(make_policy_engine, observation):
    greedy, drawn = Sampling(greedy=True), Sampling(temperature=2.0)
    both = run(make_policy_engine(), observation("g", sampling=greedy), observation("d", sampling=drawn))
    alone = run(make_policy_engine(), observation("g", sampling=greedy))
    assert np.array_equal(both["g"].tokens, alone["g"].tokens)
    assert not np.array_equal(both["d"].tokens, both["g"].tokens)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"instruction": "  "}, InstructionError),
        ({"images": []}, ObservationError),
        ({"images": [np.zeros((32, 32), np.uint8)]}, ObservationError),
        ({"images": [np.zeros((32, 32, 3), np.float64)]}, ObservationError),
    ],
)
def test_a_bad_observation_fails_alone(make_policy_engine, observation, changes, error):
    ended = run(make_policy_engine(), observation("good"), observation("bad", **changes))
    assert isinstance(ended["bad"].error, error)
    assert ended["bad"].finish == "failed"
    assert ended["good"].error is None


def test_a_raising_policy_is_the_reason_given(make_policy_engine, observation, vla_policy, monkeypatch):
    engine = make_policy_engine()
    with monkeypatch.context() as patch:
        patch.setattr(vla_policy, "act", lambda *a, **k: {}["gone"])
        ended = run(engine, observation("a"), observation("b"))
    assert all(isinstance(d.error, EngineStepError) for d in ended.values())
    assert isinstance(ended["a"].error.__cause__, KeyError)
    assert run(engine, observation("a"))["a"].error is None


def test_values_that_are_not_finite_fail_the_request(make_policy_engine, observation, vla_policy):
    with torch.no_grad():
        for parameter in vla_policy.value_head.parameters():
            parameter.fill_(float("nan"))
    assert isinstance(run(make_policy_engine(), observation("a"))["a"].error, NonFiniteLogitsError)


def test_abort_gives_requests_back(make_policy_engine, observation):
    engine = make_policy_engine()
    for name in "abc":
        engine.submit(observation(name))
    assert [d.finish for d in engine.abort(["b"])] == ["aborted"]
    assert sorted(d.request_id for d in engine.step()) == ["a", "c"]


def test_without_weights_nothing_is_decided(make_policy_engine, observation):
    with pytest.raises(WeightsNotLoadedError):
        make_policy_engine(loaded=False).submit(observation("a"))


def test_verls_sampling_parameters_are_translated():
    assert sampling_of({"temperature": 1.6, "top_k": -1, "top_p": 1.0}) == Sampling(temperature=1.6)
    assert sampling_of({"temperature": 0, "top_k": 50}) == Sampling(greedy=True, top_k=50)
    with pytest.raises(RequestRejectedError, match=r"top_p=0\.9"):
        sampling_of({"top_p": 0.9})
    with pytest.raises(ConfigError):
        sampling_of({"temperature": -1.0})
