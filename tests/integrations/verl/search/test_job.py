"""A whole Search-R1 job through veRL's own command: a small random model, warmed up to search, and a real index."""

import json

import pytest

pytest.importorskip("verl")

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(420)]

PLACES = ("Aland", "Borduria", "Cloud", "Dorne")
SETTINGS = [
    "algorithm.rollout_correction.bypass_mode=false",  # compute the old log-probs too, to compare
    "+recipe=search_r1_grpo_tiny",
    "trainer.v1.trainer_mode=m2flow",
    "trainer.total_training_steps=2",
    "data.max_prompt_length=64",
    "data.max_response_length=256",
    "actor_rollout_ref.rollout.n=4",
    "trainer.v1.m2flow.search.turn_tokens=48",
    "trainer.v1.m2flow.search.observation_tokens=64",
    "trainer.v1.m2flow.search.max_turns=1",
]


def make(folder):
    """Write corpus, data and a two-layer Llama over bytes that has learned to search and to answer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from rlinf_plugins.tools.results import Passage
    from rlinf_verl.search import data, warmup
    from rlinf_verl.search.factbook import Question
    from rlinf_verl.search.tokens import TokenText

    folder.mkdir(parents=True)
    contents = [f'"{place} capital"\nC{place}' for place in PLACES]
    lines = [json.dumps({"id": str(i), "contents": text}) for i, text in enumerate(contents)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    for split in ("train", "test"):
        rows = [data.row(p, [f"C{p}"], split=split, index=i, template="{question}") for i, p in enumerate(PLACES)]
        data.write(rows * 4, folder / f"{split}.parquet")

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}?{% endfor %}"
    text = TokenText(tokenizer)
    config = warmup.WarmupConfig(epochs=60, batch=8, lr=3e-3, noise=0.0, observation_tokens=64, frozen_layers=0)
    traces = [
        warmup.make_trace(
            Question(text=place, answer=f"C{place}", country=place, searches=(f"{place} capital",)),
            text.encode(f"{place}?"),
            text,
            lambda query: [Passage("0", contents[PLACES.index(query.split()[0])])],
            noisy=False,
            config=config,
            eos=tokenizer.eos_token_id,
        )
        for place in PLACES * 2
    ]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    losses = warmup.train(model, traces, config, seed=0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return losses


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search_job")
    losses = make(folder / "runs" / "tiny-search")
    assert losses[-1] < 0.3, losses[-1]
    return folder


def test_a_job_searches_trains_and_agrees_on_probabilities(prepared, run_verl):
    dump = prepared / "rollouts"
    job = run_verl(prepared, "search", *SETTINGS, f"trainer.rollout_data_dir={dump}")
    assert job.returncode == 0, job.tail()
    steps = [m for m in job.metrics if "actor/grad_norm" in m]
    assert len(steps) == 2, job.tail()
    for metrics in steps:
        assert metrics["training/rollout_probs_diff_mean"] < 0.01
        assert metrics["search/calls/mean"] > 0.2
        assert metrics["search/failed_fraction"] == 0.0
    texts = [json.loads(line)["output"] for path in sorted(dump.glob("*.jsonl")) for line in path.open()]
    assert len(texts) == 2 * 16
    found = [text for text in texts if "<information>Doc 1(Title:" in text]
    assert len(found) > len(texts) / 5, texts[:4]
    assert all("</information>\n\n" in text for text in found)
