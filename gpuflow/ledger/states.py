"""The one table of allowed moves of a task. The Lua steps get it as a preamble, docs/reference/states.md draws it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class TaskState(StrEnum):
    """State of a task record."""

    PENDING = "PENDING"
    QUEUED = "QUEUED"
    MERGED = "MERGED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    DEAD = "DEAD"

    @property
    def final(self) -> bool:
        """Whether nothing but a retry by hand leaves this state."""
        return self in FINAL


_S = TaskState
FINAL: Final = frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED, _S.DEAD})

#: from -> to. A final state is left only by `gpuflow retry` and `gpuflow resume` (to QUEUED, never from SUCCEEDED).
ALLOWED: Final[dict[TaskState, frozenset[TaskState]]] = {
    _S.PENDING: frozenset({_S.QUEUED, _S.FAILED, _S.CANCELLED}),
    _S.QUEUED: frozenset({_S.MERGED, _S.STARTING, _S.FAILED, _S.CANCELLED, _S.DEAD}),
    _S.MERGED: frozenset({_S.QUEUED, _S.SUCCEEDED, _S.FAILED, _S.CANCELLED, _S.DEAD}),
    _S.STARTING: frozenset({_S.RUNNING, _S.QUEUED, _S.STARTING, _S.SUCCEEDED, _S.FAILED, _S.CANCELLED, _S.DEAD}),
    _S.RUNNING: frozenset({_S.QUEUED, _S.STARTING, _S.SUCCEEDED, _S.FAILED, _S.CANCELLED, _S.DEAD}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset({_S.QUEUED}),
    _S.CANCELLED: frozenset({_S.QUEUED}),
    _S.DEAD: frozenset({_S.QUEUED}),
}


def lua_preamble() -> str:
    """Return the table as Lua: `may_move(from, to)` and `is_final(state)`."""
    moves = ", ".join(
        f"{source} = {{{', '.join(f'{target} = true' for target in sorted(targets))}}}"
        for source, targets in ALLOWED.items()
    )
    finals = ", ".join(f"{state} = true" for state in sorted(FINAL))
    return (
        f"local MOVES = {{{moves}}}\nlocal FINAL = {{{finals}}}\n"
        "local function may_move(from, to) return MOVES[from] ~= nil and MOVES[from][to] == true end\n"
        "local function is_final(state) return FINAL[state] == true end\n"
    )
