import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf_plugins.core.errors import (
    EngineStepError,
    NonFiniteLogitsError,
    RequestRejectedError,
    WeightsNotLoadedError,
)
from rlinf_verl.rollout.engine import Request
from rlinf_verl.rollout.sampling import SamplingParams


@pytest.fixture(scope="module")
def model_f64(make_model):
    return make_model(dtype=torch.float64)


def prompts_of(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, 61) for _ in range(n)] for n in lengths]


def test_unequal_prompts_give_the_log_probs_of_a_teacher_forced_forward(make_engine, request_for, run, teacher):
    engine = make_engine(max_rows=4)
    prompts = prompts_of([1, 30, 7, 7, 19, 2, 40])
    temperatures = [1.0, 0.6, 1.7, 1.0, 0, 1.0, 0.9]
    ended = run(
        engine,
        *(
            request_for(str(i), p, max_tokens=5 + 4 * i, temperature=t, seed=i)
            for i, (p, t) in enumerate(zip(prompts, temperatures, strict=True))
        ),
    )
    assert len(ended) == len(prompts)
    for i, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
        got = ended[str(i)]
        logits = teacher(engine._model, prompt, got.token_ids)
        want = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        want = want.gather(-1, torch.tensor(got.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(got.log_probs).double(), want, atol=1e-5, rtol=0)


def test_greedy_takes_the_likeliest_token(make_engine, request_for, run, teacher):
    engine = make_engine()
    prompts = prompts_of([3, 11])
    ended = run(engine, *(request_for(str(i), p, temperature=0) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        tokens = ended[str(i)].token_ids
        assert tokens == teacher(engine._model, prompt, tokens).argmax(-1).tolist()


def test_equal_prompts_are_computed_once_and_sampled_apart(make_engine, request_for, run, monkeypatch):
    engine = make_engine()
    seen = []
    plain = engine._batch._forward
    monkeypatch.setattr(
        engine._batch, "_forward", lambda **kw: seen.append(tuple(kw["input_ids"].shape)) or plain(**kw)
    )
    ended = run(engine, *(request_for(str(i), [5, 6, 7], max_tokens=6, seed=i) for i in range(4)))
    assert seen[0] == (1, 3)
    assert len({tuple(g.token_ids) for g in ended.values()}) > 1


def test_eos_stop_ids_and_length_end_a_request_and_say_so(make_engine, request_for, run):
    free = run(make_engine(), request_for("a", [9, 8], max_tokens=20, temperature=0, ignore_eos=True))["a"]
    assert (len(free.token_ids), free.finish) == (20, "length")
    stop = free.token_ids[6]
    first = free.token_ids.index(stop) + 1
    cut = run(make_engine(), request_for("a", [9, 8], 20, temperature=0, ignore_eos=True, stop_token_ids=[stop]))["a"]
    assert (cut.token_ids, cut.finish) == (free.token_ids[:first], "stop")
    eos = run(make_engine(eos_ids=frozenset({stop})), request_for("a", [9, 8], 20, temperature=0))["a"]
    assert (eos.token_ids, eos.finish) == (free.token_ids[:first], "stop")


def test_min_tokens_keeps_the_stop_away(make_engine, request_for, run):
    stop = run(make_engine(), request_for("a", [9, 8], 1, temperature=0, ignore_eos=True))["a"].token_ids[0]
    engine = make_engine(eos_ids=frozenset({stop}))
    assert len(run(engine, request_for("a", [9, 8], 9, temperature=0))["a"].token_ids) == 1
    later = run(engine, request_for("a", [9, 8], 9, temperature=0, min_tokens=4))["a"].token_ids
    assert len(later) >= 4
    assert stop not in later[:4]


def test_stop_string_ends_at_the_token_that_completes_it(make_engine, request_for, run):
    engine = make_engine(decode=lambda tokens: "".join(f"<{t}>" for t in tokens))
    free = run(engine, request_for("a", [9, 8], 10, temperature=0, ignore_eos=True))["a"].token_ids
    text = f"{free[2]}><{free[3]}"
    cut = run(engine, request_for("b", [9, 8], 10, temperature=0, ignore_eos=True, stop=text))["b"]
    assert (cut.token_ids, cut.finish) == (free[:4], "stop")


def test_the_models_length_is_the_last_bound(make_engine, request_for, run):
    got = run(make_engine(max_length=10), request_for("a", [5] * 6, max_tokens=50, ignore_eos=True))["a"]
    assert (len(got.token_ids), got.finish) == (4, "length")


def test_late_requests_join_and_short_ones_leave_first(make_engine, request_for):
    engine = make_engine(max_rows=2)
    for name, tokens in (("long", 12), ("short", 2), ("late", 2)):
        engine.submit(request_for(name, [5, 6, 7], max_tokens=tokens, ignore_eos=True))
    order = []
    while engine.busy:
        order += [g.request_id for g in engine.step()]
    assert order == ["short", "late", "long"]
    assert engine.cache_bytes == 0


def test_abort_returns_what_there_is(make_engine, request_for):
    engine = make_engine(max_rows=1)
    engine.submit(request_for("runs", [5, 6], max_tokens=50, ignore_eos=True))
    engine.submit(request_for("waits", [5, 6], max_tokens=50))
    for _ in range(4):
        engine.step()
    ended = {g.request_id: g for g in engine.abort()}
    assert {name: (len(g.token_ids), len(g.log_probs), g.finish) for name, g in ended.items()} == {
        "runs": (4, 4, "aborted"),
        "waits": (0, 0, "aborted"),
    }
    assert not engine.busy


def test_abort_of_one_leaves_the_others_as_they_were(make_engine, request_for, run):
    prompts = prompts_of([4, 9, 6])
    alone = run(make_engine(), request_for("2", prompts[2], 15, temperature=0, ignore_eos=True))["2"]
    engine = make_engine()
    for i, prompt in enumerate(prompts):
        engine.submit(request_for(str(i), prompt, 15, temperature=0, ignore_eos=True))
    engine.step()
    assert [g.request_id for g in engine.abort(["1"])] == ["1"]
    assert run(engine)["2"].token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], {}, "empty"),
        ([5, 61], {}, "61 is outside"),
        ([-1], {}, "-1 is outside"),
        ([5] * 120, {}, "no room"),
        ([5], {"stop": ["x"]}, "tokenizer"),
    ],
)
def test_a_request_that_cannot_be_served_is_rejected_alone(make_engine, request_for, run, prompt, params, says):
    engine = make_engine()
    engine.submit(request_for("good", [5, 6], 3))
    with pytest.raises(RequestRejectedError, match=says):
        engine.submit(request_for("bad", prompt, **params))
    assert set(run(engine)) == {"good"}


def test_a_row_with_nan_logits_fails_alone(make_engine, request_for, run, monkeypatch):
    engine = make_engine()
    plain = engine._batch._forward

    def poisoned(**inputs):
        logits = plain(**inputs)
        if len(logits) > 1 and engine._rows:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(engine._batch, "_forward", poisoned)
    ended = run(engine, *(request_for(str(i), [5, 6 + i], 3, ignore_eos=True) for i in range(2)))
    assert isinstance(ended["1"].error, NonFiniteLogitsError)
    assert ended["1"].finish == "failed"
    assert ended["0"].error is None
    assert len(ended["0"].token_ids) == 3


def test_a_raising_prefill_spares_the_running(make_engine, request_for, run, monkeypatch):
    engine = make_engine()
    engine.submit(request_for("runs", [5, 6], 5, ignore_eos=True))
    engine.step()
    plain = engine._batch._forward

    def raises_on_prompts(**inputs):
        if inputs["input_ids"].shape[1] > 1:
            raise MemoryError("no room")
        return plain(**inputs)

    monkeypatch.setattr(engine._batch, "_forward", raises_on_prompts)
    ended = run(engine, request_for("joins", [5, 6, 7], 5))
    assert isinstance(ended["joins"].error, EngineStepError)
    assert isinstance(ended["joins"].error.__cause__, MemoryError)
    assert (ended["runs"].error, len(ended["runs"].token_ids)) == (None, 5)


def test_a_raising_decode_ends_the_batch_and_the_engine_lives(make_engine, request_for, run, monkeypatch):
    engine = make_engine()
    engine.submit(request_for("runs", [5, 6], 5, ignore_eos=True))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._batch, "_forward", lambda **kw: 1 / 0)
        (dead,) = engine.step()
    assert isinstance(dead.error, EngineStepError)
    assert run(engine, request_for("next", [5, 6], 5, ignore_eos=True))["next"].error is None


def test_without_weights_nothing_is_generated(make_engine, request_for):
    with pytest.raises(WeightsNotLoadedError, match="never synced"):
        make_engine(loaded=False).submit(request_for("a", [5]))


def test_generation_follows_weights_written_in_place(make_engine, make_model, request_for, run, teacher):
    engine = make_engine()
    run(engine, request_for("old", [5, 6], 8, temperature=0))
    with torch.no_grad():
        for mine, other in zip(engine._model.parameters(), make_model(seed=1).parameters(), strict=True):
            mine.copy_(other)
    got = run(engine, request_for("new", [5, 6], 8, temperature=0))["new"]
    assert got.token_ids == teacher(make_model(seed=1), [5, 6], got.token_ids).argmax(-1).tolist()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule_gives_each_request_what_it_gets_alone(data, make_engine, model_f64, run):
    """Joins, leaves and aborts of others never change a seeded request; in float64 not even by rounding."""
    engine = make_engine(model_f64, max_rows=data.draw(st.integers(1, 4)))
    prompts = st.lists(st.integers(3, 60), min_size=1, max_size=20)
    pending = data.draw(st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=1, max_size=8))
    ended, asked = {}, {}
    for i, (prompt, tokens) in enumerate(pending):
        params = SamplingParams(max_tokens=tokens, seed=i, top_k=data.draw(st.sampled_from([0, 5])))
        asked[str(i)] = Request(id=str(i), prompt=prompt, params=params)
        engine.submit(asked[str(i)])
        for _ in range(data.draw(st.integers(0, 4))):
            ended |= {g.request_id: g for g in engine.step()}
        if data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(sorted(asked)))
            ended |= {g.request_id: g for g in engine.abort([victim])}
    while engine.busy:
        ended |= {g.request_id: g for g in engine.step()}
    assert set(ended) == set(asked)
    for name, got in ended.items():
        want = run(make_engine(model_f64), asked[name])[name]
        n = len(got.token_ids)
        assert got.token_ids == want.token_ids[:n]
        assert got.log_probs == pytest.approx(want.log_probs[:n], abs=1e-6)
        assert got.finish in (want.finish, "aborted")
