"""Streaming puts: many small requests become few large ones, without a delay when there is no hurry."""

import threading
from collections import deque
from collections.abc import Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from rlinf_plugins.core.errors import ChannelTimeoutError, UnknownMemberError
from rlinf_plugins.scheduler.channel.link import Reply
from rlinf_plugins.scheduler.channel.wire import DEFAULT_KEY, Put, Row

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.channel.producer import Producer

_IN_FLIGHT = 2
_ROWS_PER_CALL = 512


class _Sent(NamedTuple):
    base: int
    rows: list[Row]
    nbytes: int


class Stream:
    """Puts that return before the channel has the item; :meth:`flush` says when it has all.

    What was put while two requests are on their way goes with the next one, so that batches grow with the load.
    Obtained from :meth:`Producer.stream`; a context manager that flushes at the end of the block.

    Args:
        producer: Whose items they are.
        window: Items that may be unconfirmed before :meth:`put` waits.
        window_bytes: Bytes that may be unconfirmed before it waits.
    """

    def __init__(self, producer: "Producer", window: int, window_bytes: int) -> None:
        self._producer = producer
        self._window = window
        self._window_bytes = window_bytes
        self._changed = threading.Condition()
        self._rows: deque[Row] = deque()
        self._sent: dict[int, _Sent] = {}
        self._unconfirmed = 0
        self._bytes = 0
        self._error: BaseException | None = None
        self._life = 0  # of the broker; answers from an earlier one are void

    def put(
        self,
        value: Any,
        *,
        key: Hashable = DEFAULT_KEY,
        weight: int = 1,
        version: int | None = None,
        group: tuple[str, int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Put one item without waiting for the channel; arguments as in :meth:`Producer.put`.

        Raises:
            ChannelTimeoutError: The window did not open in time; the item was not taken.
            ChannelError: An earlier item was refused.
        """
        rows = self._producer.pack([Put(value, key, weight, version, group)])
        size = rows[0][3]
        with self._changed:
            self._wait(lambda: self._unconfirmed < self._window and self._bytes + size <= self._window_bytes, timeout)
            self._rows.extend(rows)
            self._unconfirmed += 1
            self._bytes += size
            self._send()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the channel has everything.

        Raises:
            ChannelTimeoutError: It has not in time; nothing is given up, flush again.
            ChannelError: An item was refused.
        """
        with self._changed:
            self._wait(lambda: not self._unconfirmed, timeout)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.flush()

    def _wait(self, condition: Any, timeout: float | None) -> None:
        ready = self._changed.wait_for(lambda: self._error is not None or condition() or not self._unconfirmed, timeout)
        if isinstance(self._error, UnknownMemberError):
            self._error = None
            self._repeat()
            ready = self._changed.wait_for(lambda: self._error is not None or condition(), timeout)
        if self._error is not None:
            raise self._error
        if not ready:
            raise ChannelTimeoutError(
                f"channel {self._producer.channel!r} has not confirmed {self._unconfirmed} items "
                f"({self._bytes} bytes) of {self._producer.name!r} in {timeout:g} s"
            )

    def _send(self) -> None:
        while self._rows and len(self._sent) < _IN_FLIGHT and self._error is None:
            rows = [self._rows.popleft() for _ in range(min(len(self._rows), _ROWS_PER_CALL))]
            base, reply = self._producer.submit(rows)
            self._sent[base] = _Sent(base, rows, sum(row[3] for row in rows))
            self._expect(base, reply)

    def _expect(self, base: int, reply: Reply) -> None:
        life = self._life
        reply.then(lambda answer: self._answered(life, base, answer))

    def _answered(self, life: int, base: int, answer: Any) -> None:
        with self._changed:
            if life != self._life:
                return
            if isinstance(answer, BaseException):
                self._error = self._error or answer
            else:
                sent = self._sent.pop(base)
                self._unconfirmed -= len(sent.rows)
                self._bytes -= sent.nbytes
                self._send()
            self._changed.notify_all()

    def _repeat(self) -> None:
        """Send again what a restarted broker may not have; it knows what it has."""
        self._life += 1
        unsure, self._sent = sorted(self._sent.values()), {}
        self._producer.resume()
        for sent in unsure:
            base, reply = self._producer.submit(sent.rows, sent.base)
            self._sent[base] = sent._replace(base=base)
            self._expect(base, reply)
