"""From what a lost worker left behind to the failure the user reads."""

from rlinf_plugins.core.supervision import ExitCause
from rlinf_plugins.envs.board import Board, Data, Phase
from rlinf_plugins.envs.failures import Failure, FailureKind
from rlinf_plugins.envs.slot import Slot


def explain(slot: Slot, cause: ExitCause, board: Board, data: Data | None) -> Failure:
    """Say why a worker was lost: its own error if it reported one, else the verdict on its silence, else its end."""
    action: tuple[tuple[float, ...], ...] = ()
    if slot.call is not None and slot.call.name == "step" and data is not None:
        action = tuple(tuple(map(float, step)) for step in data.actions[slot.index, : slot.call.count])
    kind: FailureKind = "crashed"
    reason, words, signal = f"the process {cause}", cause.last_words, cause.signal
    if slot.raised is not None:
        kind, reason, words, signal = "raised", slot.raised[1], slot.raised[2], ""
    elif slot.hang is not None:
        kind, reason = slot.hang
    return Failure(
        kind=kind,
        slot=slot.index,
        phase=Phase(board.phase[slot.index]).words,
        step=int(board.steps[slot.index]),
        reason=reason,
        signal=signal,
        last_words=words,
        action=action,
    )


def storm(slot: Slot, board: Board) -> Failure:
    """Say that a worker was given up."""
    return Failure(
        kind="storm",
        slot=slot.index,
        phase=Phase(board.phase[slot.index]).words,
        step=0,
        reason=f"it failed {slot.budget.failures} times without finishing an episode and is not restarted any more",
    )
