"""Episode-wise advantages against the sums they abbreviate."""

import pytest
import torch

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.vla.loss_gae import EpisodeValues, episode_gae, normalise, over_tokens


def make(seed, decisions=4, chunk=3, outputs=1, taken_last=2, terminated=False):
    generator = torch.Generator().manual_seed(seed)
    valid = torch.ones(decisions, chunk, dtype=torch.bool)
    valid[-1, taken_last:] = False
    return EpisodeValues(
        rewards=torch.randn(decisions, chunk, generator=generator, dtype=torch.float64) * valid,
        valid=valid,
        values=torch.randn(decisions, outputs, generator=generator, dtype=torch.float64),
        final=torch.randn(outputs, generator=generator, dtype=torch.float64),
        terminated=terminated,
    )


def by_sum(rewards, values, final, gamma, lam):
    """``A_t = sum_k (gamma lam)^k delta_{t+k}``, term by term."""
    following = torch.cat([values[1:], final.view(1)])
    deltas = rewards + gamma * following - values
    steps = len(rewards)
    return torch.stack([sum((gamma * lam) ** k * deltas[t + k] for k in range(steps - t)) for t in range(steps)])


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("bootstrap", ["standard", "always"])
def test_one_value_per_chunk(seed, terminated, bootstrap):
    episode = make(seed, terminated=terminated)
    final = episode.final[0] * (0.0 if terminated and bootstrap == "standard" else 1.0)
    expected = by_sum(episode.rewards.sum(1), episode.values[:, 0], final, 0.99, 0.95)
    advantages, returns = episode_gae(episode, 0.99, 0.95, bootstrap)
    assert torch.allclose(advantages[:, 0], expected)
    assert torch.allclose(returns, advantages + episode.values)


@pytest.mark.parametrize("terminated", [False, True])
def test_one_value_per_step_runs_over_the_steps_that_were_taken(seed, terminated):
    episode = make(seed, outputs=3, terminated=terminated)
    taken = episode.valid.flatten()
    final = episode.final[0] * (0.0 if terminated else 1.0)
    expected = by_sum(episode.rewards.flatten()[taken], episode.values.flatten()[taken], final, 0.9, 0.8)
    advantages, returns = episode_gae(episode, 0.9, 0.8)
    assert torch.allclose(advantages.flatten()[taken], expected)
    assert advantages.flatten()[~taken].tolist() == [0.0]
    assert returns.flatten()[~taken].tolist() == [0.0]


def test_lambda_one_gives_discounted_returns(seed):
    episode = make(seed, terminated=True)
    _, returns = episode_gae(episode, 0.9, 1.0)
    rewards = episode.rewards.sum(1)
    expected = [sum(0.9**k * rewards[t + k] for k in range(4 - t)) for t in range(4)]
    assert torch.allclose(returns[:, 0], torch.stack(expected))


def test_the_step_of_success_counts(seed):
    episode = make(seed, decisions=1, taken_last=1, terminated=True)
    episode.rewards[0, 0] = 5.0
    advantages, _ = episode_gae(episode, 1.0, 1.0)
    assert advantages[0, 0] == 5.0 - episode.values[0, 0]


def test_normalising_ignores_what_was_not_taken():
    advantages = [torch.tensor([[1.0], [100.0]]), torch.tensor([[3.0]])]
    valid = [torch.tensor([[True], [False]]), torch.tensor([[True]])]
    first, second = normalise(advantages, valid)
    assert first.flatten().tolist() == pytest.approx([-1.0, 0.0], abs=1e-4)
    assert second.flatten().tolist() == pytest.approx([1.0], abs=1e-4)
    with pytest.raises(ConfigError, match="no step of any episode is valid"):
        normalise(advantages, [torch.zeros_like(v) for v in valid])


def test_spreading_over_tokens():
    assert over_tokens(torch.tensor([[1.0], [2.0]]), chunk=2, dim=2).tolist() == [[1.0] * 4, [2.0] * 4]
    assert over_tokens(torch.tensor([[1.0, 2.0]]), chunk=2, dim=3).tolist() == [[1.0] * 3 + [2.0] * 3]
