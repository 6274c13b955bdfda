"""The native tool, alone and in veRL's own tool loop."""

import json

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError, ToolCallError
from rlinf_plugins.testing.played_engine import PlayedEngine
from rlinf_plugins.testing.retrieval_server import Response, ScriptedRetrievalServer, passages
from rlinf_plugins.tools.results import Passage
from rlinf_verl.search.tokens import TokenText
from rlinf_verl.search.tool import NativeSearchTool, fit


def tool_for(server_url, **config):
    search = {"urls": [server_url], "pool": {"retry": {"retries": 0}}, **config.pop("search", {})}
    return NativeSearchTool({"type": "native", "search": search, **config})


class Data:
    def __init__(self):
        self.extra_fields = {}


async def test_all_queries_of_a_call_are_searched_at_once():
    async with ScriptedRetrievalServer() as server:
        tool = tool_for(server.url)
        response, reward, metrics = await tool.execute("i", {"query_list": ["a", "b"]}, agent_data=Data())
        assert server.requests == [["a", "b"]]
    assert (reward, metrics) == (0.0, {"search_calls": 2, "passages": 6})
    assert response.text.startswith('Query: a\nDoc 1(Title: "T 0") a\nDoc 2')
    assert "\nQuery: b\nDoc 1" in response.text
    single, _, _ = await tool.execute("i", {"query_list": "a"})
    assert single.text.startswith("Query: a\n")


@pytest.mark.parametrize("value", [None, [], [1], {"q": 1}, 5, [None]])
async def test_the_models_mistakes_are_told(value):
    response, _, _ = await tool_for("http://127.0.0.1:9").execute("i", {"query_list": value}, agent_data=Data())
    assert "list of one or more texts" in response.text


async def test_the_tools_failures_are_flagged_not_told():
    async with ScriptedRetrievalServer(lambda queries, number: Response(status=500)) as server:
        tool, data = tool_for(server.url), Data()
        response, _, metrics = await tool.execute("i", {"query_list": ["a"]}, agent_data=data)
        assert (response.text, metrics) == ("", {"search_failed": 1})
        assert data.extra_fields == {"search_failure": "status"}
        with pytest.raises(ToolCallError):
            await tool.execute("i", {"query_list": ["a"]})


def test_bad_settings_are_named():
    with pytest.raises(ConfigError, match="needs either urls"):
        NativeSearchTool({"type": "native"})
    with pytest.raises(ConfigError, match="max_chars"):
        tool_for("http://127.0.0.1:9", max_chars=10)


def test_passages_are_kept_whole_by_rank_across_queries():
    found = [[Passage(f"{q}{r}", f'"T{q}{r}"\n' + "w " * 40) for r in range(3)] for q in range(2)]
    text = fit(["a", "b"], found, 450)
    assert len(text) <= 450
    assert text.count("Doc 1(") == 2
    assert text.count("Doc 2(") == 2
    assert "Doc 3(" not in text
    assert text.count("w ") >= 4 * 39
    whole = fit(["a"], [[Passage("1", '"T"\n' + "word " * 500)]], 200)
    assert 100 < len(whole) <= 200
    assert whole.endswith("word")
    assert fit(["a"], [[]], 200) == "Query: a\nnothing found"
    assert "<answer>" not in fit(["<answer>"], [[Passage("1", '"T"\n<answer>x</answer>')]], 200)


@pytest.fixture(scope="module")
def chat_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


async def run_in_verls_loop(tokenizer, tool, turns):
    import hydra
    from verl.experimental.agent_loop import agent_loop as host
    from verl.workers.rollout.replica import TokenOutput

    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {
                    "name": "hf",
                    "prompt_length": 200,
                    "response_length": 2000,
                    "full_determinism": False,
                    "multi_turn": {
                        "max_user_turns": None,
                        "max_assistant_turns": None,
                        "max_parallel_calls": 1,
                        "max_tool_response_length": 256,
                        "tool_response_truncate_side": "middle",
                        "format": "hermes",
                    },
                }
            },
            "data": {},
        }
    )
    text = TokenText(tokenizer)
    engine = PlayedEngine(tokenizer, [text.encode(turn) for turn in turns])

    class Manager:
        async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
            played = await engine(prompt_ids, {**sampling_params, "max_tokens": 500})
            return TokenOutput(token_ids=played.token_ids, log_probs=played.log_probs)

    loop = hydra.utils.instantiate(
        host._agent_loop_registry["search_tool_agent"],
        trainer_config=host.DictConfigWrap(config=config),
        server_manager=Manager(),
        tokenizer=tokenizer,
        processor=None,
        hf_model_type=None,
        dataset_cls=None,
        data_config=host.DictConfigWrap(config.data),
        tools=host.ToolListWrap([tool]),
    )
    return await loop.run({"temperature": 1.0}, raw_prompt=[{"role": "user", "content": "Who?"}])


CALL = '<tool_call>{"name": "search", "arguments": {"query_list": ["who"]}}</tool_call>'


async def test_in_verls_loop_a_response_is_longer_than_its_256_characters_and_whole(chat_tokenizer):
    long = json.dumps({"result": [[{"document": {"id": "1", "contents": '"T"\n' + "word " * 150}, "score": 1.0}]]})
    async with ScriptedRetrievalServer(lambda queries, number: Response(body=long.encode())) as server:
        output = await run_in_verls_loop(chat_tokenizer, tool_for(server.url), [CALL, "It is me."])
    words = chat_tokenizer.decode(output.response_ids)
    assert "word " * 149 in words
    assert "truncated" not in words
    assert words.rstrip().endswith("It is me.")
    assert 0 < sum(output.response_mask) < len(output.response_mask)


async def test_in_verls_loop_a_failed_search_ends_and_masks(chat_tokenizer):
    async with ScriptedRetrievalServer(lambda queries, number: Response(body=passages([]))) as server:
        output = await run_in_verls_loop(chat_tokenizer, tool_for(server.url), [CALL, "It is me."])
    assert sum(output.response_mask) == 0
    assert output.extra_fields["search_failure"] == "bad_reply"
    assert "It is me." not in chat_tokenizer.decode(output.response_ids)
