"""The machines: nodes, devices, memory, kinds. From a file, or from Ray through :func:`from_ray_nodes`."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec
import yaml

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ClusterError


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One or several equal machines.

    Attributes:
        name: Name; equal machines are called ``name/0``, ``name/1``, ...
        kind: Kind of its devices, e.g. ``"H100"`` or ``"cpu"``.
        devices: Devices a machine has.
        memory_gib: Memory of one device in GiB.
        cpus: CPU cores a machine has.
        host_memory_gib: Main memory of a machine in GiB.
        count: Number of such machines.
        watts: Power of one busy device in watts; None: energy is not computed.
        idle_watts: Power of one idle device in watts.
    """

    name: str
    kind: str = "gpu"
    devices: int
    memory_gib: float = math.inf
    cpus: float = math.inf
    host_memory_gib: float = math.inf
    count: int = 1
    watts: float | None = None
    idle_watts: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All machines a job may use.

    Attributes:
        nodes: The machines; devices are numbered in this order.
        intra_gib_s: Bandwidth between two devices of a node in GiB/s.
        inter_gib_s: Bandwidth between two nodes in GiB/s.
    """

    nodes: tuple[Node, ...]
    intra_gib_s: float = 200.0
    inter_gib_s: float = 25.0

    def __post_init__(self) -> None:
        if self.size == 0:
            raise ClusterError("the cluster has zero devices; nothing can be placed")
        for node in self.nodes:
            if node.devices < 0 or node.count < 1 or not node.memory_gib > 0:
                raise ClusterError(f"node {node.name!r}: devices, count and memory must be positive, got {node}")
        for kind in self.kinds:
            if len({(n.devices, n.memory_gib) for n in self.nodes if n.kind == kind and n.devices}) > 1:
                raise ClusterError(f"nodes of kind {kind!r} differ in devices or memory; name their kinds differently")
        if not (self.intra_gib_s > 0 and self.inter_gib_s > 0):
            raise ClusterError(f"bandwidths must be positive, got {self.intra_gib_s} and {self.inter_gib_s} GiB/s")

    @classmethod
    def uniform(cls, devices: int, *, per_node: int = 8, memory_gib: float = math.inf, kind: str = "gpu") -> Self:
        """Return ``devices`` equal devices on nodes of ``per_node``; fewer than that share one node.

        Raises:
            ClusterError: ``devices`` is not positive or no multiple of the node's size.
        """
        if devices < 1:
            raise ClusterError(f"the cluster has {devices} devices; nothing can be placed")
        per_node = min(per_node, devices)
        if devices % per_node:
            raise ClusterError(
                f"{devices} devices do not fill nodes of {per_node}; give a multiple or another node size"
            )
        node = Node(name="node", kind=kind, devices=per_node, memory_gib=memory_gib, count=devices // per_node)
        return cls(nodes=(node,))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "cluster") -> Self:
        """Build a cluster from plain mappings.

        Raises:
            ConfigError: An unknown key or a wrong type.
            ClusterError: Zero devices or nodes that contradict each other.
        """
        return from_mapping(cls, values, where)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a YAML or JSON file with the fields of this class."""
        try:
            values = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ClusterError(f"cannot read the cluster file {path}: {error}") from error
        return cls.from_mapping(values, str(path))

    def to_mapping(self) -> dict[str, Any]:
        """Return plain mappings that :meth:`from_mapping` takes; infinite amounts are left to their default."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        plain["nodes"] = [{k: v for k, v in node.items() if v not in (math.inf, None)} for node in plain["nodes"]]
        return plain

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Device kinds in the order of the nodes."""
        return tuple(dict.fromkeys(node.kind for node in self.nodes if node.devices))

    @cached_property
    def size(self) -> int:
        """All devices."""
        return sum(node.devices * node.count for node in self.nodes)

    def count(self, kind: str) -> int:
        """Devices of a kind."""
        return sum(node.devices * node.count for node in self.nodes if node.kind == kind)

    def node_of(self, kind: str) -> Node:
        """The node that has devices of this kind (the first: all are alike)."""
        return next(node for node in self.nodes if node.kind == kind and node.devices)

    def numbers(self, kind: str) -> tuple[int, ...]:
        """Global device numbers of a kind."""
        found: list[int] = []
        start = 0
        for node in self.nodes:
            total = node.devices * node.count
            if node.kind == kind:
                found.extend(range(start, start + total))
            start += total
        return tuple(found)

    def machines(self) -> tuple[tuple[str, Node, range], ...]:
        """Every machine as (name, description, its global device numbers)."""
        found = []
        start = 0
        for node in self.nodes:
            for index in range(node.count):
                name = node.name if node.count == 1 else f"{node.name}/{index}"
                found.append((name, node, range(start, start + node.devices)))
                start += node.devices
        return tuple(found)

    def check_actual(self, actual: "Cluster") -> None:
        """Refuse to plan for machines that are not there.

        Raises:
            ClusterError: A node size, a count or a memory size differs; the message names the first that does.
        """
        for kind in self.kinds:
            if kind not in actual.kinds:
                raise ClusterError(
                    f"the cluster file has {kind!r} devices, the machines have {', '.join(actual.kinds)}"
                )
            mine, theirs = self.node_of(kind), actual.node_of(kind)
            if mine.devices != theirs.devices:
                raise ClusterError(
                    f"the cluster file says {mine.devices} {kind} devices a node, the machines have {theirs.devices}"
                )
            if self.count(kind) > actual.count(kind):
                raise ClusterError(
                    f"the file has {self.count(kind)} {kind} devices, only {actual.count(kind)} are there"
                )
            if math.isfinite(mine.memory_gib) and mine.memory_gib > theirs.memory_gib * 1.01:
                raise ClusterError(
                    f"the file gives {kind} devices {mine.memory_gib} GiB, the machines have {theirs.memory_gib:.1f}"
                )


def from_ray_nodes(nodes: Iterable[Mapping[str, Any]], *, kind: str = "gpu", memory_gib: float = math.inf) -> Cluster:
    """Build a cluster from what ``ray.nodes()`` returned; Ray itself is not imported.

    Args:
        nodes: Ray's records; dead nodes are skipped. A node's size is its ``GPU`` resource.
        kind: Kind to give the devices.
        memory_gib: Memory of one device in GiB, which Ray does not know.

    Raises:
        ClusterError: No living node has devices.
    """
    found = []
    for record in sorted(nodes, key=lambda r: (str(r.get("NodeManagerAddress", "")), str(r.get("NodeID", "")))):
        resources = record.get("Resources", {})
        if not record.get("Alive", record.get("alive", True)) or not resources.get("GPU"):
            continue
        found.append(
            Node(
                name=str(record.get("NodeManagerAddress") or record.get("NodeID")),
                kind=kind,
                devices=int(resources["GPU"]),
                memory_gib=memory_gib,
                cpus=float(resources.get("CPU", 0.0)),
                host_memory_gib=float(resources.get("memory", math.inf)) / 2**30,
            )
        )
    if not found:
        raise ClusterError(
            "no living Ray node has devices (resource 'GPU'); start Ray with num_gpus or check the nodes"
        )
    return Cluster(nodes=tuple(found))
