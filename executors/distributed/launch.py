"""Runs a training in several ranks, in place of the executor: one result, one error, nothing left behind.

Called by the child's entry point. It starts the agent (`distributed.agent`), which is torchrun with our ranks, passes
on what rank 0 tells, and turns the end of all ranks into a result, an error or the end after a notice.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from executors import cancellation
from executors.base import ExecutorError
from executors.cores import declared_cores
from executors.distributed.plan import RankPlan
from executors.distributed.records import RANKS_ENDED, culprit, failure, read_end
from executors.programs.running import Ran, run
from gpuflow.protocol import PREEMPTED, Emitter, Event, Request, parse_line, read_json

#: Events of rank 0 that are not passed on: the child says hello and farewell itself.
_KEPT: Final = ("result", "finish", RANKS_ENDED)


def run_ranks(request: Request, plan: RankPlan, emitter: Emitter) -> dict[str, Any]:
    """Train in `plan.processes` ranks and return the result of rank 0.

    Raises ExecutorError with the error of the rank that failed first, Preempted after a notice, and Cancelled.
    """
    emitter.status("loading", f"starting {plan.processes} ranks")
    said = _Said(emitter)
    with tempfile.TemporaryDirectory(prefix="gpuflow-ranks-") as folder, _as_file(request) as stdin:
        argv = [sys.executable, "-P", "-m", "executors.distributed.agent"]
        ran = run(
            [*argv, str(os.getpid()), str(plan.processes), folder],
            cwd=Path.cwd(),
            environment=environment(plan),
            on_stdout=said.line,
            on_stderr=_log,
            stdin=stdin,
        )
    return _outcome(ran, said.kept, plan.processes, request)


def environment(plan: RankPlan) -> dict[str, str]:
    """Return the environment of the agent: a fair share of the task's cores for each rank, and gloo on loopback.

    What the worker or the user has set wins.
    """
    cores = declared_cores() or len(os.sched_getaffinity(0))
    given = {"OMP_NUM_THREADS": str(max(1, cores // plan.processes)), "GLOO_SOCKET_IFNAME": "lo"}
    return {**given, **os.environ, "PYTHONUNBUFFERED": "1"}


@contextmanager
def _as_file(request: Request) -> Iterator[int]:
    """Give a descriptor of the request as a file without a name: it holds secrets, and every rank reads it."""
    descriptor = os.memfd_create("gpuflow-request")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(request.to_json().encode("utf-8"))
        yield descriptor
    finally:
        os.close(descriptor)


def _log(line: bytes) -> None:
    sys.stderr.buffer.write(line + b"\n")
    sys.stderr.buffer.flush()


class _Said:
    """What came from the agent's stdout: the events of rank 0 are passed on, those of the end are kept."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self.kept: dict[str, Event] = {}

    def line(self, line: bytes) -> None:
        """Take one line."""
        event = parse_line(line)
        if event.name == "log":
            _log(b"[rank 0] " + line)
        elif event.name in _KEPT:
            self.kept[event.name] = event
        else:
            self._emitter.emit(event.name, **event.data)


def _outcome(ran: Ran, kept: Mapping[str, Event], processes: int, request: Request) -> dict[str, Any]:
    """Return the result, or raise what the end of the ranks means."""
    told = kept.get(RANKS_ENDED)
    failures = told.data["failures"] if told else []
    end = culprit([read_end(one["rank"], one["pid"], one["exit_code"], one["content"]) for one in failures])
    finish = kept["finish"].data if "finish" in kept else {}
    if ran.noticed and (end is None or end.from_peer) and "result" not in kept:
        error = finish.get("error") or {}
        if error.get("type") == PREEMPTED:
            cancellation.preempt(str(error.get("message")))
        raise cancellation.Preempted
    if end is not None:
        raise failure(end, processes)
    if ran.code != 0:
        raise ExecutorError(
            "RanksLost",
            f"the process that watches the {processes} ranks ended with exit code {ran.code}; see the log",
            retryable=True,
        )
    if "result" not in kept:
        raise ExecutorError("RankDied", f"rank 0 of {processes} ended without a result; see the log")
    return _result(kept["result"], request)


def _result(event: Event, request: Request) -> dict[str, Any]:
    """Return the value of a result event; a large one is in a file of the output folder."""
    if "value" in event.data:
        return dict(event.data["value"])
    place = Path(request.output_dir, str(event.data["file"]))
    try:
        return dict(read_json(place.read_bytes()))
    finally:
        place.unlink(missing_ok=True)
