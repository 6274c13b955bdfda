"""Rollout replicas as residents of the context switcher: weights and KV cache apart, driven by veRL's own verbs."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from rlinf_plugins.core.errors import ConfigError, StaleTokenError
from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_verl.trainer import worker_side
from rlinf_verl.trainer.ranks import call_all, ranks_of, seal

Refill = Callable[[Any], Awaitable[None]]
"""Brings current weights to one replica whose weights are mapped, and maps its KV cache; see :func:`refill_through`."""


class Replica:
    """What the weights and the cache of one rollout replica share.

    veRL's servers know no fence. So every move shows its permit to the devices' fences before and again after: a holder
    that lost its lease in between takes its own move back and is refused.

    Sleeping discards the weights (vLLM's level 2), and so does releasing the cache, which vLLM does by sleeping and
    mapping empty weights. They come back with the cache, by ``refill``: veRL's weight sync ends with a mapped cache.

    Args:
        replica: veRL's ``RolloutReplica``.
        devices: Name of each of its workers' devices, in the order of ``replica.workers``.
        router: Handle of the load balancer (``get_router_handle``).
        fence_folder: Where the device fences of every machine are.
        drain: ``"finish"`` lets running requests end; ``"move"`` aborts them with their partial output, to be continued
            on another replica. Either way the replica is off the router first, so that sticky requests go elsewhere.
        refill: Brings current weights back.
        keeps_weights: Sleeping keeps the weights on the host (vLLM's level 1: colocated replicas, LoRA adapters).
        measured: Measure bytes by the devices' totals. False on virtual devices, where each process sees only its own:
            then what was declared is believed.

    Raises:
        ConfigError: Its weights would be lost for good, or its servers cannot say when they are drained.
    """

    def __init__(
        self,
        replica: Any,
        devices: Sequence[str],
        router: Any,
        *,
        fence_folder: str,
        drain: Literal["finish", "move"] = "finish",
        refill: Refill | None = None,
        keeps_weights: bool = False,
        measured: bool = True,
    ) -> None:
        self.measured = measured
        self.verl = replica
        self.name = f"replica {replica.replica_rank}"
        self.ranks = ranks_of(self.name, replica.workers, devices)
        self._router = router
        self._folder = fence_folder
        self._how = drain
        self._refill = refill
        self._keeps_weights = keeps_weights
        self._weights_lost = False
        if refill is None and not keeps_weights:
            raise ConfigError(
                f"{self.name}: sleeping discards the weights and nothing refills them; naive weight sync wakes all "
                "replicas together, so waking one needs rollout.checkpoint_engine.backend other than 'naive'"
            )
        if drain == "finish" and not all(hasattr(server, "wait_for_requests_to_drain") for server in replica.servers):
            raise ConfigError(f"the servers of {self.name} cannot wait for their requests to end; use drain='move'")

    async def drain(self) -> None:
        """Take the replica off the router and let its requests end, or send them on."""
        await self._router.remove_servers.remote([self.verl.server_address])
        if self._how == "move":
            await self.verl.abort_all_requests(reject_request=True)
        else:
            await call_all(server.wait_for_requests_to_drain.remote() for server in self.verl.servers)

    async def resume(self) -> None:
        """Accept requests and come back to the router."""
        if self._how == "move":
            await self.verl.resume_generation()
        await self._router.add_servers.remote({self.verl.server_address: self.verl.server_handle})

    async def sleep(self) -> None:
        """Free weights and cache."""
        await self.verl.sleep()
        self._weights_lost = not self._keeps_weights

    async def map_weights(self) -> None:
        """Give the weights their memory; what is in it comes with the cache if it was discarded."""
        await call_all(server.wake_up.remote(tags=["weights"]) for server in self.verl.servers)

    async def release_cache(self) -> None:
        """Free the cache."""
        await self.verl.release_kv_cache()
        self._weights_lost = not self._keeps_weights

    async def map_cache(self) -> None:
        """Give the cache its memory, and the weights their values if they were discarded."""
        if self._weights_lost and self._refill is not None:
            await self._refill(self.verl)
            self._weights_lost = False
        else:
            await self.verl.resume_kv_cache()

    async def used_bytes(self) -> dict[str, int]:
        """All bytes in use on its devices."""
        found = await call_all(worker.__ray_call__.remote(worker_side.device_used_bytes) for worker, _ in self.ranks)
        return {device: nbytes for (_, device), nbytes in zip(self.ranks, found, strict=True)}

    async def guarded(
        self, permit: Permit, move: Callable[[], Awaitable[None]], back: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Run ``move`` between two looks at the fences; undo it with ``back`` if the second one refuses.

        Raises:
            StaleTokenError: The permit was not valid any more, or stopped to be while bytes moved.
        """
        await seal(self.ranks, permit, self._folder)
        await move()
        try:
            await seal(self.ranks, permit, self._folder)
        except StaleTokenError:
            if back is not None:
                await back()
            raise


class _Metered:
    """Bytes of something whose own size cannot be asked for: the device's total, before and after it moved.

    Moves on a device follow each other, so the difference is its own; what a colocated engine allocates meanwhile
    shows as noise, for which the switcher has its ``slack``.
    """

    def __init__(self, name: str, replica: Replica, nbytes: int, awake: bool) -> None:
        self.name = name
        self._replica = replica
        self._nbytes = nbytes
        self._here = dict.fromkeys(self.footprint, nbytes if awake else 0)
        self._without: dict[str, int] | None = None

    @property
    def footprint(self) -> Mapping[str, int]:
        """Bytes on each of the replica's devices."""
        return {device: self._nbytes for _, device in self._replica.ranks}

    async def resident_bytes(self) -> Mapping[str, int]:
        """What its arrival took, as measured then; after it left, what the devices hold beyond the rest."""
        if self._without is None:
            return dict(self._here)
        used = await self._replica.used_bytes()
        return {device: max(0, used[device] - self._without[device]) for device in self._without}

    async def _come(
        self, permit: Permit, move: Callable[[], Awaitable[None]], back: Callable[[], Awaitable[None]]
    ) -> None:
        before = await self._replica.used_bytes()
        self._without = before  # until it is there, whatever came belongs to it
        await self._replica.guarded(permit, move, back)
        if self._replica.measured:
            used = await self._replica.used_bytes()
            self._here = {device: max(0, used[device] - before[device]) for device in used}
        else:
            self._here = dict(self.footprint)
        self._without = None

    async def _leave(self, permit: Permit, move: Callable[[], Awaitable[None]]) -> None:
        used = await self._replica.used_bytes()
        await self._replica.guarded(permit, move)
        self._without = {device: used[device] - self._here[device] for device in used}
        if not self._replica.measured:
            self._without, self._here = None, dict.fromkeys(self._here, 0)


class ReplicaWeights(_Metered):
    """The weights of a rollout replica.

    Args:
        name: Its name.
        replica: The replica.
        nbytes: Bytes on each of its devices.
        awake: Whether the replica is awake when this is made.
    """

    def __init__(self, name: str, replica: Replica, nbytes: int, *, awake: bool = True) -> None:
        super().__init__(name, replica, nbytes, awake)

    async def drain(self) -> None:
        """Nothing to do: its cache was drained and left before."""

    async def offload(self, permit: Permit) -> None:
        """``RolloutReplica.sleep``."""
        await self._leave(permit, self._replica.sleep)

    async def onload(self, permit: Permit) -> None:
        """``wake_up(tags=["weights"])`` on every server."""
        await self._come(permit, self._replica.map_weights, self._replica.sleep)

    async def resume(self) -> None:
        """Nothing to do: the replica serves when its cache is there."""


class ReplicaCache(_Metered):
    """The KV cache of a rollout replica; add it ``after`` the weights.

    Args:
        name: Its name.
        replica: The replica.
        nbytes: Bytes on each of its devices.
        awake: Whether the replica is awake when this is made.
    """

    def __init__(self, name: str, replica: Replica, nbytes: int, *, awake: bool = True) -> None:
        super().__init__(name, replica, nbytes, awake)

    async def drain(self) -> None:
        """Take the replica off the router; its requests end or move on."""
        await self._replica.drain()

    async def offload(self, permit: Permit) -> None:
        """``RolloutReplica.release_kv_cache``."""
        await self._leave(permit, self._replica.release_cache)

    async def onload(self, permit: Permit) -> None:
        """``RolloutReplica.resume_kv_cache``, by way of a weight sync if the weights were discarded."""
        await self._come(permit, self._replica.map_cache, self._replica.release_cache)

    async def resume(self) -> None:
        """Serve again."""
        await self._replica.resume()


def refill_through(manager: Any, global_steps: Callable[[], int]) -> Refill:
    """Return a refill that sends the actor's weights to one replica through veRL's checkpoint engine.

    Args:
        manager: The trainer's ``CheckpointEngineManager``, on another backend than ``naive``.
        global_steps: Gives the version of the weights.

    Raises:
        ConfigError: The backend is ``naive``.
    """
    if manager.backend == "naive":
        raise ConfigError("naive weight sync wakes all replicas together; set rollout.checkpoint_engine.backend")

    async def refill(replica: Any) -> None:
        one = type(manager)(manager.config, manager.actor_wg, [replica])
        await one.update_weights(global_steps())

    return refill
