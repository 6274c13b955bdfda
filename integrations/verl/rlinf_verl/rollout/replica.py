"""veRL's view of the engine: the replica that launches its server actor, and the adapter inside each trainer rank."""

import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.cpu.devices import VirtualDevices
from rlinf_verl.rollout.options import HFOptions, check_single_process, options
from rlinf_verl.rollout.server import HFServer, RolloutServer
from rlinf_verl.rollout.weights import pack


def server_name(rollout: str, replica_rank: int, suffix: str = "") -> str:
    """Name of the server's Ray actor; the adapter finds the server by it."""
    return f"{rollout}_server_{replica_rank}_0{suffix}"


class InProcessReplica(RolloutReplica):
    """One server actor beside the replica's worker; the engine lives in it."""

    server_class: type[RolloutServer] = HFServer
    options_class: type[Any] = HFOptions

    async def launch_servers(self) -> None:
        """Start the server on the node of the replica's worker.

        Raises:
            ConfigError: Options that the engine does not know or cannot satisfy.
        """
        check_single_process(self.config)
        options(self.config, self.config.name, self.options_class)
        role = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
        actor = ray.remote(self.server_class).options(
            name=server_name(self.config.name, self.replica_rank, role + self.name_suffix),
            num_cpus=0,
            max_concurrency=self.max_concurrency,
            scheduling_strategy=await self._beside_worker(),
            runtime_env=await self._device_of_worker(),
        )
        server = actor.remote(
            config=self.config,
            model_config=self.model_config,
            rollout_mode=self.rollout_mode,
            replica_rank=self.replica_rank,
        )
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"{self.config.name}:{self.replica_rank}"

    async def _device_of_worker(self) -> dict[str, Any]:
        """A server computes on its worker's virtual device; real ones it finds by itself."""
        if VirtualDevices.from_environment() is None:
            return {}
        device = await self.workers[0].__ray_call__.remote(lambda _: os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        return {"env_vars": {"CUDA_VISIBLE_DEVICES": device}}

    async def _beside_worker(self) -> Any:
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)


class InProcessAdapter(BaseRollout):
    """Lives in each trainer rank (or checkpoint-engine worker) and talks to the replica's server.

    Args:
        config: veRL's rollout config.
        model_config: veRL's model config.
        device_mesh: Unused; a replica is one process.
        replica_rank: -1 derives it from the trainer's rank.
    """

    options_class: type[Any] = HFOptions

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        check_single_process(self.config)
        self._options = options(self.config, self.config.name, self.options_class)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._handle: Any = None

    @property
    def _server(self) -> Any:
        """The server; looked up late, because it starts after the trainer."""
        if self._handle is None:
            self._handle = ray.get_actor(server_name(self.config.name, self.replica_rank))
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        """Wake the server."""
        if self.config.free_cache_engine:
            await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Send the server to sleep."""
        if self.config.free_cache_engine:
            await self._server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Send weights to the server, in place, as version ``global_steps``.

        The generator is drained whatever happens: producing a tensor is a collective of all trainer ranks, so a rank
        that stopped early would hang the others.

        Raises:
            ConfigError: A wire format or LoRA mode this engine does not take.
            WeightSyncError: The weights do not fit the rollout model.
        """
        source = ensure_async_iterator(weights)
        try:
            self._check(wire_format, peft_config)
            await self._send(source, global_steps)
        finally:
            async for _ in source:
                pass

    @staticmethod
    def _check(wire_format: str, peft_config: Any) -> None:
        if wire_format != "named_tensors":
            raise ConfigError(f"an in-process rollout takes whole tensors, not wire_format={wire_format!r}")
        if peft_config is not None:
            raise ConfigError(
                "an in-process rollout serves merged weights; set actor_rollout_ref.model.lora.merge=True"
            )

    async def _send(self, source: AsyncIterator[tuple[str, torch.Tensor]], version: int | None) -> None:
        server = self._server
        await server.begin_weight_sync.remote()
        try:
            async for bucket in pack(source, self._options.bucket_mb << 20):
                await server.write_weights.remote(bucket)
        except BaseException:
            await server.end_weight_sync.remote(version, failed=True)
            raise
        await server.end_weight_sync.remote(version)
