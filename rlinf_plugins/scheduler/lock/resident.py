"""What the context switcher moves: anything that occupies device memory and can leave it and come back."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from rlinf_plugins.scheduler.lock.fence import Permit


@runtime_checkable
class Resident(Protocol):
    """Something with bytes on devices: an engine, a rollout's weights, its KV cache, an environment pool, a server.

    The protocol is structural: a class satisfies it by having these methods. Whoever moves bytes passes through the
    fence of the device with the permit it was given (``with fence.admit(permit, devices): ...``), so that a holder
    that lost its lease without noticing is refused by the resource itself.
    """

    @property
    def name(self) -> str:
        """Name, unique among the residents of a switcher."""
        ...

    @property
    def footprint(self) -> Mapping[str, int]:
        """Most bytes it occupies on each of its devices while it is there."""
        ...

    async def drain(self) -> None:
        """Finish or hand on the accepted work; afterwards nothing of it uses the devices until ``resume``."""
        ...

    async def offload(self, permit: Permit) -> None:
        """Begin to leave the devices. Returning is no proof that the bytes are free; ``resident_bytes`` is asked.

        Raises:
            StaleTokenError: The permit is not valid any more; nothing was moved.
        """
        ...

    async def onload(self, permit: Permit) -> None:
        """Come back to the devices; the bytes are there when it returns.

        Raises:
            StaleTokenError: The permit is not valid any more; nothing was moved.
        """
        ...

    async def resident_bytes(self) -> Mapping[str, int]:
        """Synchronise the devices, then measure the bytes that are there now; 0 or no entry for none."""
        ...

    async def resume(self) -> None:
        """Accept work again, after ``onload``."""
        ...
