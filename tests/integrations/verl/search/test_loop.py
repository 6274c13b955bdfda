"""The agent loop inside veRL's own base class and registry, with a scripted engine and a scripted server."""

import asyncio

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError, ToolCallError
from rlinf_plugins.testing.played_engine import PlayedEngine
from rlinf_plugins.testing.retrieval_server import Response, ScriptedRetrievalServer, passages
from rlinf_verl.search.config import search_options
from rlinf_verl.search.tokens import TokenText


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


def verl_config(server_url, **search):
    search = {"urls": [server_url], "pool": {"retry": {"retries": 0}}, **search}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {"name": "hf", "prompt_length": 200, "response_length": 800, "full_determinism": False}
            },
            "data": {},
            "trainer": {"v1": {"m2flow": {"search": search}}},
        }
    )


def agent_loop(config, tokenizer, engine):
    """Instantiate as veRL's worker does, by name from its registry."""
    import hydra
    from verl.experimental.agent_loop import agent_loop as host

    return hydra.utils.instantiate(
        host._agent_loop_registry["search_r1"],
        trainer_config=host.DictConfigWrap(config=config),
        server_manager=engine,
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="llama",
        dataset_cls=None,
        data_config=host.DictConfigWrap(config.data),
        tools=host.ToolListWrap([]),
    )


async def run(config, tokenizer, turns, **row):
    text = TokenText(tokenizer)
    engine = PlayedEngine(tokenizer, [text.encode(turn) for turn in turns])
    loop = agent_loop(config, tokenizer, engine)
    row = {"raw_prompt": [{"role": "user", "content": "Who?"}], **row}
    return await loop.run({"temperature": 1.0, "logprobs": True}, **row), engine


async def test_a_trajectory_through_verls_registry(tokenizer):
    async with ScriptedRetrievalServer() as server:
        turns = ["<search> who </search>tail", "<answer> me </answer>"]
        output, engine = await run(verl_config(server.url), tokenizer, turns, extra_info={"split": "test"})
        assert server.requests == [["who"]]
    assert tokenizer.decode(output.prompt_ids) == "user: Who?\nassistant: "
    words = tokenizer.decode(output.response_ids)
    assert words.startswith('<search> who </search>\n\n<information>Doc 1(Title: "T 0") who')
    assert words.endswith("</information>\n\n<answer> me </answer>")
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    assert tokenizer.decode([t for t, m in zip(output.response_ids, output.response_mask, strict=True) if m]) == (
        "<search> who </search><answer> me </answer>"
    )
    assert output.extra_fields["search_end"] == "answer"
    assert output.extra_fields["search_calls"] == 1
    assert output.metrics.tool_calls > 0
    tensors = output.as_dict()
    assert tensors["rollout_log_probs"].shape == tensors["responses"].shape


async def test_one_failing_trajectory_of_64_does_not_hurt_the_rest(tokenizer):
    def script(queries, number):
        return Response(status=500) if "query 13" in queries else Response(body=passages(queries))

    async with ScriptedRetrievalServer(script) as server:
        config = verl_config(server.url)
        results = await asyncio.gather(
            *(run(config, tokenizer, [f"<search> query {i} </search>", f"<answer> {i} </answer>"]) for i in range(64))
        )
    ends = [output.extra_fields["search_end"] for output, _ in results]
    assert ends == ["tool_failed" if i == 13 else "answer" for i in range(64)]
    for i, (output, _) in enumerate(results):
        words = tokenizer.decode(output.response_ids)
        if i == 13:
            assert sum(output.response_mask) == 0
            assert output.extra_fields["search_failure"] == "status"
            assert "500" not in words
        else:
            assert f"query {i}\nDoc 2" in words
            assert sum(output.response_mask) > 0


async def test_a_failed_search_can_fail_the_rollout(tokenizer):
    async with ScriptedRetrievalServer(lambda queries, number: Response(body=b"<html>")) as server:
        with pytest.raises(ToolCallError, match="bad_reply"):
            await run(verl_config(server.url, on_failure="fail"), tokenizer, ["<search> q </search>"])


async def test_an_engine_that_samples_nothing_gives_one_masked_token(tokenizer):
    output, _ = await run(verl_config("http://127.0.0.1:9"), tokenizer, [])
    assert (output.response_ids, output.response_mask) == ([tokenizer.eos_token_id], [0])
    assert output.extra_fields["search_end"] == "aborted"


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ({"urls": []}, "needs either urls"),
        ({"url": "http://x"}, "did you mean 'urls'"),
        ({"urls": ["localhost:8000"]}, "must begin with http"),
        ({"max_turns": -1}, "max_turns >= 0"),
        ({"observation_tokens": 3}, "observation_tokens >= 16"),
        ({"match": "last", "stop": "strings"}, "match 'last'"),
        ({"index": {"corpus": "c"}}, "needs either urls"),
        ({"urls": [], "index": {"corpus": "c", "retriever": "bm52"}}, "did you mean 'bm25'"),
        ({"urls": [], "index": {"corpus": "c", "options": {"k2": 1}}}, "unknown option .*k2"),
        ({"pool": {"batch": {"max_batch": 0}}}, "max_batch >= 1"),
    ],
)
def test_bad_options_are_named(search, says):
    with pytest.raises(ConfigError, match=says):
        search_options(verl_config("http://127.0.0.1:9", **search))
