"""Tells brokers that this process lives, for all its members, from one thread."""

import threading

from rlinf_plugins.core.errors import ChannelError
from rlinf_plugins.scheduler.channel.link import Link


class Heart:
    """Prolongs the leases of the members it is given, three times per lease.

    Args:
        link: Way to the broker.
        lease_seconds: The channel's lease.
    """

    def __init__(self, link: Link, lease_seconds: float) -> None:
        self._link = link
        self._interval = lease_seconds / 3
        self._handles: set[int] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, handle: int) -> None:
        """Beat for a member from now on."""
        with self._changed:
            self._handles.add(handle)
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="channel-heart", daemon=True)
                self._thread.start()

    def remove(self, handle: int) -> None:
        """Stop beating for a member; the thread ends with the last."""
        with self._changed:
            self._handles.discard(handle)
            self._changed.notify_all()

    def _beat(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._interval)
                if not self._handles:
                    self._thread = None
                    return
                handles = list(self._handles)
            try:
                self._link.submit("beat", (handles,))
            except ChannelError:  # destroyed; members find out with their next call
                with self._changed:
                    self._thread = None
                return
