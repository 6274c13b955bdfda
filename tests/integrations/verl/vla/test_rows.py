import numpy as np
import pytest
import torch

from rlinf_verl.vla.rows import Chunk, EpisodeTrace, read_chunks


def chunk(valid=(True, True), rewards=(0.5, 0.25), prompt=(1, 5, 29871), version=3, **changes):
    given = {
        "images": np.full((1, 4, 4, 3), 7, np.uint8),
        "proprio": None,
        "tokens": np.arange(31800, 31806).reshape(2, 3),
        "log_probs": -np.ones((2, 3), np.float32),
        "values": np.array([0.1], np.float32),
        "temperature": 1.6,
        "top_k": 20,
        "terminated": False,
        "truncated": False,
    } | changes
    return Chunk(prompt=prompt, version=version, rewards=np.array(rewards), valid=np.array(valid), **given)


@pytest.fixture
def trace():
    first = chunk()
    last = chunk(valid=(True, False), rewards=(1.0, 9.0), version=4, terminated=True)
    return EpisodeTrace(uid="u", session=2, chunks=[first, last], success=True)


def test_the_return_counts_valid_steps_and_stands_in_every_row(trace):
    rows = trace.fields({"task": 1, "uid": "u"})
    assert trace.ret == 1.75
    assert trace.steps == 3
    assert [float(row["rm_scores"].sum()) for row in rows] == [1.75, 1.75]
    assert rows[0]["rm_scores"].nonzero().flatten().tolist() == [5]
    assert rows[1]["rm_scores"].nonzero().flatten().tolist() == [2]
    assert rows[1]["extra_fields"]["reward_extra_info"] == {"acc": 1.0, "return": 1.75, "length": 3.0}


def test_the_mask_covers_the_step_of_success_and_nothing_after(trace):
    last = trace.fields({})[1]
    assert last["response_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    assert last["loss_mask"].tolist() == last["response_mask"].tolist()
    assert last["chunk_rewards"].tolist() == [1.0, 0.0]
    assert last["chunk_valid"].tolist() == [True, False]


def test_a_shorter_execution_pads_steps(trace):
    trace.chunks = [chunk(valid=(True,), rewards=(0.5,))]
    (row,) = trace.fields({})
    assert row["response_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    assert row["chunk_rewards"].tolist() == [0.5, 0.0]


def test_keys_and_tags_are_verls(trace):
    assert trace.keys() == ["u_2_0", "u_2_1"]
    tags = trace.tags(global_steps=5)
    assert tags[0] == {
        "status": "success",
        "prompt_len": 3,
        "response_len": 6,
        "seq_len": 9,
        "global_steps": 5,
        "min_global_steps": 3,
        "max_global_steps": 4,
    }


def test_the_final_value_belongs_to_the_last_row_of_a_truncated_episode(trace):
    assert [row["final_values"].tolist() for row in trace.fields({})] == [[0.0], [0.0]]
    trace.final_values = np.array([0.75], np.float32)
    assert [row["final_values"].tolist() for row in trace.fields({})] == [[0.0], [0.75]]


def test_rows_come_back_as_the_policy_takes_them(trace):
    trace.chunks.append(chunk(prompt=(1, 5, 6, 7, 29871)))
    rows = trace.fields({})
    data = {
        "prompts": torch.nested.as_nested_tensor([row["prompts"] for row in rows], layout=torch.jagged),
        "responses": torch.stack([row["responses"] for row in rows]),
        "images": torch.stack([row["images"] for row in rows]),
        "sampling": torch.stack([row["sampling"] for row in rows]),
    }
    batch = read_chunks(data, tokens=6, pad_token=32000)
    assert batch.input_ids.tolist()[0] == [1, 5, 29871, 32000, 32000]
    assert batch.attention_mask.sum(-1).tolist() == [3, 3, 5]
    assert batch.tokens[2].tolist() == list(range(31800, 31806))
    assert (batch.temperature, batch.top_k, batch.proprio) == (pytest.approx(1.6), 20, None)
    assert batch.images[0].shape == (1, 4, 4, 3)
    assert batch.real.all()


def test_synthetic_rows_get_placeholders(trace):
    row = trace.fields({})[0]
    jagged = {"layout": torch.jagged}
    data = {
        "prompts": torch.nested.as_nested_tensor([row["prompts"], torch.full((127,), 2)], **jagged),
        "responses": torch.nested.as_nested_tensor([row["responses"], torch.tensor([2])], **jagged),
        "images": torch.stack([row["images"]] * 2),
        "sampling": torch.stack([row["sampling"]] * 2),
    }
    batch = read_chunks(data, tokens=6, pad_token=32000)
    assert batch.real.tolist() == [True, False]
    assert ((batch.tokens >= 31744) & (batch.tokens < 32000)).all()
