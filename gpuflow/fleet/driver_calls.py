"""Asks the NVIDIA driver without waiting for it: it may hang for ever when a GPU falls off the bus."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class DriverCalls:
    """Asks in a thread of its own. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stuck: threading.Thread | None = None

    def ask(self, question: Callable[[], T], wait_seconds: float) -> T | None:
        """Return the answer, or None when there was none in time. Nothing is asked again until there is one.

        Raises what the question raises.
        """
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(question())
            except Exception as error:  # noqa: BLE001  (raised below, in the thread that asks)
                errors.append(error)

        if not self._lock.acquire(timeout=wait_seconds):
            return None
        try:
            if self._stuck is not None and self._stuck.is_alive():
                return None
            thread = threading.Thread(target=run, name="gpuflow-nvml", daemon=True)
            thread.start()
            thread.join(wait_seconds)
            self._stuck = thread if thread.is_alive() else None
        finally:
            self._lock.release()
        if errors:
            raise errors[0]
        return answers[0] if answers else None
