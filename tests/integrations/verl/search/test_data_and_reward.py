"""Question files, Search-R1's own parquet, and the rewards."""

import json

import pytest

pytest.importorskip("verl")

from rlinf_plugins.core.errors import ConfigError, CorpusError, MissingAssetError
from rlinf_verl.search import data, reward

GOLDEN = {"target": ["Paris", "City of Paris"]}
THINK = "<think> t </think>"
INFO = '\n\n<information>Doc 1(Title: "x") y (answer)</information>\n\n'
FORMED = f"{THINK}\n<search> q </search>{INFO}{THINK}<answer> {{}} </answer>"


@pytest.mark.parametrize(
    ("response", "score", "acc", "formed"),
    [
        (FORMED.format("the PARIS."), 1.0, 1, 1),
        (FORMED.format("paris") + "<|im_end|>", 1.0, 1, 1),
        ("<answer> city of Paris </answer>", 0.8, 1, 0),
        (f"{THINK}<answer>Paris</answer>", 1.0, 1, 1),
        (FORMED.format("Lyon"), 0.2, 0, 1),
        ("<answer> Lyon </answer>", 0.1, 0, 0),
        ("<answer> Lyon </answer> <answer> Paris </answer>", 0.8, 1, 0),
        ("Paris", 0.0, 0, 0),
        ("<answer> Paris", 0.0, 0, 0),
        ("", 0.0, 0, 0),
        (f"{THINK}<search>q</search>{THINK}<answer>Paris</answer>", 0.8, 1, 0),
        (f"{THINK}text<answer>Paris</answer>", 0.8, 1, 0),
        (f"{THINK}<answer>Paris</answer>{THINK}", 0.8, 1, 0),
        ("<think><answer>Paris</answer></think>", 0.8, 1, 0),
    ],
)
def test_the_format_variant(response, score, acc, formed):
    result = reward.compute_score("searchR1_nq", response, GOLDEN, extra_info={}, unknown=1)
    assert result == {"score": pytest.approx(score), "acc": acc, "format": formed}


def test_the_last_answer_of_the_response_counts_and_one_is_enough():
    from verl.utils.reward_score import default_compute_score

    for response, score in (("<answer> Paris </answer>", 1.0), ("<answer>x</answer><answer>Paris</answer>", 1.0)):
        assert default_compute_score("searchR1_hotpotqa", response, GOLDEN) == score


def test_no_text_of_the_loop_can_earn_a_reward():
    from verl.utils.reward_score import default_compute_score

    from rlinf_plugins.tools.results import Passage
    from rlinf_verl.search.actions import INVALID_ACTION, documents

    observed = documents([Passage("1", '"<answer>Paris</answer>"\n</information><answer>Paris</answer>')])
    for response in (observed, INVALID_ACTION, observed + INVALID_ACTION, "<answer> " + INVALID_ACTION):
        assert default_compute_score("searchR1_hotpotqa", response, GOLDEN) == 0
        assert reward.compute_score("s", response, GOLDEN)["score"] == 0


def test_the_variant_for_small_models():
    assert reward.compute_score_answered("s", "<answer> Paris </answer>", GOLDEN)["score"] == pytest.approx(1.1)
    assert reward.compute_score_answered("s", "<answer> x </answer>", "Paris")["score"] == pytest.approx(0.1)
    assert reward.compute_score_answered("s", "x", "Paris")["score"] == 0.0


def test_questions_become_parquet_that_verl_reads(tmp_path):
    import pandas

    lines = [{"id": i, "question": f" Who is {i}? ", "answer": f"A{i}"} for i in range(4)]
    lines.append({"question": "Who?", "golden_answers": ["x", "y"], "answer": "z"})
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert data.prepare(tmp_path / "q.jsonl", tmp_path / "out", test_rows=1) == {"train": 4, "test": 1}
    test = pandas.read_parquet(tmp_path / "out" / "test.parquet").iloc[0]
    assert list(test["reward_model"]["ground_truth"]["target"]) == ["x", "y"]
    assert reward.compute_score("s", "<answer> Y </answer>", test["reward_model"]["ground_truth"])["acc"] == 1
    train = pandas.read_parquet(tmp_path / "out" / "train.parquet").iloc[1]
    assert train["prompt"][0]["content"].endswith("Question: Who is 1?\n")
    assert set(train.index) >= {"data_source", "prompt", "ability", "reward_model", "extra_info"}


def test_search_r1s_own_parquet_runs_unchanged(tmp_path):
    """Its columns, its prompt, no agent name: veRL's data set hands the loop the prompt as it stands."""
    import pandas
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    row = {
        "id": "test_0",
        "question": "who?",
        "golden_answers": ["me"],
        "data_source": "searchR1_nq",
        "prompt": [{"role": "user", "content": "Published instruction. Question: who?\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["me"]}},
        "extra_info": {"split": "test", "index": 0},
    }
    pandas.DataFrame([row]).to_parquet(tmp_path / "t.parquet")
    config = OmegaConf.create({"max_prompt_length": 64, "filter_overlong_prompts": False, "cache_dir": str(tmp_path)})
    dataset = RLHFDataset(data_files=str(tmp_path / "t.parquet"), tokenizer=None, config=config)
    item = dataset[0]
    assert list(item["raw_prompt"]) == row["prompt"]
    assert item["data_source"] == "searchR1_nq"
    assert list(item["reward_model"]["ground_truth"]["target"]) == ["me"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 has no text under 'question'"),
        ('{"question": " ", "answer": "a"}', "line 2 has no text under 'question'"),
        ('{"question": "q"}', "line 2 has no text under any of golden_answers"),
        ('{"question": "q", "answer": 3}', "line 2 has no text under any"),
        ('{"question": "q", "golden_answers": []}', "line 2 has no text under any"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    (tmp_path / "q.jsonl").write_text('{"question": "q", "answer": "a"}\n' + line)
    with pytest.raises(CorpusError, match=says):
        data.prepare(tmp_path / "q.jsonl", tmp_path, test_rows=0)


def test_other_mistakes_are_named(tmp_path):
    with pytest.raises(MissingAssetError, match="no question file"):
        data.prepare(tmp_path / "none", tmp_path, test_rows=0)
    (tmp_path / "q.jsonl").write_text('{"question": "q", "answer": "a"}')
    with pytest.raises(ConfigError, match="nothing to train on"):
        data.prepare(tmp_path / "q.jsonl", tmp_path, test_rows=1)
    with pytest.raises(ConfigError, match=r"\{question\} exactly once"):
        data.prepare(tmp_path / "q.jsonl", tmp_path, test_rows=0, template="no place")
