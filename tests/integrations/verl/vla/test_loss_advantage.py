"""Rows of many episodes, shuffled, to advantages per token."""

import random

import pytest
import torch

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.vla.loss_advantage import row_advantages
from rlinf_verl.vla.loss_gae import EpisodeValues, episode_gae, normalise
from rlinf_verl.vla.loss_value import value_loss, value_options

CHUNK, DIM = 2, 3


def row(key, rewards, values, *, valid=(1, 1), final=0.0, terminated=False):
    return key, {
        "response_mask": torch.tensor(valid).repeat_interleave(DIM),
        "chunk_rewards": torch.tensor(rewards),
        "chunk_valid": torch.tensor(valid).bool(),
        "rollout_values": torch.tensor(values),
        "final_values": torch.full((len(values),), final),
        "terminated": torch.tensor([terminated]),
    }


def rows():
    return [
        row("a_0_0", [0.0, 0.5], [0.3]),
        row("a_0_1", [0.1, 0.2], [0.4]),
        row("a_0_2", [1.0, 0.0], [0.9], valid=(1, 0), terminated=True, final=7.0),
        row("a_1_0", [0.0, 0.0], [0.2], final=0.6),
        row("b_0_0", [-0.5, 0.0], [0.1], terminated=True),
    ]


def estimate(given, bootstrap="standard"):
    columns = {name: [fields[name] for _, fields in given] for name in given[0][1]}
    return row_advantages([key for key, _ in given], columns, gamma=0.9, lam=0.8, bootstrap=bootstrap)


def test_episodes_are_found_whatever_the_order(seed):
    given = rows()
    fields, metrics = estimate(given)
    shuffled = random.Random(seed).sample(range(5), 5)
    again, _ = estimate([given[i] for i in shuffled])
    for name in fields:
        for place, row_number in enumerate(shuffled):
            assert torch.allclose(again[name][place], fields[name][row_number], atol=1e-6)
    first = EpisodeValues(
        rewards=torch.tensor([[0.0, 0.5], [0.1, 0.2], [1.0, 0.0]]),
        valid=torch.tensor([[True, True], [True, True], [True, False]]),
        values=torch.tensor([[0.3], [0.4], [0.9]]),
        final=torch.tensor([7.0]),
        terminated=True,
    )
    _, returns = episode_gae(first, 0.9, 0.8)
    assert torch.allclose(torch.stack(fields["chunk_returns"][:3]), returns)
    assert metrics["value/returns_mean"] == pytest.approx(torch.cat(fields["chunk_returns"]).mean().item(), abs=1e-6)


def test_advantages_are_normalised_over_decisions_and_masked_per_token():
    fields, _ = estimate(rows())
    per_decision = torch.stack([a[0] for a in fields["advantages"]])
    assert per_decision.mean() == pytest.approx(0.0, abs=1e-5)
    assert per_decision.std(unbiased=False) == pytest.approx(1.0, abs=1e-3)
    assert fields["advantages"][2].tolist()[DIM:] == [0.0] * DIM
    assert len(set(fields["advantages"][0].tolist())) == 1


def test_truncation_takes_what_was_left_behind_and_termination_only_if_asked():
    given = rows()
    standard, _ = estimate(given)
    always, _ = estimate(given, "always")
    assert standard["chunk_returns"][3].item() == pytest.approx(0.9 * 0.6)
    assert standard["chunk_returns"][2].item() == pytest.approx(1.0)
    assert always["chunk_returns"][2].item() == pytest.approx(1.0 + 0.9 * 7.0)


def test_rows_added_by_the_trainer_get_zeros_and_change_nothing():
    given = rows()
    fields, _ = estimate(given)
    key, filler = row("filler_0_0", [9.0, 9.0], [9.0])
    filler["response_mask"] = torch.zeros(1, dtype=torch.int64)
    with_filler, _ = estimate([*given, (key, filler)])
    assert with_filler["advantages"][5].tolist() == [0.0]
    assert with_filler["chunk_returns"][5].tolist() == [0.0]
    for name in fields:
        for before, after in zip(fields[name], with_filler[name], strict=False):
            assert torch.equal(before, after)


def test_one_value_per_step_gives_each_its_own_advantage():
    given = [row("a_0_0", [0.0, 1.0], [0.2, 0.4]), row("a_0_1", [0.5, 0.0], [0.1, 0.3], valid=(1, 0), terminated=True)]
    fields, _ = estimate(given)
    first, second = fields["advantages"][0].view(CHUNK, DIM)
    assert len(set(first.tolist())) == len(set(second.tolist())) == 1
    assert first[0] != second[0]
    assert fields["chunk_returns"][1].tolist()[1] == 0.0
    (plain,), _ = (
        normalise([torch.tensor([[1.0], [3.0]])], [torch.ones(2, 1, dtype=torch.bool)]),
        None,
    )
    assert plain.flatten().tolist() == pytest.approx([-1.0, 1.0], abs=1e-4)


def test_options_are_read_from_the_model_overrides():
    options = value_options({"attn_implementation": "sdpa", "value_lr": 3e-3, "value_bootstrap": "always"})
    assert (options.value_lr, options.value_bootstrap, options.value_huber) == (3e-3, "always", 10.0)
    with pytest.raises(ConfigError, match="value_huber must be positive, got 0"):
        value_options({"value_huber": 0.0})
    with pytest.raises(ConfigError, match="value_clip must not be negative"):
        value_options({"value_clip": -0.1})
    with pytest.raises(ConfigError, match="value_bootstrap"):
        value_options({"value_bootstrap": "never"})


def test_the_value_loss_does_not_depend_on_micro_batches(seed):
    generator = torch.Generator().manual_seed(seed)
    values, returns, old = (torch.randn(6, 2, generator=generator) for _ in range(3))
    masks = [torch.tensor([1, 1, 1, 0, 0, 0]) if i % 2 else torch.ones(6, dtype=torch.long) for i in range(6)]
    total = sum(1 if i % 2 else 2 for i in range(6))

    def part(rows):
        fields = {
            "chunk_returns": returns[rows],
            "rollout_values": old[rows],
            "response_mask": torch.nested.as_nested_tensor([masks[i] for i in rows], layout=torch.jagged),
        }
        return value_loss(values[rows], fields, value_options({}), total, 1)[0]

    whole = part(list(range(6)))
    assert torch.allclose(whole, part([0, 1]) + part([2, 3, 4, 5]))
