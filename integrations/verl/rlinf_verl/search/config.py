"""Options of Search-R1 in veRL, under ``trainer.v1.m2flow.search``."""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import OmegaConf

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.tools.autoscale import AutoscaleConfig
from rlinf_plugins.tools.http import HttpConfig
from rlinf_plugins.tools.index import IndexConfig
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.queries import QueryConfig
from rlinf_plugins.tools.service import ServiceConfig
from rlinf_verl.config import NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchR1Config:
    """How trajectories search.

    Attributes:
        urls: Retrieval servers that speak ``/retrieve``; several are replicas of one another.
        index: An index of our own, instead of servers.
        shards: Ray actors that hold the pool for all agent-loop workers (shared cache and joins); 0 gives each
            worker a pool of its own.
        autoscale: When the service adds actors beyond ``shards``.
        topk: Passages per search.
        max_turns: Turns that may search; one more, without search, is left for the answer.
        turn_tokens: Tokens a turn may sample.
        observation_tokens: Tokens of an observation, tags included.
        answer_tokens: Tokens kept free for the answer when an observation is fitted into the response.
        match: Which complete action of a turn counts. ``"first"`` stops the engine there, ``"last"`` lets it go on.
        stop: How the engine is told. ``"strings"``; ``"ids"``: on tokens that can complete a closing tag, for
            engines without a tokenizer; ``"none"``: not at all, the turn is cut afterwards; ``"auto"``: by engine.
        on_failure: What becomes of a trajectory whose search failed. ``"mask"``: it ends and leaves the loss;
            ``"fail"``: it raises, so that the trainer counts a failed rollout.
        timeout_s: Deadline of a search, retries included.
        pool: The pool's own settings.
        queries: What counts as a query.
    """

    urls: list[str] = field(default_factory=list)
    index: IndexConfig | None = None
    shards: int = 0
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    topk: int = 3
    max_turns: int = 4
    turn_tokens: int = 500
    observation_tokens: int = 500
    answer_tokens: int = 64
    match: Literal["first", "last"] = "first"
    stop: Literal["auto", "strings", "ids", "none"] = "auto"
    on_failure: Literal["mask", "fail"] = "mask"
    timeout_s: float = 30.0
    pool: PoolConfig = field(default_factory=PoolConfig)
    queries: QueryConfig = field(default_factory=QueryConfig)

    def validate(self, where: str) -> None:
        """Reject combinations that cannot work."""
        if bool(self.urls) == (self.index is not None):
            raise ConfigError(f"{where} needs either urls (retrieval servers) or index (one of our own)")
        for url in self.urls:
            HttpConfig(url=url).validate(f"{where}.urls")
        if self.max_turns < 0 or self.topk < 1 or self.turn_tokens < 1 or self.shards < 0 or self.timeout_s <= 0:
            raise ConfigError(
                f"{where} needs max_turns >= 0, topk >= 1, turn_tokens >= 1, shards >= 0 and timeout_s > 0, got {self}"
            )
        if self.autoscale.max_shards:
            ServiceConfig(shards=self.shards, autoscale=self.autoscale).validate(where)
        if self.observation_tokens < 16 or self.answer_tokens < 1:
            raise ConfigError(f"{where} needs observation_tokens >= 16 and answer_tokens >= 1, got {self}")
        if self.match == "last" and self.stop in ("strings", "ids"):
            raise ConfigError(f"{where}.match 'last' needs the whole turn: use stop 'auto' or 'none'")


def search_options(config: Any) -> SearchR1Config:
    """Read and check ``trainer.v1.m2flow.search`` from veRL's configuration.

    Raises:
        ConfigError: An unknown option, a wrong type or an impossible combination.
    """
    where = f"{NODE}.search"
    node = OmegaConf.select(config, where)
    values = OmegaConf.to_container(node, resolve=True) if node is not None else {}
    return from_mapping(SearchR1Config, values, where)  # type: ignore[arg-type]
