"""An in-process rollout server (text or VLA policy) as one resident: its own count says what it holds."""

from collections.abc import Mapping
from typing import Any

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_verl.trainer.ranks import call_all
from rlinf_verl.trainer.replica_residents import Replica


class ServerResident:
    """The weights of a replica whose engine runs in its server actor (``rollout.name=hf`` or ``openvla``).

    What such an engine has beside its weights lives no longer than a request, so weights are all that moves. They are
    discarded and come back through the replica's ``refill``.

    Args:
        name: Its name.
        replica: The replica; ``keeps_weights=False`` and a refill, or its weights would never leave.
        nbytes: Most bytes of its weights.

    Raises:
        ConfigError: Sleeping would not free anything, or the replica has several servers.
    """

    def __init__(self, name: str, replica: Replica, nbytes: int) -> None:
        config = replica.verl.config
        chosen = config.engine_kwargs.get(config.name) or {}
        if not chosen.get("discard_weights", False):
            raise ConfigError(
                f"{replica.name} keeps its weights while it sleeps; set "
                f"actor_rollout_ref.rollout.engine_kwargs.{config.name}.discard_weights=True"
            )
        if len(replica.ranks) != 1 or len(replica.verl.servers) != 1:
            raise ConfigError(f"{replica.name} has {len(replica.verl.servers)} servers; an in-process replica has one")
        self.name = name
        self._replica = replica
        self._nbytes = nbytes

    @property
    def footprint(self) -> Mapping[str, int]:
        """Bytes on the replica's device."""
        return {device: self._nbytes for _, device in self._replica.ranks}

    async def drain(self) -> None:
        """Take the replica off the router; its requests end or move on."""
        await self._replica.drain()

    async def offload(self, permit: Permit) -> None:
        """``RolloutReplica.sleep``, which frees the weights."""
        await self._replica.guarded(permit, self._replica.sleep)

    async def onload(self, permit: Permit) -> None:
        """Give the weights their memory back, fill it by a weight sync, and open generation."""
        await self._replica.guarded(permit, self._wake, self._replica.sleep)

    async def resident_bytes(self) -> Mapping[str, int]:
        """Ask the server."""
        (held,) = await call_all(server.__ray_call__.remote(weight_bytes) for server in self._replica.verl.servers)
        return dict.fromkeys(self.footprint, held)

    async def resume(self) -> None:
        """Come back to the router."""
        await self._replica.resume()

    async def _wake(self) -> None:
        await self._replica.map_weights()
        await self._replica.map_cache()


def weight_bytes(server: Any) -> int:
    """Return the bytes that the parameters of a server's engine occupy; 0 once they were released."""
    parameters = server._host.engine.weights._model.parameters()
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}.values())
