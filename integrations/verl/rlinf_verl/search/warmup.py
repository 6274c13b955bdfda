"""A short supervised warm-up: a small model learns the form of a search before it is rewarded for the outcome.

Traces are generated from questions whose searches are known, with real observations from the index. They are noisy on
purpose (some search the question as it stands, which rarely finds a two-hop answer): what is left to reinforcement
learning is to prefer the searches that work.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_plugins.core.cpu import has_bf16
from rlinf_plugins.tools.results import Passage
from rlinf_verl.search.actions import documents
from rlinf_verl.search.factbook import Question
from rlinf_verl.search.tokens import TokenText

Search = Callable[[str], Sequence[Passage]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupConfig:
    """How the warm-up is run. By default it stops early: about a third of the answers are right after it.

    Attributes:
        traces: Number of traces.
        epochs: Passes over them.
        batch: Traces per step.
        lr: Peak learning rate; falls linearly to zero.
        noise: Share of traces that search the question as it stands.
        observation_tokens: Tokens of an observation.
        frozen_layers: Layers from the bottom that are not trained; saves half of the time.
    """

    traces: int = 96
    epochs: int = 1
    batch: int = 8
    lr: float = 2e-4
    noise: float = 0.5
    observation_tokens: int = 100
    frozen_layers: int = 15


@dataclass(frozen=True, slots=True)
class Trace:
    """Token ids of a trace and which of them are learned (1) or given (0)."""

    ids: list[int]
    mask: list[int]


def make_trace(
    question: Question,
    prompt: list[int],
    text: TokenText,
    search: Search,
    *,
    noisy: bool,
    config: WarmupConfig,
    eos: int,
) -> Trace:
    """Write one trace: searches with their real observations, then the answer."""
    ids, mask = list(prompt), [0] * len(prompt)

    def put(tokens: Sequence[int], learned: int) -> None:
        ids.extend(tokens)
        mask.extend([learned] * len(tokens))

    for query in (question.text,) if noisy else question.searches:
        put(text.encode(f"<search> {query} </search>"), 1)
        observed, _ = text.observation(documents(search(query)), config.observation_tokens)
        put(observed, 0)
    put([*text.encode(f"<answer> {question.answer} </answer>"), eos], 1)
    return Trace(ids, mask)


def make_traces(
    questions: Sequence[Question],
    prompts: Callable[[Question], list[int]],
    text: TokenText,
    search: Search,
    config: WarmupConfig,
    *,
    eos: int,
    seed: int,
) -> list[Trace]:
    """Write the traces of ``config.traces`` questions drawn from ``questions``."""
    rng = random.Random(seed)
    chosen = rng.sample(list(questions), min(config.traces, len(questions)))
    return [
        make_trace(q, prompts(q), text, search, noisy=rng.random() < config.noise, config=config, eos=eos)
        for q in chosen
    ]


def train(model: Any, traces: Sequence[Trace], config: WarmupConfig, *, seed: int) -> list[float]:
    """Train ``model`` (a causal Hugging Face model with fp32 weights) on the traces, in place.

    The arithmetic is bf16 where the processor has it.

    Returns:
        The loss of each step, in nats per learned token.
    """
    import torch

    for layer in model.model.layers[: config.frozen_layers]:
        layer.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=config.lr, weight_decay=0.0)
    steps = config.epochs * (len(traces) // config.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / max(1, steps))
    rng, losses = random.Random(seed), []
    order = list(range(len(traces)))
    model.train()
    for _ in range(config.epochs):
        rng.shuffle(order)
        for start in range(0, len(order) - config.batch + 1, config.batch):
            loss = _loss(model, [traces[i] for i in order[start : start + config.batch]])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(float(loss.detach()))
    model.requires_grad_(True)
    model.eval()
    return losses


def _loss(model: Any, traces: Sequence[Trace]) -> Any:
    import torch

    longest = max(len(trace.ids) for trace in traces)
    ids = torch.zeros(len(traces), longest, dtype=torch.int64)
    seen, learned = torch.zeros_like(ids), torch.zeros_like(ids)
    for place, trace in enumerate(traces):
        ids[place, : len(trace.ids)] = torch.tensor(trace.ids)
        learned[place, : len(trace.ids)] = torch.tensor(trace.mask)
        seen[place, : len(trace.ids)] = 1
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bf16()):
        hidden = model.model(input_ids=ids, attention_mask=seen).last_hidden_state[:, :-1]
        wanted = learned[:, 1:].bool()
        logits = model.lm_head(hidden[wanted])  # only where a token is learned: the vocabulary is most of the work
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][wanted])
