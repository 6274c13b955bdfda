"""Rewriting a micro-batch per action or chunk."""

import pytest
import torch
from tensordict import TensorDict

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.models.openvla import ActionSpec
from rlinf_plugins.models.openvla.modeling import ActionOutput
from rlinf_verl.vla.loss_level import at_level, count_units, level_of, tokens_per_unit

SPEC = ActionSpec(decoding="parallel", chunk=2, dim=3)


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@pytest.fixture
def batch():
    """A whole row, one that ended after its first action, and one veRL added."""
    masks = ([1] * 6, [1, 1, 1, 0, 0, 0], [0])
    fields = {
        "prompts": nested([1, 5, 9], [1, 9], [2, 2]),
        "responses": nested([7] * 6, [7] * 6, [2]),
        "input_ids": nested([1, 5, 9] + [7] * 6, [1, 9] + [7] * 6, [2, 2, 2]),
        "response_mask": nested(*masks),
        "loss_mask": nested(*masks),
        "old_log_probs": nested([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], [-1.0] * 3 + [-9.0] * 3, [0.0]),
        "advantages": nested([0.5] * 3 + [0.25] * 3, [2.0] * 3 + [0.0] * 3, [0.0]),
    }
    return TensorDict(fields, batch_size=[3])


@pytest.fixture
def output():
    log_probs = -torch.arange(18.0).view(3, 2, 3)
    return ActionOutput(tokens=log_probs, log_probs=log_probs, entropy=None, values=None, hidden=log_probs)


def test_an_action_is_the_sum_of_its_valid_tokens(batch, output):
    judged, rows = at_level(output, batch, tokens_per_unit(SPEC, "action"))
    assert judged.log_probs.squeeze(-1).tolist() == [[-3.0, -12.0], [-21.0, 0.0], [0.0, 0.0]]
    assert [row.tolist() for row in rows["old_log_probs"].unbind()] == [[-6.0, -15.0], [-3.0, 0.0], [0.0]]
    assert [row.tolist() for row in rows["advantages"].unbind()] == [[0.5, 0.25], [2.0, 0.0], [0.0]]
    assert [row.tolist() for row in rows["response_mask"].unbind()] == [[1, 1], [1, 0], [0]]
    assert rows["input_ids"].offsets().diff().tolist() == [5, 4, 3]
    assert batch["responses"].offsets().diff().tolist() == [6, 6, 1]


def test_a_chunk_is_the_sum_of_all_and_the_advantage_their_mean(batch, output):
    judged, rows = at_level(output, batch, tokens_per_unit(SPEC, "chunk"))
    assert judged.log_probs.flatten().tolist() == [-15.0, -21.0, 0.0]
    assert [row.tolist() for row in rows["advantages"].unbind()] == [[0.375], [2.0], [0.0]]


def test_tokens_stay_as_they_are(batch, output):
    judged, rows = at_level(output, batch, tokens_per_unit(SPEC, "token"))
    assert judged is output
    assert rows is batch


@pytest.mark.parametrize(("level", "units"), [("token", 9), ("action", 3), ("chunk", 2)])
def test_units_are_what_a_mean_divides_by(batch, level, units):
    assert count_units(batch, tokens_per_unit(SPEC, level)).item() == units


def test_impossible_settings_are_refused(batch, output):
    with pytest.raises(ConfigError, match="log_prob_level must be one of token, action, chunk, got 'episode'"):
        level_of({"log_prob_level": "episode"})
    batch["rollout_is_weights"] = batch["advantages"]
    with pytest.raises(ConfigError, match="rollout_is weighs tokens"):
        at_level(output, batch, 3)
