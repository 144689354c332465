"""A proxy to the broker that kills a worker at a step of its way: before the broker takes that step, or after."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from itertools import pairwise

import psutil

from gpuflow.broker.scripts import Script, broker_script
from gpuflow.ledger.ledger import ledger_script
from tests.chaos.refusals import RefusingProxy
from tests.support.fleet import TestFleet


class KillingProxy(RefusingProxy):
    """Kills a worker when it sends a step for the so many-th time, and passes that step on, or not.

    It is counted from when `kill` is set.
    """

    def __init__(self, url: str, script: Script, *, at: int, passes: bool) -> None:
        super().__init__(url)
        self._kind, self._at, self._passes = f"EVALSHA {script.sha[:8]}", at, passes
        self.kill: Callable[[], None] | None = None

    def _is_refused(self, kind: str) -> str:
        if kind == self._kind and self.kill is not None:
            self._at -= 1
            if self._at == 0:
                self.kill()
                return "" if self._passes else "ERR its sender is dead"
        return ""


def load_steps(fleet: TestFleet) -> None:
    """Let the broker know every step that a worker may die at: else the first answer is that it does not."""
    for name in ("start", "yield", "replace", "commit", "report"):
        ledger_script(name).load(fleet.broker.client)
    for name in ("publish", "pop"):
        broker_script(name).load(fleet.broker.client)


def functions_left(fleet: TestFleet) -> dict[int, list[str]]:
    """Return the living processes of functions of a fleet, warm or not: they work in the folder of their worker."""
    found = {}
    for process in psutil.process_iter():
        try:
            line, cwd = process.cmdline(), process.cwd()
        except psutil.Error:
            continue
        if ("-m", "gpuflow.functions") in pairwise(line) and cwd.startswith(str(fleet.folder)):
            found[process.pid] = line
    return found


def locked(fleet: TestFleet) -> list[str]:
    """Return the lock files of GPUs that somebody holds."""
    held = []
    for path in sorted((fleet.folder / "locks").rglob("*.lock")):
        with path.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(path.name)
    return held
