"""The consumer's side of tensors that stay with their producer: chooses the way, and gets them."""

import threading
from typing import Any

from rlinf_plugins.scheduler.channel.held import Held
from rlinf_plugins.scheduler.channel.link import FutureReply, Link, Reply, Steps
from rlinf_plugins.scheduler.channel.peers import IPC, Receiver, choose, open_shared


class Fetcher:
    """Fetches tensors from producers.

    Args:
        link: Way to the broker, which passes requests on.
        node: Where this process runs.
    """

    def __init__(self, link: Link, node: str) -> None:
        self._link = link
        self._node = node
        self._receivers: dict[tuple[int, str], Receiver] = {}
        self._lock = threading.Lock()

    def fetch(self, held: Held) -> Steps[Any]:
        """Get a tensor; a copy of this process's own.

        Raises:
            ItemLostError: Its producer is gone.
            ChannelError: The way to it failed; it can be tried again.
        """
        way = choose(held.device, held.node == self._node)
        if way == IPC:
            handle = yield self._ask(held, way, ()), None
            tensor = open_shared(handle, held.device)
        else:
            tensor = yield from self._receive(held, way)
        return tensor.requires_grad_() if held.requires_grad else tensor

    def _ask(self, held: Held, way: str, place: tuple[Any, ...]) -> Reply:
        return self._link.submit("fetch", (held.owner, held.number, way, place))

    def _receive(self, held: Held, way: str) -> Steps[Any]:
        key, replies = (held.owner, way), []
        with self._lock:
            receiver = self._receivers.get(key)
            if receiver is None:
                receiver = self._receivers[key] = Receiver(way)
        coming = receiver.receive(held.shape, held.dtype, lambda place: replies.append(self._ask(held, way, place)))
        try:
            yield replies[0], None
            tensor = yield FutureReply(coming, self._link.name), None
        except BaseException:
            # What this group brings next is not known any more; the next tensor comes through a new one.
            with self._lock:
                if self._receivers.get(key) is receiver:
                    del self._receivers[key]
            receiver.close()
            raise
        return tensor
