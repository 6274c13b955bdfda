"""Action distributions: restriction, temperature, top-k, randomness, reductions."""

import pytest
import torch

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.models.openvla import ActionDistribution, Sampling, reduce_log_probs


@pytest.fixture
def logits(seed):
    return torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(seed)) * 2


def generators(seed, rows):
    return [torch.Generator().manual_seed(seed + row) for row in range(rows)]


def test_log_probs_and_entropy_are_those_of_a_categorical(logits):
    sampling = Sampling(temperature=1.6)
    reference = torch.distributions.Categorical(logits=logits / 1.6)
    tokens = torch.randint(0, 256, (3, 5))
    log_probs, entropy = ActionDistribution(logits, 31744, sampling).log_prob_and_entropy(tokens + 31744)
    assert torch.allclose(log_probs, reference.log_prob(tokens), atol=1e-5)
    assert torch.allclose(entropy, reference.entropy(), atol=1e-5)


def test_top_k_renormalises_over_the_kept_tokens(logits):
    distribution = ActionDistribution(logits, 0, Sampling(top_k=7))
    kept = logits.topk(7, dim=-1).indices
    mass = sum(distribution.log_prob(kept[..., k]).exp() for k in range(7))
    assert torch.allclose(mass, torch.ones(3, 5), atol=1e-5)


def test_draws_follow_the_probabilities(seed):
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(1, 60_000, 4)
    tokens = ActionDistribution(logits, 0, Sampling()).choose(torch.Generator().manual_seed(seed))
    frequency = torch.bincount(tokens.flatten(), minlength=4) / tokens.numel()
    expected = logits[0, 0].softmax(-1)
    # five standard deviations of a frequency over 60 000 draws
    assert ((frequency - expected).abs() < 5 * (expected * (1 - expected) / 60_000).sqrt()).all()


@pytest.mark.parametrize("top_k", [1, 3])
def test_draws_stay_inside_the_top_k(logits, seed, top_k):
    kept = logits.topk(top_k, dim=-1).indices
    for draw in range(50):
        tokens = ActionDistribution(logits, 0, Sampling(top_k=top_k)).choose(torch.Generator().manual_seed(seed + draw))
        assert (tokens.unsqueeze(-1) == kept).any(-1).all()


def test_the_generator_decides(logits, seed):
    distribution = ActionDistribution(logits, 0, Sampling())
    first, second = (distribution.choose(torch.Generator().manual_seed(seed)) for _ in range(2))
    assert torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(first, distribution.choose(torch.Generator().manual_seed(seed)))


def test_a_generator_per_row_makes_rows_independent_of_their_batch(logits, seed):
    batch = ActionDistribution(logits, 0, Sampling()).choose(generators(seed, 3))
    for row, generator in enumerate(generators(seed, 3)):
        assert torch.equal(ActionDistribution(logits[row : row + 1], 0, Sampling()).choose([generator])[0], batch[row])


def test_sampling_without_a_generator_is_refused(logits):
    with pytest.raises(ConfigError, match=r"torch\.Generator"):
        ActionDistribution(logits, 0, Sampling()).choose(None)
    with pytest.raises(ConfigError, match="3 rows, 2 generators"):
        ActionDistribution(logits, 0, Sampling()).choose(generators(0, 2))


def test_greedy_needs_no_generator_and_takes_the_likeliest(logits):
    tokens = ActionDistribution(logits, 31744, Sampling(greedy=True, temperature=0.3)).choose(None)
    assert torch.equal(tokens, logits.argmax(-1) + 31744)


def test_one_certain_token_has_no_entropy_and_finite_gradients():
    logits = torch.zeros(1, 1, 4, requires_grad=True)
    log_prob, entropy = ActionDistribution(logits, 0, Sampling(top_k=1)).log_prob_and_entropy(torch.tensor([[2]]))
    (log_prob.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()


def test_reductions():
    log_probs = torch.arange(12.0).view(1, 2, 6)
    assert reduce_log_probs(log_probs, "token") is log_probs
    assert reduce_log_probs(log_probs, "action").tolist() == [[15.0, 51.0]]
    assert reduce_log_probs(log_probs, "chunk").tolist() == [66.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, r"temperature must be positive, got 0\.0"),
        ({"temperature": -1.0}, "temperature must be positive"),
        ({"top_k": -2}, "top_k must be positive"),
        ({"topk": 3}, "unknown option sampling.topk; did you mean 'top_k'"),
        ({"vocabulary": "all"}, "vocabulary"),
    ],
)
def test_impossible_settings_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(Sampling, values, "sampling")
