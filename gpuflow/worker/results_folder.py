"""The results folder of one task on this machine: immutable `attempt-N/` folders, and links to the committed one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path
from typing import Final

from gpuflow.artifacts.links import point
from gpuflow.artifacts.store import RESERVED_PREFIX
from gpuflow.errors import ArtifactError, GPUFlowError
from gpuflow.protocol import complete_checkpoints, is_safe_id

#: Why a folder cannot be written that somebody mends by making room.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_ATTEMPT: Final = re.compile(r"attempt-(\d+)")
_FETCHED: Final = "fetched"


def check_writable(results_dir: Path) -> None:
    """Make the folder of all results, and see that this process may write there, also where its disk is full.

    Raises GPUFlowError: a worker that took work could end none of it.
    """
    try:
        results_dir.mkdir(parents=True, exist_ok=True)
        cause = "" if os.access(results_dir, os.W_OK | os.X_OK) else os.strerror(_why_not(results_dir))
    except OSError as error:
        if error.errno in _FULL:
            return
        cause = error.strerror or str(error)
    if cause:
        raise GPUFlowError(
            f"RESULTS_DIR {results_dir} cannot be written: {cause}; let its user write there (under systemd: "
            "ReadWritePaths= of the unit), or set another folder"
        )


def _why_not(folder: Path) -> int:
    """Return the number of the error that writing to a folder ends with."""
    read_only = getattr(os, "ST_RDONLY", 0)
    return errno.EROFS if os.statvfs(folder).f_flag & read_only else errno.EACCES


class ResultsFolder:
    """`<results_dir>/<task_id>/`. Raises ArtifactError for an id that is no plain name."""

    def __init__(self, results_dir: Path, task_id: str) -> None:
        if not is_safe_id(task_id):
            raise ArtifactError(f"the task id {task_id!r} cannot name a folder; use letters, digits, '.', '_', '-'")
        self.root = results_dir / task_id

    def next_attempt(self) -> int:
        """Return one above the highest attempt folder that exists, so that no number is used twice."""
        return 1 + max(self._attempts(), default=0)

    def _attempts(self) -> list[int]:
        try:
            names = [entry.name for entry in self.root.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name))]

    def attempt_dir(self, number: int) -> Path:
        """Return the folder of an attempt."""
        return self.root / f"attempt-{number}"

    def log_path(self, number: int) -> Path:
        """Return the log file of an attempt."""
        return self.attempt_dir(number) / "logs" / "executor.log"

    def checkpoint_dir(self, number: int) -> Path:
        """Return the folder of an attempt's checkpoints."""
        return self.attempt_dir(number) / "checkpoints"

    @property
    def fetched_dir(self) -> Path:
        """The folder of what was fetched from a store for this task."""
        return self.root / _FETCHED

    def forget_fetched(self) -> None:
        """Remove what was fetched; for a task that has ended. What cannot be removed is left to the retention."""
        shutil.rmtree(self.fetched_dir, ignore_errors=True)

    def resume_from(self, number: int) -> Path | None:
        """Return the checkpoint that attempt `number` goes on from: the newest complete one of an earlier attempt.

        The latest attempt that has one counts, and its highest step; None for a fresh start. A checkpoint that leads
        out of this folder by a link is passed over. Raises OSError for a folder that cannot be read: to begin anew in
        silence would throw work away.
        """
        before = sorted((one for one in self._attempts() if one < number), reverse=True) if number > 1 else []
        for earlier in before:
            for checkpoint in reversed(complete_checkpoints(self.checkpoint_dir(earlier))):
                if _stays_inside(checkpoint, self.root.resolve()):
                    return checkpoint
        return None

    def create_attempt(self, number: int) -> Path:
        """Create the folder of a new attempt, with its logs folder. Raises OSError."""
        path = self.attempt_dir(number)
        path.mkdir(parents=True, exist_ok=True)
        (path / "logs").mkdir()
        return path

    def forget_empty(self, number: int) -> bool:
        """Remove the folder of an attempt that has left nothing, not even a line of its log; say whether that was so.

        Nothing of the attempt may be alive that could put a link in the place of a folder. Raises OSError.
        """
        path, log = self.attempt_dir(number), self.log_path(number)
        with os.scandir(path) as listed:
            left = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listed]
        if left != [(log.parent.name, True)] or {one.name for one in log.parent.iterdir()} - {log.name}:
            return False
        with contextlib.suppress(FileNotFoundError):
            if log.lstat().st_size:
                return False
            log.unlink()
        try:
            log.parent.rmdir()
            path.rmdir()
        except OSError:  # something has come meanwhile
            return False
        with contextlib.suppress(OSError):  # other attempts have one
            self.root.rmdir()
        return True

    def publish(self, number: int) -> None:
        """Point the top-level names at the committed attempt; each link appears by rename.

        Names that this folder has for its own are left out: a task chooses those of its files.
        """
        target = self.attempt_dir(number)
        for entry in sorted(target.iterdir()):
            if entry.name.startswith(RESERVED_PREFIX) or _ATTEMPT.fullmatch(entry.name) or entry.name == _FETCHED:
                continue
            point(self.root / entry.name, Path(target.name) / entry.name)


def attempt_and_step(checkpoint: Path) -> tuple[int, int]:
    """Return the attempt and the step of a checkpoint that `ResultsFolder.resume_from` has found."""
    return int(checkpoint.parent.parent.name.rpartition("-")[2]), int(checkpoint.name.rpartition("-")[2])


def _stays_inside(folder: Path, root: Path) -> bool:
    """Say whether a folder and all in it lie below `root`, links followed."""
    paths = [Path(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files)]
    links = [path for path in paths if path.is_symlink()]
    return all(path.resolve().is_relative_to(root) for path in (folder, *links))
