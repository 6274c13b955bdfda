"""Descriptions of tensors that stay with their producer."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.channel.shelf import Shelf


class Held(NamedTuple):
    """A tensor its producer holds.

    Attributes:
        owner: The producer's handle.
        number: The producer's number for the tensor.
        node: Where the producer runs.
        device: UUID of the GPU, empty for a tensor in main memory.
        shape: Its shape.
        dtype: Its dtype's name in torch.
        nbytes: Its bytes.
        requires_grad: Whether it was a leaf that requires gradients.
    """

    owner: int
    number: int
    node: str
    device: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    requires_grad: bool


class Holding:
    """What one item leaves on the shelf while it is being packed.

    Args:
        shelf: Where tensors are kept.
    """

    def __init__(self, shelf: "Shelf") -> None:
        self._shelf = shelf
        self.held: list[Held] = []

    def __call__(self, obj: Any) -> int | None:
        """Keep ``obj`` if it is a tensor to be kept, and return its place among those of the item."""
        if not self._shelf.wants(obj):
            return None
        self.held.append(self._shelf.place(obj))
        return len(self.held) - 1

    def undo(self) -> None:
        """Let go of what was kept."""
        self._shelf.discard([held.number for held in self.held])
        self.held.clear()
