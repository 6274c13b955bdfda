"""Wrong search options are refused in the driver, before Ray."""

import warnings

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from rlinf_plugins.core.errors import ConfigError, MissingAssetError
from rlinf_plugins.testing.retrieval_server import ScriptedRetrievalServer
from rlinf_verl import preflight


def job(search=None, loop="search_r1", length=800, **rollout):
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {
                    "name": "hf",
                    "response_length": length,
                    "agent": {"default_agent_loop": loop},
                    "multi_turn": {"tool_config_path": None},
                    **rollout,
                }
            },
            "trainer": {"v1": {"m2flow": {"search": search or {}}}},
        }
    )


URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (job(), ConfigError, "needs either urls"),
        (job({"urls": [URL], "topkk": 3}), ConfigError, "did you mean 'topk'"),
        (job({"urls": ["localhost:8000"]}, loop="other"), ConfigError, "must begin with http"),
        (job({"index": {"corpus": "nowhere.jsonl"}}), MissingAssetError, r"corpus=nowhere\.jsonl is not a file"),
        (job({"urls": [URL]}, length=500), ConfigError, "=500 cannot hold one search.* need 565"),
        (
            job({"urls": [URL], "stop": "strings"}, name="sglang", skip_tokenizer_init=True),
            ConfigError,
            "skip_tokenizer_init=false",
        ),
        (job(loop="search_tool_agent"), ConfigError, "needs tools"),
    ],
)
def test_what_cannot_work_is_refused(config, error, says):
    with pytest.raises(error, match=says):
        preflight.check_search(config)


def test_jobs_that_do_not_search_are_left_alone():
    preflight.check_search(job(loop="single_turn_agent"))
    preflight.check_search(OmegaConf.create({"trainer": {"v1": {}}}))


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (None, MissingAssetError, "is not a file"),
        ("tool: []", ConfigError, "no.* list under 'tools'"),
        ("tools: [{class_name: a.B}]", ConfigError, "lists no tool of the class"),
        ("tools: [{class_name: CLASS, config: {type: native}}]", ConfigError, "needs either urls"),
        ("tools: [{class_name: CLASS, config: {search: {url: x}}}]", ConfigError, "did you mean 'urls'"),
    ],
)
def test_the_native_tools_options_are_checked(tmp_path, text, error, says):
    path = tmp_path / "tools.yaml"
    if text is not None:
        path.write_text(text.replace("CLASS", "rlinf_verl.search.tool.NativeSearchTool"))
    config = job(loop="search_tool_agent", multi_turn={"tool_config_path": str(path)})
    with pytest.raises(error, match=says):
        preflight.check_search(config)


async def test_a_server_that_does_not_answer_yet_is_a_warning():
    async with ScriptedRetrievalServer() as server:
        config = job({"urls": [server.url]})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            preflight.check_search(config)
    with pytest.warns(UserWarning, match="no retrieval server answers"):
        preflight.check_search(config)


def test_the_check_is_part_of_the_preflight(monkeypatch):
    config = job({"topkk": 3})
    config.trainer.v1.trainer_mode = "m2flow"
    for name in ("check_sizes", "check_model", "check_host"):
        monkeypatch.setattr(preflight, name, lambda *_: None)
    monkeypatch.setattr(preflight.handshake, "require", lambda: None)
    with pytest.raises(ConfigError, match="did you mean 'topk'"):
        preflight.run(config)
