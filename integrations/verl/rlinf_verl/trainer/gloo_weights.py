"""Weights from the trainer to rollout replicas on other devices, over gloo; for devices without an RDMA or NCCL path.

Chosen with ``actor_rollout_ref.rollout.checkpoint_engine.backend=gloo``; on virtual devices it takes the place of
veRL's default. The first actor rank sends buckets to all rollout workers, the other ranks only help to gather tensors.
"""

import pickle
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from verl.checkpoint_engine.base import CheckpointEngine
from verl.utils.net_utils import get_free_port

BACKEND = "gloo"
_TIMEOUT = timedelta(minutes=10)


class GlooCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """veRL's checkpoint engine over a gloo group of the first actor rank and all rollout workers.

    Args:
        bucket_size: Bytes sent at a time; a larger tensor makes a bucket of its own.
        is_master: Whether this is the first actor rank.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._group: Any = None
        self._place: tuple[int, int] | None = None

    def prepare(self) -> dict[str, Any]:
        """Return where the group's members meet; only the first actor rank offers a place."""
        if not self._is_master or self._group is not None:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        return {"host": host, "port": get_free_port(host)[0]}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give the first actor rank number 0, rollout workers the numbers after it, and the others none (-1)."""
        world, place = 1 + rollout_world_size, metadata[0]
        actors = [0] + [-1] * (actor_wg_world_size - 1)
        rollouts = list(range(1, world))
        return tuple(  # type: ignore[return-value]
            {"rank": ranks, "world_size": [world] * len(ranks), "place": [place] * len(ranks)}
            for ranks in (actors, rollouts)
        )

    def init_process_group(self, rank: int, world_size: int, place: dict[str, Any]) -> None:
        """Join the group, or keep the one there is: its members do not change during a job."""
        if self._place is None and rank >= 0:
            store = TCPStore(place["host"], place["port"], world_size, is_master=rank == 0, timeout=_TIMEOUT)
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [
                dist.ProcessGroupGloo.create_device(hostname=ray.util.get_node_ip_address().strip("[]"))
            ]
            options._timeout = _TIMEOUT
            self._group = dist.ProcessGroupGloo(store, rank, world_size, options)
        self._place = (rank, world_size)

    def finalize(self) -> None:
        """Nothing to free: buckets live as long as a call."""

    @torch.no_grad()
    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> dict:
        """Send all weights; every actor rank walks the whole generator, since gathering a tensor needs them all."""
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in weights:
            if self._group is None:
                continue
            if bucket and size + tensor.nbytes > self._bucket_size:
                self._send(bucket)
                bucket, size = [], 0
            bucket.append((name, tensor.detach().to("cpu").contiguous()))
            size += tensor.nbytes
        if self._group is not None:
            if bucket:
                self._send(bucket)
            self._send([])
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield what the first actor rank sends."""
        while bucket := self._receive():
            for named in bucket:
                yield named

    def _send(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        header = pickle.dumps([(name, tensor.dtype, tensor.shape) for name, tensor in bucket])
        self._broadcast(torch.tensor([len(header)]))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        if bucket:
            self._broadcast(torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket]))

    def _receive(self) -> list[tuple[str, torch.Tensor]]:
        length = self._broadcast(torch.zeros(1, dtype=torch.int64))
        header = self._broadcast(torch.zeros(int(length), dtype=torch.uint8))
        entries = pickle.loads(header.numpy().tobytes())
        sizes = [dtype.itemsize * shape.numel() for _, dtype, shape in entries]
        if not entries:
            return []
        parts = self._broadcast(torch.zeros(sum(sizes), dtype=torch.uint8)).split(sizes)
        return [
            (name, part.clone().view(dtype).view(shape))
            for (name, dtype, shape), part in zip(entries, parts, strict=True)
        ]

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor
