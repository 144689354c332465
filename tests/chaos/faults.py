"""Kills the worker that it is loaded into (`--include faults`) at a named point, when a test has armed that point.

The test and the workers share one file, named by CHAOS_FILE: a test writes a point's name and a signal into it
(`Fault.arm`), the first worker that passes the point takes the file away, leaves its process id beside it, and sends
itself the signal, SIGKILL as a rule. The worker's own code knows nothing of this: its functions are wrapped.

Points, in the order in which a delivery of a supervised task passes them:

    popped                     the message is leased, and nothing else has happened
    recorded                   START is done
    child_started              the child runs, and nobody has heard of it
    running                    the record says RUNNING
    committing_before          the results are sealed, COMMIT is not sent
    committing_after           COMMIT is done, Celery does not know
    between_result_and_chord   Celery's result is stored, the chord is not counted
    joining                    all parts of a chord are counted, its body is not sent
    joined                     the body is sent, the chord's keys still stand
    before_ack                 all is done but the ack

With CHAOS_SCATTER=N in the worker's environment, every child has N grandchildren in sessions of their own whose parents
have ended, as a launcher of training ranks may leave them.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

POINTS = (
    "popped",
    "recorded",
    "child_started",
    "running",
    "committing_before",
    "committing_after",
    "between_result_and_chord",
    "joining",
    "joined",
    "before_ack",
)


#: Starts N processes that outlive their parents, then becomes the program that the arguments name.
_SCATTER = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    parent = os.fork()
    if parent == 0:
        os.setsid()
        if os.fork() == 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            time.sleep(86400)
        os._exit(0)
    os.waitpid(parent, 0)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Fault:
    """The test's side: which point is armed, and who died there."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "armed-point"

    @property
    def env(self) -> dict[str, str]:
        """What a worker's environment has to say."""
        ours = str(Path(__file__).parent)
        support = str(Path(__file__).parents[1] / "support")
        return {"CHAOS_FILE": str(self.path), "PYTHONPATH": os.pathsep.join([ours, support])}

    def arm(self, point: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Let the next worker that passes the point die there, or be stopped (SIGSTOP)."""
        assert point in POINTS
        self._struck.unlink(missing_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(f"{point} {number:d}")
        fresh.replace(self.path)

    def struck(self) -> int | None:
        """Return the id of the process that died, if one has."""
        return int(self._struck.read_text()) if self._struck.exists() else None

    @property
    def _struck(self) -> Path:
        return self.path.with_suffix(".struck")


def reach(point: str) -> None:
    """Die or stop here, if this point is armed and nobody else has taken it."""
    path = Path(os.environ["CHAOS_FILE"])
    try:
        armed, _, number = path.read_text().partition(" ")
        if armed != point:
            return
        path.unlink()
    except FileNotFoundError:
        return
    fresh = path.with_suffix(".dead")
    fresh.write_text(str(os.getpid()))
    fresh.replace(path.with_suffix(".struck"))
    os.kill(os.getpid(), int(number))


def _around(
    owner: type, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Wrap a method: `before(self, args...)` first, `after(answer, self, args...)` last."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        answer = original(*args, **kwargs)
        if after is not None:
            after(answer, *args, **kwargs)
        return answer

    setattr(owner, name, wrapped)


def _install() -> None:
    from celery.canvas import Signature

    from gpuflow.broker.lease_table import LeaseTable
    from gpuflow.ledger.backend import LedgerBackend
    from gpuflow.ledger.ledger import Ledger
    from gpuflow.routing.queue_names import is_demand_queue
    from gpuflow.worker.child import Child

    scattered = int(os.environ.get("CHAOS_SCATTER", "0"))
    start_child = Child.__init__

    def start_scattering(child: Any, argv: Sequence[str], **options: Any) -> None:
        start_child(child, [sys.executable, "-I", "-S", "-c", _SCATTER, str(scattered), *argv], **options)

    if scattered:
        Child.__init__ = start_scattering  # type: ignore[method-assign]

    def taken(table: Any, tag: str, queue: str, *_: Any, **__: Any) -> None:
        if is_demand_queue(queue):
            reach("popped")

    def started(verdict: Any, *_: Any, **__: Any) -> None:
        if verdict.verdict == "begin":
            reach("recorded")

    def reported(answer: Any, *_: Any, **__: Any) -> None:
        if answer == "ok":
            reach("running")

    def committing(ledger: Any, task_id: str, *_: Any, **__: Any) -> None:
        reach("committing_before")

    def committed(done: Any, *_: Any, **__: Any) -> None:
        if done:
            reach("committing_after")

    def counting(backend: Any, request: Any, *_: Any, **__: Any) -> None:
        if request.group:
            reach("between_result_and_chord")

    def joining(*_: Any, **__: Any) -> None:
        reach("joining")

    def joined(*_: Any, **__: Any) -> None:
        reach("joined")

    def settling(table: Any, tag: str, how: str, *_: Any, **__: Any) -> None:
        lease = table.held().get(tag)
        if how == "ack" and lease is not None and is_demand_queue(lease.queue):
            reach("before_ack")

    _around(LeaseTable, "accept", before=taken)
    _around(Ledger, "start", after=started)
    _around(Child, "__init__", after=lambda *_, **__: reach("child_started"))
    _around(Ledger, "report", after=reported)
    _around(Ledger, "commit", before=committing, after=committed)
    _around(LedgerBackend, "on_chord_part_return", before=counting)
    _around(Signature, "delay", before=joining, after=joined)
    _around(LeaseTable, "settle", before=settling)


if "CHAOS_FILE" in os.environ:
    _install()
