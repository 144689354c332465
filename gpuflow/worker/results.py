"""The results folder of one task on this machine: immutable `attempt-N/` folders, and links to the committed one."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final

from gpuflow.errors import ArtifactError

_ATTEMPT: Final = re.compile(r"attempt-(\d+)")
_SAFE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ResultsFolder:
    """`<results_dir>/<task_id>/`. Raises ArtifactError for an id that is no plain name."""

    def __init__(self, results_dir: Path, task_id: str) -> None:
        if not _SAFE_ID.fullmatch(task_id):
            raise ArtifactError(f"the task id {task_id!r} cannot name a folder; use letters, digits, '.', '_', '-'")
        self.root = results_dir / task_id

    def next_attempt(self) -> int:
        """Return one above the highest attempt folder that exists, so that no number is used twice."""
        try:
            names = [entry.name for entry in self.root.iterdir()]
        except FileNotFoundError:
            return 1
        return 1 + max((int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name))), default=0)

    def attempt_dir(self, number: int) -> Path:
        """Return the folder of an attempt."""
        return self.root / f"attempt-{number}"

    def log_path(self, number: int) -> Path:
        """Return the log file of an attempt."""
        return self.attempt_dir(number) / "logs" / "executor.log"

    def create_attempt(self, number: int) -> Path:
        """Create the folder of a new attempt, with its logs folder. Raises OSError."""
        path = self.attempt_dir(number)
        (path / "logs").mkdir(parents=True)
        return path

    def publish(self, number: int) -> None:
        """Point the top-level names at the committed attempt; each link appears by rename."""
        target = self.attempt_dir(number)
        for entry in sorted(target.iterdir()):
            link = self.root / entry.name
            fresh = self.root / f".{entry.name}.new"
            with contextlib.suppress(FileNotFoundError):
                fresh.unlink()
            fresh.symlink_to(Path(target.name) / entry.name)
            fresh.replace(link)
