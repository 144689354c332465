"""What a storm has done to a fleet, and when: each attempt that was lost has to have one of these behind it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpuflow.ledger.records import AttemptEntry
from tests.chaos.conftest import LEASE_SECONDS

#: The faults that end the child of a function, warm or not, and with it the call that it works on.
FUNCTION_KILLED: Final = "function killed"
FUNCTION_SHIM_KILLED: Final = "function's shim killed"
OF_FUNCTIONS: Final = frozenset({FUNCTION_KILLED, FUNCTION_SHIM_KILLED})
#: Faults for which no attempt may be lost: a child that was killed has failed, and a worker outlives the others.
HARMLESS: Final = OF_FUNCTIONS | {
    "child killed",
    "connections cut",
    "answers lost",
    "beat killed",
    "message poisoned",
    "broker killed",
}


@dataclass
class Strike:
    """One fault. `worker` is whom it has met, "" the whole fleet. Times are seconds since the epoch."""

    kind: str
    worker: str
    began_at: float
    ended_at: float

    def explains(self, entry: AttemptEntry) -> bool:
        """Whether this attempt may be lost for it.

        What ran out while it lasted is found out a lease later; an attempt may have begun meanwhile.
        """
        if self.kind in HARMLESS or self.worker not in ("", entry.worker):
            return False
        return self.began_at <= entry.ended_at and self.ended_at + LEASE_SECONDS >= entry.started_at

    def ends(self, entry: AttemptEntry) -> bool:
        """Whether it has ended the child of this attempt of a function: while that ran, on its worker."""
        is_its = self.kind in OF_FUNCTIONS and self.worker == entry.worker
        return is_its and entry.started_at <= self.began_at <= entry.ended_at


class Strikes:
    """All of them."""

    def __init__(self) -> None:
        self._all: list[Strike] = []
        self._lasting: dict[tuple[str, str], Strike] = {}

    def note(self, kind: str, worker: str = "") -> None:
        """Note one that happens now."""
        now = time.time()
        self._all.append(Strike(kind, worker, now, now))

    def begin(self, kind: str, worker: str = "") -> None:
        """Note one that lasts."""
        strike = Strike(kind, worker, time.time(), float("inf"))
        self._all.append(strike)
        self._lasting[kind, worker] = strike

    def end(self, kind: str, worker: str = "") -> None:
        """Note that it is over."""
        self._lasting.pop((kind, worker)).ended_at = time.time()

    def counts(self) -> Counter[str]:
        """Return how many there were of each kind."""
        return Counter(one.kind for one in self._all)

    def unexplained(self, attempts: Mapping[str, Sequence[AttemptEntry]]) -> list[str]:
        """Return a line for each lost attempt of these tasks that none of them explains."""
        return [
            self._line(task, entry)
            for task, entries in attempts.items()
            for entry in entries
            if entry.outcome == "lost" and not any(one.explains(entry) for one in self._all)
        ]

    def unexplained_failures(self, attempts: Mapping[str, Sequence[AttemptEntry]]) -> list[str]:
        """Return a line for each of these functions whose last attempt failed though no child was killed under it."""
        return [
            self._line(task, entries[-1])
            for task, entries in attempts.items()
            if not any(one.ends(entries[-1]) for one in self._all)
        ]

    def _line(self, task: str, entry: AttemptEntry) -> str:
        return (
            f"{task} attempt {entry.attempt} on {entry.worker}, {entry.started_at:.2f} to {entry.ended_at:.2f}: "
            f"{entry.error}; near it: {self._near(entry)}"
        )

    def _near(self, entry: AttemptEntry) -> str:
        near = [one for one in self._all if entry.started_at - 15 <= one.began_at <= entry.ended_at + 15]
        return ", ".join(f"{one.kind} {one.worker} {one.began_at:.2f} to {one.ended_at:.2f}" for one in near)
