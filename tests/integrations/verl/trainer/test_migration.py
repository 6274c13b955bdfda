from types import SimpleNamespace

import pytest
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rlinf_verl.trainer.migration import MigratingClient


@pytest.fixture
def client(monkeypatch):
    """A client whose servers answer with the parts given, one a request; what was asked is in ``asked``."""
    rollout = SimpleNamespace(response_length=8, name="hf")
    made = MigratingClient.__new__(MigratingClient)
    made.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    made.asked, made.parts = [], []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        self.asked.append((prompt_ids, sampling_params["max_tokens"]))
        tokens, reason = self.parts.pop(0)
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-float(token) for token in tokens],
            stop_reason=reason,
            extra_fields={"min_global_steps": 3, "max_global_steps": 3},
        )

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    return made


async def test_an_answer_continues_where_it_stopped(client):
    client.parts = [([5, 6], "aborted"), ([], "aborted"), ([7], "completed")]
    output = await client.generate("r", prompt_ids=[1, 2], sampling_params={"max_tokens": 4})
    assert client.asked == [([1, 2], 4), ([1, 2, 5, 6], 2), ([1, 2, 5, 6], 2)]
    assert output.token_ids == [5, 6, 7]
    assert output.log_probs == [-5.0, -6.0, -7.0]
    assert output.stop_reason == "completed"
    assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 3


async def test_an_answer_that_is_full_is_not_continued(client):
    client.parts = [([5] * 8, "aborted")]
    output = await client.generate("r", prompt_ids=[1], sampling_params={})
    assert len(output.token_ids) == 8
    assert client.asked == [([1], 8)]
