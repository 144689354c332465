"""How a rank ended, and which of several failed ranks is the cause. Pure but for files.

A rank that fails leaves a record in the error file that torchrun has for it. When one rank dies, the others fail a
moment later, since they wait for it: their errors name the connection, not the cause, and torchrun, which takes the
earliest record, would name the wrong rank for one that died without a record.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from executors.base import ExecutorError
from executors.failures import causes

#: The event that ends the output of an agent, with what is known of the ranks that did not complete.
RANKS_ENDED: Final = "ranks_ended"
#: Exit code of a rank that was told to stop.
CANCELLED: Final = 143
#: What the errors of a rank say whose peer has gone: classes of torch.distributed, and texts of gloo and NCCL.
_PEER_CLASSES: Final = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_PEER_TEXTS: Final = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "/gloo/",
    "nccl remote",
    "ncclremoteerror",
    "nccl communicator was aborted",
)
#: Signals by which a rank is ended on behalf of another's failure: by the agent, or by NCCL's watchdog.
_SECONDARY_SIGNALS: Final = (signal.SIGTERM, signal.SIGABRT)


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended. `exit_code` is negative for a signal; `error` is what it said of itself."""

    rank: int
    pid: int
    exit_code: int
    at_ns: int = 0
    error: Mapping[str, Any] | None = None
    from_peer: bool = False
    stopped: bool = False


def write_record(
    path: Path, error: Mapping[str, Any] | None, *, from_peer: bool = False, stopped: bool = False
) -> None:
    """Leave the record of this rank in torchrun's error file. The file appears whole. Raises OSError."""
    now = time.time_ns()
    text = f"{error['type']}: {error['message']}" if error else "stopped"
    content = {
        "message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(now // 10**9)}},
        "record": {"error": error, "at_ns": now, "from_peer": from_peer, "stopped": stopped},
    }
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps(content), encoding="utf-8")
    fresh.replace(path)


def read_end(rank: int, pid: int, exit_code: int, content: Mapping[str, Any]) -> RankEnd:
    """Return how a rank ended, by its exit code and what its error file holds."""
    record = content.get("record") or {}
    return RankEnd(
        rank=rank,
        pid=pid,
        exit_code=exit_code,
        at_ns=int(record.get("at_ns") or 0),
        error=record.get("error"),
        from_peer=bool(record.get("from_peer")),
        stopped=bool(record.get("stopped")),
    )


def is_from_peer(error: BaseException) -> bool:
    """Say whether an error only tells that another rank is gone."""
    return any(
        {kind.__name__ for kind in type(link).__mro__} & _PEER_CLASSES
        or (isinstance(link, RuntimeError) and any(part in str(link).lower() for part in _PEER_TEXTS))
        for link in causes(error)
    )


def culprit(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank whose failure ended the others, None where none failed by itself.

    First a rank that was killed, since nothing else kills with these signals; then the earliest error that is not about
    a lost connection; then a rank that left without a word; then the earliest lost connection.
    """
    return min((end for end in ends if not _is_bystander(end)), key=_order, default=None)


def _is_bystander(end: RankEnd) -> bool:
    """Say whether a rank was only stopped when another had failed."""
    return end.exit_code == 0 or end.stopped or (end.error is None and end.exit_code in (-signal.SIGTERM, CANCELLED))


def _order(end: RankEnd) -> tuple[int, int, int]:
    if end.error is not None:
        return 3 if end.from_peer else 1, end.at_ns, end.rank
    return 2 if end.exit_code >= 0 or -end.exit_code in _SECONDARY_SIGNALS else 0, 0, end.rank


def failure(end: RankEnd, processes: int) -> ExecutorError:
    """Return the error of the attempt: what the rank said, or how it died, with its number."""
    who = f"rank {end.rank} of {processes}"
    if end.error is not None and end.from_peer:
        return ExecutorError(
            "RankLost", f"{who} lost its connection to another rank: {end.error['message']}", retryable=True
        )
    if end.error is not None:
        return ExecutorError(
            str(end.error["type"]), f"{who}: {end.error['message']}", retryable=bool(end.error["retryable"])
        )
    if end.exit_code < 0:
        number = -end.exit_code
        hint = " (was the machine out of memory? `dmesg` says so)" if number == signal.SIGKILL else ""
        return ExecutorError(
            "RankKilled",
            f"{who} (process {end.pid}) ended with signal {_name(number)}{hint}; see the log",
            retryable=True,
        )
    return ExecutorError(
        "RankDied",
        f"{who} (process {end.pid}) ended with exit code {end.exit_code} and gave no error; see the log",
        retryable=end.exit_code == os.EX_TEMPFAIL,
    )


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
