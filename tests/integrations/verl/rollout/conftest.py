"""A tiny Llama, an engine over it, and the teacher-forced oracle that every generation is held against."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlinf_verl.rollout.engine import EngineLimits, HFEngine, Request
from rlinf_verl.rollout.sampling import SamplingParams
from rlinf_verl.rollout.weights import ResidentWeights

EOS = 2
VOCAB = 61


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=EOS,
        **overrides,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)  # sharpen: a flat distribution hides mistakes
    return model.eval()


@pytest.fixture(scope="session")
def make_model():
    return tiny_model


@pytest.fixture
def make_engine():
    def make(model=None, *, loaded=True, decode=None, **limits) -> HFEngine:
        model = model if model is not None else tiny_model()
        bounds = {"max_rows": 8, "max_prefill_tokens": 128, "max_length": 120, "eos_ids": frozenset({EOS})} | limits
        return HFEngine(model, EngineLimits(**bounds), ResidentWeights(model, loaded=loaded), decode)

    return make


@pytest.fixture
def request_for():
    def make(id: str, prompt, max_tokens: int = 12, **params) -> Request:
        return Request(id=id, prompt=prompt, params=SamplingParams.from_request(params, max_tokens=max_tokens))

    return make


@pytest.fixture
def run():
    def run_all(engine: HFEngine, *requests: Request) -> dict:
        for request in requests:
            engine.submit(request)
        ended = {}
        while engine.busy:
            ended |= {g.request_id: g for g in engine.step()}
        return ended

    return run_all


@pytest.fixture
def teacher():
    """Log-probs [len(tokens), V] of the model at each generated position, from one plain forward."""

    @torch.no_grad()
    def forced(model, prompt, tokens) -> torch.Tensor:
        logits = model(torch.tensor([list(prompt) + list(tokens)])).logits[0].double()
        return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)

    return forced
