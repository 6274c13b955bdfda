"""The record of every episode: each one that begins is closed exactly once."""

from collections import deque
from dataclasses import dataclass

from rlinf_plugins.envs.board import Board
from rlinf_plugins.envs.failures import Failure
from rlinf_plugins.envs.protocol import InitialState
from rlinf_plugins.envs.results import Ending, EpisodeRecord

_CAPACITY = 100_000


@dataclass(kw_only=True, slots=True)
class _Open:
    number: int
    initial: InitialState
    task: str = ""


class Ledger:
    """Open and closed episodes of a pool.

    Args:
        board: Where the workers write how far they have come.

    Attributes:
        begun: Episodes that began.
        closed: Episodes that ended.
        forgotten: Records that were not drained in time: only the last 100,000 are kept.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._open: dict[int, _Open] = {}
        self._closed: deque[EpisodeRecord] = deque(maxlen=_CAPACITY)
        self.begun = 0
        self.closed = 0
        self.forgotten = 0

    def begin(self, slot: int, initial: InitialState) -> int:
        """Open an episode of ``slot`` and return its number; one that is still open is abandoned."""
        self.close(slot, "abandoned")
        self._board.clear(slot)
        self._open[slot] = _Open(number=self.begun, initial=initial)
        self.begun += 1
        return self.begun - 1

    def describe(self, slot: int, task: str) -> None:
        """Note the instruction of the open episode, known after its reset."""
        if slot in self._open:
            self._open[slot].task = task

    def is_open(self, slot: int) -> bool:
        """Return whether ``slot`` has an episode that is not over."""
        return slot in self._open

    def initial(self, slot: int) -> InitialState:
        """Return where the open episode of ``slot`` started."""
        return self._open[slot].initial

    def number(self, slot: int) -> int:
        """Return the number of the open episode of ``slot``."""
        return self._open[slot].number

    def close(self, slot: int, ending: Ending, failure: Failure | None = None) -> None:
        """Close the episode of ``slot``, if one is open, with what the board says of it."""
        episode = self._open.pop(slot, None)
        if episode is None:
            return
        once, now, terminated, truncated, _ = (bool(flag) for flag in self._board.flags[slot])
        self.closed += 1
        self.forgotten += len(self._closed) == _CAPACITY
        self._closed.append(
            EpisodeRecord(
                number=episode.number,
                slot=slot,
                initial=episode.initial,
                task=episode.task,
                ending=ending,
                length=int(self._board.steps[slot]),
                ret=float(self._board.ret[slot]),
                success_once=once and failure is None,
                success_at_end=now and failure is None,
                terminated=terminated,
                truncated=truncated,
                failure=failure,
            )
        )

    def close_all(self) -> None:
        """Abandon every open episode."""
        for slot in list(self._open):
            self.close(slot, "abandoned")

    def drain(self) -> list[EpisodeRecord]:
        """Return the closed episodes, oldest first, and forget them."""
        records = list(self._closed)
        self._closed.clear()
        return records
