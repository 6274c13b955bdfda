"""Whom to evict: the residents whose absence will cost least, given who is needed next."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations

_HORIZON = 8
"""Uses looked ahead; the choice rarely depends on later ones, and the search grows with it."""

_SEARCHED = 6
"""Candidates up to which all choices are weighed; beyond, those needed latest go first."""

_UNKNOWN_RETURN = 0.5
"""Share of a return's cost charged for a resident with no known use ahead: it may well be back in the next step."""

Sizes = Mapping[str, Mapping[str, int]]
"""Bytes on each device, by resident."""


def choose(
    wanted: str,
    candidates: Iterable[str],
    sizes: Sizes,
    room: Mapping[str, int],
    future: Sequence[str],
    seconds: Callable[[str, str], float],
) -> tuple[str, ...] | None:
    """Choose residents to evict so that ``wanted`` fits.

    The cheapest choice over the known future is found exactly: Belady's rule for objects of different size and cost,
    by recursion over the uses ahead, with evictions only when room is needed.

    Args:
        wanted: Who comes.
        candidates: Who may leave; all are on the devices now.
        sizes: Bytes of everybody named.
        room: Bytes on each device that ``wanted`` and the candidates share.
        future: Names in the order of their next uses, without ``wanted`` itself.
        seconds: ``seconds("onload" or "offload", name)``: cost of a move.

    Returns:
        Names to evict, the one needed latest first; None if even all of them would not be enough.
    """
    present = frozenset(candidates)
    if not _fits({wanted}, sizes, room):
        return None
    if len(present) > _SEARCHED:
        return _latest_first(wanted, present, sizes, room, future)
    ahead = [name for name in future if name in present][:_HORIZON]

    @cache
    def cost(there: frozenset[str], position: int) -> float:
        """Seconds of all moves from the use at ``position`` on, with ``there`` on the devices."""
        if position == len(ahead):
            return sum(_UNKNOWN_RETURN * seconds("onload", name) for name in {wanted, *present} - there)
        name = ahead[position]
        if name in there:
            return cost(there, position + 1)
        return seconds("onload", name) + min(
            leaving(gone) + cost(there - gone | {name}, position + 1) for gone in _sufficient(name, there, sizes, room)
        )

    def leaving(gone: frozenset[str]) -> float:
        return sum(seconds("offload", name) for name in gone)

    best = min(
        _sufficient(wanted, present, sizes, room),
        key=lambda gone: (
            leaving(gone) + cost(present - gone | {wanted}, 0),
            sorted(-_next_use(name, future) for name in gone),
            sorted(gone),
        ),
    )
    return tuple(sorted(best, key=lambda name: -_next_use(name, future)))


def _sufficient(wanted: str, there: frozenset[str], sizes: Sizes, room: Mapping[str, int]) -> Iterator[frozenset[str]]:
    """Yield the smallest sets whose leaving makes ``wanted`` fit: none of a set's members could have stayed."""
    found: list[frozenset[str]] = []
    others = sorted(there - {wanted})
    for count in range(len(others) + 1):
        for gone in map(frozenset, combinations(others, count)):
            if not any(smaller <= gone for smaller in found) and _fits(there - gone | {wanted}, sizes, room):
                found.append(gone)
                yield gone


def _fits(names: Iterable[str], sizes: Sizes, room: Mapping[str, int]) -> bool:
    total = dict.fromkeys(room, 0)
    for name in names:
        for device, nbytes in sizes[name].items():
            if device in total:
                total[device] += nbytes
    return all(total[device] <= nbytes for device, nbytes in room.items())


def _latest_first(
    wanted: str, present: frozenset[str], sizes: Sizes, room: Mapping[str, int], future: Sequence[str]
) -> tuple[str, ...]:
    gone: list[str] = []
    for name in sorted(present, key=lambda name: (-_next_use(name, future), name)):
        there = present - set(gone) | {wanted}
        if _fits(there, sizes, room):
            break
        if not _fits(there, sizes, {device: room[device] for device in sizes[name] if device in room}):
            gone.append(name)
    return tuple(gone)


def _next_use(name: str, future: Sequence[str]) -> int:
    return future.index(name) if name in future else len(future)
