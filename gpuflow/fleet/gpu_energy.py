"""Reads the energy that GPUs have used, as their driver counts it; a driver that hangs holds nobody for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpuflow.fleet import hardware_nvml

#: How long the driver has for its answer, in seconds, and for how long one that gave none is not asked again.
WAIT_SECONDS: Final = 5.0
REST_SECONDS: Final = 60.0


class EnergyReader:
    """Asks one driver in a thread of its own, one question at a time: one that hangs gathers no threads.

    Safe in threads.
    """

    def __init__(
        self,
        read: Callable[[Sequence[str]], Mapping[str, float]] | None = None,
        *,
        wait_seconds: float = WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read or hardware_nvml.read_energy
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._asking = threading.Lock()
        self._rests_until = float("-inf")

    def read(self, uuids: Sequence[str]) -> Mapping[str, float]:
        """Return the joules that each GPU has used since its driver was loaded; without those that do not tell."""
        if not uuids or self._clock() < self._rests_until:
            return {}
        answers: list[Mapping[str, float]] = []

        def ask() -> None:
            try:
                answers.append(self._read(uuids))
            finally:
                self._asking.release()

        if self._asking.acquire(timeout=self._wait_seconds):
            thread = threading.Thread(target=ask, name="gpuflow-energy", daemon=True)
            thread.start()
            thread.join(self._wait_seconds)
        if not answers:
            self._rests_until = self._clock() + REST_SECONDS
            return {}
        return answers[0]
