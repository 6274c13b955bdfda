"""What can be refused about a job that searches before Ray starts."""

import socket
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError, MissingAssetError
from rlinf_verl.config import NODE
from rlinf_verl.search import TOOL_AGENT_LOOP
from rlinf_verl.search.config import SearchR1Config, search_options
from rlinf_verl.search.engines import stop_mode

NATIVE_TOOL = "rlinf_verl.search.tool.NativeSearchTool"
_TOOL_FILE = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


def check(config: Any, agent_loop: str | None) -> None:
    """Check the search options of veRL's configuration, those of the native tool where ``agent_loop`` uses it.

    A server that does not answer yet is a warning only: launchers start servers and jobs side by side.

    Raises:
        ConfigError: An option is unknown, of the wrong type or impossible, or a search does not fit the response.
        MissingAssetError: The corpus, or the tool's file, is absent.
    """
    if agent_loop == TOOL_AGENT_LOOP:
        for options in _tool_options(config):
            _check_sources(options, f"{_TOOL_FILE}: search")
        return
    options = search_options(config)
    _check_turns(config, options)
    _check_sources(options, f"{NODE}.search")


def _check_turns(config: Any, options: SearchR1Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    length = rollout.response_length
    needed = 1 + options.observation_tokens + options.answer_tokens
    if options.max_turns and length < needed:
        raise ConfigError(
            f"data.max_response_length={length} cannot hold one search: an observation of "
            f"{options.observation_tokens} tokens and an answer of {options.answer_tokens} need {needed} at least; "
            f"raise it, or lower {NODE}.search.observation_tokens or answer_tokens"
        )
    if stop_mode(options, rollout) == "strings" and rollout.name == "sglang" and rollout.get("skip_tokenizer_init"):
        raise ConfigError(
            f"{NODE}.search.stop='strings' needs SGLang's tokenizer: set stop to 'auto', or "
            "actor_rollout_ref.rollout.skip_tokenizer_init=false"
        )


def _tool_options(config: Any) -> list[SearchR1Config]:
    path = OmegaConf.select(config, _TOOL_FILE)
    if path is None:
        raise ConfigError(f"the agent loop {TOOL_AGENT_LOOP!r} needs tools: set {_TOOL_FILE} to a file that lists them")
    if not Path(path).is_file():
        raise MissingAssetError(f"{_TOOL_FILE}={path} is not a file")
    tools = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    listed = tools.get("tools") if isinstance(tools, dict) else None
    if not isinstance(listed, list):
        raise ConfigError(f"{path} does not hold a list under 'tools'")
    found = [tool.get("config") or {} for tool in listed if tool.get("class_name") == NATIVE_TOOL]
    if not found:
        raise ConfigError(f"{path} lists no tool of the class {NATIVE_TOOL}, which {TOOL_AGENT_LOOP!r} is for")
    return [from_mapping(SearchR1Config, tool.get("search") or {}, f"{path}: search") for tool in found]


def _check_sources(options: SearchR1Config, where: str) -> None:
    if options.index is not None and not Path(options.index.corpus).is_file():
        raise MissingAssetError(f"{where}.index.corpus={options.index.corpus} is not a file: no passages to search")
    for url in options.urls:
        parts = urlsplit(url)
        address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        try:
            socket.create_connection(address, timeout=2.0).close()
        except OSError as error:
            warnings.warn(
                f"no retrieval server answers at {url} yet ({error}); start one (rlinf-plugins serve-search), or the "
                "searches of this job will fail",
                stacklevel=2,
            )
