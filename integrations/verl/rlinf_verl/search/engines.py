"""How each rollout engine is told where a turn ends."""

from typing import Any

from rlinf_verl.search.actions import STOP_STRINGS
from rlinf_verl.search.config import SearchR1Config


def stop_mode(config: SearchR1Config, rollout: Any) -> str:
    """Return ``"strings"``, ``"ids"`` or ``"none"`` for the engine named by veRL's rollout options."""
    if config.stop != "auto":
        return config.stop
    if config.match == "last":
        return "none"
    # SGLang without its tokenizer knows no text; every other engine matches strings on what it decodes.
    return "ids" if rollout.get("name") == "sglang" and rollout.get("skip_tokenizer_init", False) else "strings"


def stop_params(mode: str, engine: str, completing_ids: list[int]) -> dict[str, Any]:
    """Return the sampling parameters that end a turn without dropping the token that ended it."""
    if mode == "none":
        return {}
    if mode == "ids":
        trim: dict[str, Any] = {"no_stop_trim": True} if engine == "sglang" else {}
        return {"stop_token_ids": completing_ids, **trim}
    stop = {"stop": list(STOP_STRINGS)}
    if engine == "sglang":
        return {**stop, "no_stop_trim": True}
    if engine == "vllm":
        return {**stop, "include_stop_str_in_output": True}
    return stop
