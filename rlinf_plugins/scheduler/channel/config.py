"""What a user decides about a channel: its bounds, its leases and the granularity of what consumers get."""

from dataclasses import dataclass, field
from typing import Literal

from rlinf_plugins.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Granularity:
    """How items are merged into batches. Chosen by the plan; the flow's code does not change with it.

    A batch ends before it would exceed ``count`` or ``weight``, but always has at least one unit: a single unit
    heavier than ``weight`` is a batch of its own.

    Attributes:
        count: Items per batch; ``None`` for no limit by number.
        weight: Weight (for instance tokens) per batch; ``None`` for no limit by weight.
        fill: Wait until the batch is full. Otherwise a batch is whatever is ready, at least one unit.
        exact: A short batch is an error, unless it is the tail of a closed channel.
        whole_groups: Items of one group (GRPO) are one indivisible unit; its declared size counts towards ``count``.
        step: Items per optimiser step; batches never cross a step's end, and the one that ends it says so.
    """

    count: int | None = 1
    weight: int | None = None
    fill: bool = True
    exact: bool = False
    whole_groups: bool = False
    step: int | None = None

    def validate(self, where: str) -> None:
        """Refuse combinations that cannot form a batch.

        Raises:
            ConfigError: No limit at all, a limit below 1, or an exact batch without a count.
        """
        for name in ("count", "weight", "step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{where}.{name} must be at least 1, got {value}")
        if self.count is None and self.weight is None and self.step is None:
            raise ConfigError(f"{where}: set count, weight or step; without any a batch would never be full")
        if self.exact and (self.count is None or not self.fill):
            raise ConfigError(f"{where}: exact batches need a count and fill=True")

    @classmethod
    def item(cls) -> "Granularity":
        """One item at a time."""
        return cls()

    @classmethod
    def group(cls) -> "Granularity":
        """One whole group at a time."""
        return cls(whole_groups=True)

    @classmethod
    def micro_batch(
        cls,
        count: int | None = None,
        *,
        tokens: int | None = None,
        whole_groups: bool = False,
        step: int | None = None,
    ) -> "Granularity":
        """Micro-batches by number of items, by token budget or both."""
        return cls(count=count, weight=tokens, whole_groups=whole_groups, step=step)

    @classmethod
    def global_batch(cls, count: int, *, whole_groups: bool = False) -> "Granularity":
        """The whole batch of an optimiser step at once, never a part of it."""
        return cls(count=count, exact=True, whole_groups=whole_groups, step=count)


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalConfig:
    """Durability across the broker's death.

    Attributes:
        directory: Folder on a local disk of the broker's node; created if absent.
        sync: ``"os"`` survives the death of the process, ``"disk"`` also that of the machine (one fsync per call).
        compact_bytes: The journal is rewritten when it is larger than this and at least half of it is obsolete.
    """

    directory: str
    sync: Literal["os", "disk"] = "os"
    compact_bytes: int = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelConfig:
    """Options of one channel.

    Attributes:
        max_items: Items the channel holds, ready or leased, before producers wait.
        max_bytes: Bytes it holds before producers wait.
        group: Consumers must name this group.
        granularity: How batches are formed where a consumer does not say.
        lease_seconds: A member that was not heard of for so long is dead; its deliveries go to others.
        stuck_seconds: Waiters older than this are named, with the reason.
        max_staleness: Oldest weight version a consumer gets, counted back from the current one; ``None``: any.
        max_deliveries: An item that came back so often is set aside and reported; ``None``: never.
        producers: The stream ends when so many producers have finished; ``None``: only ``close`` ends it.
        group_seconds: An incomplete group of which a contributor died is delivered short after this.
        inline_bytes: Items up to this size travel inside the control message.
        transport: How larger items travel: ``"segment"`` writes shared memory on the broker's node, ``"relay"`` sends
            them over Ray to the broker, which does; ``"auto"`` chooses from where the producer is.
        direct: Device types (``"cuda"``, ``"cpu"``) whose tensors stay with their producer until a consumer fetches
            them there, instead of passing through memory on the broker's node. They are lost with their producer.
        journal: Durability; ``None`` means that the broker's death loses what it holds.
        trace: Record a span per broker call.
    """

    max_items: int = 4096
    max_bytes: int = 4 << 30
    group: str = "default"
    granularity: Granularity = field(default_factory=Granularity)
    lease_seconds: float = 10.0
    stuck_seconds: float = 4.0
    max_staleness: int | None = None
    max_deliveries: int | None = None
    producers: int | None = None
    group_seconds: float = 60.0
    inline_bytes: int = 64 << 10
    transport: Literal["auto", "inline", "segment", "relay"] = "auto"
    direct: tuple[Literal["cuda", "cpu"], ...] = ()
    journal: JournalConfig | None = None
    trace: bool = False

    def validate(self, where: str) -> None:
        """Refuse bounds that admit nothing.

        Raises:
            ConfigError: A bound or duration that is not positive, or a default batch larger than the channel.
        """
        for name in ("max_items", "max_bytes", "lease_seconds", "stuck_seconds", "group_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{where}.{name} must be positive, got {getattr(self, name)}")
        for kind in self.direct:
            if kind not in ("cuda", "cpu"):
                raise ConfigError(f"{where}.direct: unknown device type {kind!r}; known: cuda, cpu")
        if self.direct and self.journal is not None:
            raise ConfigError(
                f"{where}: direct={self.direct} keeps tensors where no journal can; leave one of them out"
            )
        self.granularity.validate(f"{where}.granularity")
        count = self.granularity.count
        if count is not None and self.granularity.fill and count > self.max_items:
            raise ConfigError(
                f"{where}: a batch of {count} items can never fill a channel of max_items={self.max_items}"
            )
