"""Is there room for a plan's pools? Checked on the nodes' free resources, before Ray is asked for anything."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from rlinf_plugins.core.errors import PlanError

CPUS_PER_BUNDLE = 3
"""``ResourcePoolManager.max_colocate_count``: CPUs that veRL asks for with every device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRequest:
    """One resource pool.

    Attributes:
        name: veRL's name of the pool.
        processes: Processes (devices) on each machine, as veRL's ``resource_pool_spec`` wants them.
        cpus_per_device: CPUs asked for with each device.
        memory_gib: Main memory asked for with each device; 0: none.
    """

    name: str
    processes: tuple[int, ...]
    cpus_per_device: float = CPUS_PER_BUNDLE
    memory_gib: float = 0.0


STANDALONE_CPUS = 2
"""CPUs that a standalone rollout replica asks for with every device (``RolloutReplica.init_standalone``)."""


def job_requests(spec: Mapping[str, Sequence[int]], config: DictConfig, *, separate: bool) -> list[PoolRequest]:
    """Return all pools that a job of veRL's will ask for.

    Args:
        spec: veRL's ``resource_pool_spec``: processes on each machine, by pool.
        config: veRL's configuration.
        separate: Rollout replicas have pools of their own, one each.
    """
    found = [PoolRequest(name=name, processes=tuple(processes)) for name, processes in spec.items()]
    if separate:
        rollout = config.actor_rollout_ref.rollout
        size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        per_node = min(size, rollout.n_gpus_per_node)
        replica = PoolRequest(
            name="rollout", processes=(per_node,) * (size // per_node), cpus_per_device=STANDALONE_CPUS
        )
        found += [replica] * (rollout.nnodes * rollout.n_gpus_per_node // size)
    return found


def check_resources(requests: Iterable[PoolRequest], nodes: Iterable[Mapping[str, Any]]) -> None:
    """Refuse pools that the machines cannot hold, before a placement group waits for them for ever.

    Each machine's share of a pool must fit on one node (veRL packs it strictly). Shares are placed largest first on the
    node with the least room that still holds them.

    Args:
        requests: The pools.
        nodes: Free resources of each node: ``name``, ``GPU``, ``CPU`` and ``memory_gib``.

    Raises:
        PlanError: A share fits nowhere; the message names the node that comes closest and the resource it is short of.
    """
    free = [dict(node) for node in nodes]
    if not free:
        raise PlanError("there is no node to place anything on")
    shares = [(count, request) for request in requests for count in request.processes]
    for count, request in sorted(shares, key=lambda entry: (-entry[0], entry[1].name)):
        need = {
            "GPU": float(count),
            "CPU": count * request.cpus_per_device,
            "memory_gib": count * request.memory_gib,
        }
        fitting = [node for node in free if all(node.get(key, 0.0) >= value for key, value in need.items() if value)]
        if not fitting:
            raise PlanError(_shortage(request, count, need, free))
        chosen = min(fitting, key=lambda node: (node.get("GPU", 0.0), str(node["name"])))
        for key, value in need.items():
            if value:
                chosen[key] -= value


def free_nodes(
    records: Iterable[Mapping[str, Any]], available: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Return what :func:`check_resources` needs from ``ray.nodes()`` and ``available_resources_per_node()``."""
    found = []
    for record in records:
        if record.get("Alive", record.get("alive", True)):
            free = available.get(str(record["NodeID"]), {})
            found.append(
                {
                    "name": str(record.get("NodeManagerAddress") or record["NodeID"]),
                    "GPU": float(free.get("GPU", free.get("NPU", 0.0))),
                    "CPU": float(free.get("CPU", 0.0)),
                    "memory_gib": float(free.get("memory", 0.0)) / 2**30,
                }
            )
    return found


def _shortage(request: PoolRequest, count: int, need: Mapping[str, float], free: list[dict[str, Any]]) -> str:
    def lacking(node: Mapping[str, Any]) -> list[str]:
        return [key for key, value in need.items() if value and node.get(key, 0.0) < value]

    closest = min(free, key=lambda node: (len(lacking(node)), -node.get("GPU", 0.0), str(node["name"])))
    short = ", ".join(
        f"{'memory' if key == 'memory_gib' else key}: {closest.get(key, 0.0):g} free of {need[key]:g} needed"
        for key in lacking(closest)
    )
    return (
        f"pool {request.name} needs {count} devices on one node and no node has room for them; "
        f"node {closest['name']} comes closest, short of {short}"
    )
