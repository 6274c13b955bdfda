"""The user's handle of a channel."""

import os
import uuid
from collections.abc import Hashable
from dataclasses import asdict
from typing import Any

from rlinf_plugins.core.errors import ChannelError, ConfigError, ItemLostError, UndecodableItemError
from rlinf_plugins.core.extras import require
from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.channel.config import ChannelConfig, Granularity
from rlinf_plugins.scheduler.channel.consumer import Consumer
from rlinf_plugins.scheduler.channel.fetch import Fetcher
from rlinf_plugins.scheduler.channel.link import Link, LocalLink, drive
from rlinf_plugins.scheduler.channel.payload import Unpacker, held_of
from rlinf_plugins.scheduler.channel.producer import Producer
from rlinf_plugins.scheduler.channel.state import Report
from rlinf_plugins.scheduler.channel.wire import DEFAULT_KEY, ItemRow

_ACTOR = "rlinf_plugins.scheduler.channel.actor"


class Channel:
    """A bounded stream of items between the stages of a flow.

    Make it once with :meth:`create` and hand it to Ray tasks and actors, or find it there by name with
    :meth:`connect`. :meth:`local` needs no Ray and serves the threads of one process.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    @classmethod
    def create(cls, name: str, config: ChannelConfig | None = None, **actor_options: Any) -> "Channel":
        """Start a channel's broker in a Ray actor; it lives as long as the creator, unless the options say otherwise.

        Args:
            name: Unique in the cluster.
            config: Options of the channel.
            actor_options: Ray actor options, e.g. ``lifetime="detached"`` or a scheduling strategy.

        Raises:
            ConfigError: The options are impossible, or the name is taken.
        """
        config = _checked(config)
        link: Link = require(_ACTOR, "").create(name, config, actor_options)
        return cls(link)

    @classmethod
    def connect(cls, name: str) -> "Channel":
        """Find a channel that another process has created.

        Raises:
            UnknownChannelError: There is none of this name; those that exist are listed.
        """
        link: Link = require(_ACTOR, "").connect(name)
        return cls(link)

    @classmethod
    def local(cls, name: str = "local", config: ChannelConfig | None = None) -> "Channel":
        """Start a channel on a thread of this process."""
        return cls(LocalLink(name, _checked(config)))

    @property
    def name(self) -> str:
        """The channel's name."""
        return self._link.name

    def producer(self, name: str | None = None) -> Producer:
        """Attach a producer.

        Args:
            name: Says who it is after a restart, and in reports; an earlier producer of this name is replaced.
        """
        return Producer(self._link, name or _anonymous("producer"), self._here())

    def consumer(self, name: str | None = None, *, group: str = "default", share: float = 1.0) -> Consumer:
        """Attach a consumer.

        Args:
            name: Says who it is; what an earlier consumer of this name held is delivered anew.
            group: Must be the channel's.
            share: Part of the weight it should get, relative to consumers that wait at the same time.

        Raises:
            WrongGroupError: The channel serves another group.
            ConfigError: A share that is not positive.
        """
        if share <= 0:
            raise ConfigError(f"a consumer's share must be positive, got {share}")
        return Consumer(self._link, name or _anonymous("consumer"), group, self._here(), share)

    def peek(self, limit: int = 1, *, key: Hashable = DEFAULT_KEY) -> list[tuple[ItemRow, Any]]:
        """The next items with their values, without taking them; items taken by others meanwhile are left out."""
        found = []
        unpacker, fetcher = Unpacker(self._call("directory")), Fetcher(self._link, self._here())
        for row in self._call("peek", key, limit):
            try:
                held = [drive(fetcher.fetch(tensor)) for tensor in held_of(row.payload)]
                found.append((row, unpacker.unpack(row.payload, held=held)))
            except (FileNotFoundError, ItemLostError):
                continue
        return found

    def qsize(self, *, key: Hashable = DEFAULT_KEY) -> int:
        """Items that are ready."""
        size: int = self._call("size", key)
        return size

    def stats(self) -> dict[str, Any]:
        """Totals since the start, what is held now, and the broker's CPU time."""
        stats: dict[str, Any] = self._call("stats")
        return stats

    def diagnose(self) -> list[str]:
        """One line per request that waits: who, where, for how long and why."""
        lines: list[str] = self._call("diagnose")
        return lines

    def reports(self) -> list[Report]:
        """What went wrong although no call failed: lost members, short groups, stale items; each is returned once."""
        reports: list[Report] = self._call("reports")
        return reports

    def dead_letters(self) -> list[tuple[ItemRow, Any]]:
        """Take the items that came back too often and were set aside; ``None`` for values that cannot be read."""
        found: list[tuple[ItemRow, Any]] = []
        unpacker = Unpacker("")
        for row in self._call("dead_letters"):
            try:
                found.append((row, unpacker.unpack(row.payload)))
            except UndecodableItemError:
                found.append((row, None))
        return found

    def spans(self) -> list[Span]:
        """Spans of the broker's calls since last asked, with ``ChannelConfig.trace``; puts and gets have ``items``."""
        spans: list[Span] = self._call("spans")
        return spans

    def set_version(self, version: int) -> None:
        """Announce the current weight version, for consumers that bound staleness."""
        self._call("set_version", version)

    def set_granularity(self, granularity: Granularity) -> None:
        """Form batches differently from now on; within an optimiser step, from its end on.

        Raises:
            ConfigError: It cannot form a batch.
            BatchTooLargeError: Its batches can never fill.
        """
        self._call("set_granularity", asdict(granularity))

    def close(self, reason: str = "closed") -> None:
        """Nothing more can be put; consumers get what is left, short tails included, and then the end of the stream."""
        self._call("close", reason)

    def destroy(self) -> None:
        """End the broker and remove its files, whatever is still in it."""
        destroy = getattr(self._link, "destroy", None)
        if destroy is None:
            raise ChannelError(f"channel {self.name!r} cannot be destroyed through this handle")
        destroy()

    def _call(self, operation: str, *arguments: Any) -> Any:
        reply = self._link.submit(operation, arguments)

        def steps() -> Any:
            answer = yield reply, None
            return answer

        return drive(steps())

    def _here(self) -> str:
        if isinstance(self._link, LocalLink):
            return self._link.node
        node: str = require(_ACTOR, "").node_name()
        return node


def _checked(config: ChannelConfig | None) -> ChannelConfig:
    config = config or ChannelConfig()
    config.validate("channel")
    return config


def _anonymous(role: str) -> str:
    return f"{role}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
