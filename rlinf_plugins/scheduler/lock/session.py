"""A client's side of its leases: what it holds, until when it may believe that, and the heartbeats that extend it."""

import os
import socket
import threading
import uuid
from collections.abc import Callable

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import LockServiceError, StaleTokenError
from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_plugins.scheduler.lock.service import Held
from rlinf_plugins.scheduler.lock.types import Lease

Beat = Callable[[str, list[Held]], frozenset[int]]
_BEATS_PER_TTL = 3


class Session:
    """Leases of one process and the thread that renews them.

    Args:
        name: What the process is called in messages and introspection.
        ttl_s: Time to live of the lock's sessions, in seconds.
        beat: Sends one heartbeat and returns the tokens that are still held; raises ``LockServiceError`` if the lock
            cannot be reached.
        on_lost: Called from the heartbeat thread for each lease the lock has taken away.
        clock: Source of monotonic time.
    """

    def __init__(
        self,
        name: str,
        ttl_s: float,
        beat: Beat,
        on_lost: Callable[[Lease], None] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._host = socket.gethostname()
        self.id = f"{name}@{self._host}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._ttl = ttl_s
        self._beat = beat
        self._on_lost = on_lost
        self._clock = clock
        self._held: dict[int, Held] = {}
        self._good_until = float("-inf")
        self._trouble = ""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def owner(self, name: str) -> str:
        """Return the cluster-wide name of one of this session's owners."""
        return f"{self.id}/{name}" if name else self.id

    def entries(self, owner: str) -> int:
        """How often ``owner`` is in its lease."""
        with self._lock:
            return sum(count for lease, count in self._held.values() if lease.owner == owner)

    def held(self, token: int) -> Lease | None:
        """Return the lease with ``token``, if it is held."""
        with self._lock:
            return self._held[token][0] if token in self._held else None

    def start(self) -> None:
        """Begin to send heartbeats; a waiting request needs them as much as a lease."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name=f"lock-heartbeat {self.id}", daemon=True)
                self._thread.start()

    def entered(self, lease: Lease) -> None:
        """Record one entry into ``lease``."""
        with self._lock:
            _, count = self._held.get(lease.token, (lease, 0))
            self._held[lease.token] = (lease, count + 1)

    def left(self, lease: Lease) -> None:
        """Record that one entry is given up; called before the lock is told, so that no heartbeat revives it."""
        with self._lock:
            _, count = self._held.get(lease.token, (lease, 0))
            if count > 1:
                self._held[lease.token] = (lease, count - 1)
            else:
                self._held.pop(lease.token, None)

    def heard(self, sent: float) -> None:
        """Record that the lock answered a message sent at ``sent``: it counts the session as alive from then on."""
        with self._lock:
            self._good_until = max(self._good_until, sent + self._ttl)
            self._trouble = ""

    def permit(self, lease: Lease) -> Permit:
        """Return what to show to a device's fence.

        Raises:
            StaleTokenError: The lease was released or has been lost.
            LockServiceError: The lock has not answered for so long that the lease may have been given to others.
        """
        with self._lock:
            if lease.token not in self._held:
                raise StaleTokenError(f"{lease.owner} does not hold lease {lease.token} any more")
            late = self._clock() - self._good_until
            if late >= 0:
                raise LockServiceError(
                    f"lease {lease.token} of {lease.owner} may have been given away: no answer from the lock for "
                    f"{late + self._ttl:.3g} s{self._trouble}"
                )
            tokens = dict.fromkeys(lease.devices, lease.token)
            return Permit(tokens, lease.owner, self._good_until, self._host)

    def beat_once(self) -> None:
        """Send one heartbeat and drop the leases that the answer does not confirm."""
        with self._lock:
            held = list(self._held.values())
        sent = self._clock()
        try:
            alive = self._beat(self.id, held)
        except LockServiceError as error:
            with self._lock:
                self._trouble = f" ({error})"
            return
        self.heard(sent)
        with self._lock:
            lost = [lease for lease, _ in held if lease.token not in alive and lease.token in self._held]
            for lease in lost:
                del self._held[lease.token]
        for lease in lost:
            if self._on_lost is not None:
                self._on_lost(lease)

    def close(self) -> None:
        """Stop the heartbeats."""
        self._closing.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._ttl)

    def _run(self) -> None:
        while not self._closing.wait(self._ttl / _BEATS_PER_TTL):
            self.beat_once()
