"""Reads the energy that GPUs have used, as their driver counts it; a driver that hangs holds nobody for long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpuflow.fleet import hardware_nvml

#: How long the driver has for its answer, in seconds.
WAIT_SECONDS: Final = 1.0

#: One question at a time: a driver that hangs must not gather threads.
_asking = threading.Lock()


class EnergyReader:
    """Asks the driver in a thread of its own."""

    def __init__(self, read: Callable[[Sequence[str]], Mapping[str, float]] | None = None) -> None:
        self._read = read or hardware_nvml.read_energy

    def read(self, uuids: Sequence[str]) -> Mapping[str, float]:
        """Return the joules that each GPU has used since its driver was loaded; without those that do not tell."""
        if not uuids or not _asking.acquire(timeout=WAIT_SECONDS):
            return {}
        answers: list[Mapping[str, float]] = []

        def ask() -> None:
            try:
                answers.append(self._read(uuids))
            finally:
                _asking.release()

        thread = threading.Thread(target=ask, name="gpuflow-energy", daemon=True)
        thread.start()
        thread.join(WAIT_SECONDS)
        return answers[0] if answers else {}
