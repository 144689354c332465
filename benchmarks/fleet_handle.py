"""The simulated workers as fleet_scale.py handles them: their processes, what they are told, and what they answer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness

#: Simulated workers of one process.
PER_PROCESS = 50
DEADLINE_SECONDS = 60.0
#: Seconds between two words on how far the fleet is.
TELL_SECONDS = 5.0


class Clients:
    """All simulated workers."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.count = 0
        self.taken: dict[str, float] = {}
        self._done = 0
        self._processes: list[subprocess.Popen[str]] = []

    def grow(self, count: int, registry: Any) -> None:
        """Start more, up to `count` in all, and wait until they are in the registry."""
        while self.count < count:
            more = min(PER_PROCESS, count - self.count)
            command = [sys.executable, str(harness.HERE / "fleet_clients.py"), self.url, str(self.folder)]
            with (self.folder / "clients.log").open("ab") as log:
                process = subprocess.Popen(
                    [*command, str(self.count), str(more)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self._processes.append(process)
            self.count += more
        wait_until(lambda: live(registry) >= count, f"{count} simulated workers are in the registry")

    def tell(self, word: str) -> int:
        """Tell all of them a word; note what they took, and return how many tasks they have done since `begin`."""
        done = 0
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            answer = json.loads(process.stdout.readline())
            done += answer["done"]
            self.taken.update(answer["taken"])
        return done - self._done

    def begin(self) -> None:
        """Count from here."""
        self._done += self.tell("report")
        self.taken.clear()

    def wait_for(self, count: int) -> None:
        """Wait until so many tasks are done since `begin`; give up when none is for a while."""
        done, seen_at = 0, time.monotonic()
        tell_at = seen_at + TELL_SECONDS
        while done < count:
            now = self.tell("report")
            if now > done:
                done, seen_at = now, time.monotonic()
            elif time.monotonic() - seen_at > DEADLINE_SECONDS:
                raise SystemExit(f"{done} of {count} tasks are done, and none for {DEADLINE_SECONDS:g} s")
            if time.monotonic() >= tell_at:
                harness.progress(f"{done} of {count} tasks are done")
                tell_at += TELL_SECONDS
            time.sleep(0.1)

    def stop(self) -> None:
        """End all."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=20)
        self._processes.clear()
        self.count = self._done = 0


def wait_until(condition: Any, what: str) -> None:
    """Wait for a condition, no longer than a deadline."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"it took longer than {DEADLINE_SECONDS:g} s until {what}")
        time.sleep(0.1)


def live(registry: Any) -> int:
    """Return how many live workers the registry has."""
    return sum(entry.state in ("IDLE", "BUSY") for entry in registry.workers())
