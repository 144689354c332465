"""Where a team's function runs, for `gpuflow.context`: in a child of its own, in a thread of a worker, or outside.

A child says so itself (`begin_child`), a worker says how the task of a thread is found (`serve_threads`). The standard
library and the event protocol alone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from gpuflow.protocol import Emitter, Request, complete_checkpoints

log = logging.getLogger("gpuflow.context")


class Surroundings(Protocol):
    """What `gpuflow.context` asks and tells; paths are absolute, `gpus` are UUIDs."""

    @property
    def task_id(self) -> str | None:
        """The id of the task; None outside of one."""

    @property
    def attempt(self) -> int:
        """Which attempt of the task this is, from 1."""

    @property
    def gpus(self) -> list[str]:
        """The GPUs that are the task's own."""

    @property
    def output_dir(self) -> Path:
        """The folder of what the attempt makes; it is there."""

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of the attempt's checkpoints; it may not be there yet."""

    @property
    def resume_from(self) -> Path | None:
        """The complete checkpoint to go on from, if there is one."""

    @property
    def results_dir(self) -> Path | None:
        """The folder of all results of this machine; None where that is not known."""

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Tell how far it is: the fields of a progress event."""

    def log(self, line: str) -> None:
        """Write a line to the log of the task."""

    def declare(self, name: str) -> None:
        """Tell of a file or folder of the output folder."""

    def saved(self, checkpoint: Path, step: int) -> None:
        """Tell of a complete checkpoint."""

    def should_stop(self) -> bool:
        """Say whether the attempt is to end."""


class InChild:
    """The child of one attempt of one function."""

    def __init__(self, request: Request, emitter: Emitter) -> None:
        self._request, self._emitter = request, emitter
        #: The worker gave notice: the attempt is to end soon, and another one goes on.
        self.noticed = False
        self._terminated = False
        self._holds_sigterm = False
        self.task_id: str | None = request.task_id
        self.attempt = request.attempt
        self.output_dir = Path(request.output_dir)
        self.checkpoint_dir = Path(request.checkpoint_dir or self.output_dir / "checkpoints")
        self.resume_from = Path(request.resume_from) if request.resume_from else None

    @property
    def gpus(self) -> list[str]:
        """The GPUs of its claim, in the order of CUDA_VISIBLE_DEVICES."""
        return list(self._request.gpus)

    @property
    def results_dir(self) -> Path | None:
        """The worker's."""
        return self.output_dir.parents[1]  # <results>/<task>/attempt-N

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Send the event."""
        self._emitter.emit("progress", **progress)

    def log(self, line: str) -> None:
        """Write a line to stderr, which is the log of the attempt."""
        print(line, file=sys.stderr, flush=True)

    def declare(self, name: str) -> None:
        """Send the event: the manifest lists it then, and says so if it is missing."""
        self._emitter.artifact(name)

    def saved(self, checkpoint: Path, step: int) -> None:
        """Send the event."""
        self._emitter.checkpoint(str(checkpoint), step)

    def should_stop(self) -> bool:
        """Say whether the worker wants the attempt to end.

        A function that has asked is not ended by SIGTERM any more, which would come in the midst of what it saves: it
        hears of it here, and has until SIGKILL. One that never asks ends at once, whatever it waits for.
        """
        if not self._holds_sigterm and threading.current_thread() is threading.main_thread():
            self._holds_sigterm = True
            _hold_sigterm()
        return self.noticed or self._terminated

    @property
    def has_asked(self) -> bool:
        """Whether the function has asked whether it is to end: it ends by itself then."""
        return self._holds_sigterm

    def terminate(self) -> None:
        """Tell it to end, as SIGTERM does."""
        self._terminated = True

    @property
    def is_cancelled(self) -> bool:
        """Whether it was told to end without a notice: by a user, or a worker that stops at once."""
        return self._terminated and not self.noticed


class Outside:
    """A script, a notebook or a test, outside of any worker. Variables of a task's child are used where they are."""

    @property
    def task_id(self) -> str | None:
        """TASK_ID, as in what a task has started."""
        return os.environ.get("TASK_ID")

    @property
    def attempt(self) -> int:
        """ATTEMPT, or 1."""
        given = os.environ.get("ATTEMPT", "")
        return int(given) if given.isdecimal() else 1

    @property
    def gpus(self) -> list[str]:
        """The UUIDs of CUDA_VISIBLE_DEVICES within a task; [] elsewhere."""
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "") if self.task_id else ""
        return [one for one in given.split(",") if one.startswith(("GPU-", "MIG-"))]

    @property
    def output_dir(self) -> Path:
        """OUTPUT_DIR, or a temporary folder, one for the process, which stays."""
        given = os.environ.get("OUTPUT_DIR")
        folder = Path(given).absolute() if given else self._temporary
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @cached_property
    def _temporary(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="gpuflow-output-"))
        log.info("files go to %s; set OUTPUT_DIR for another folder", folder)
        return folder

    @property
    def checkpoint_dir(self) -> Path:
        """CHECKPOINT_DIR, or `checkpoints` in the output folder."""
        given = os.environ.get("CHECKPOINT_DIR")
        return Path(given).absolute() if given else self.output_dir / "checkpoints"

    @property
    def resume_from(self) -> Path | None:
        """RESUME_FROM, or the newest complete checkpoint of the folder; None for a fresh start."""
        given = os.environ.get("RESUME_FROM")
        if given:
            return Path(given).absolute()
        return next(reversed(complete_checkpoints(self.checkpoint_dir)), None)

    @property
    def results_dir(self) -> Path | None:
        """Not known."""
        return None

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Log it."""
        total = f"/{progress['total']:g}" if progress.get("total") is not None else ""
        told = [f"{progress['current']:g}{total} {progress.get('unit', '')}".rstrip(), progress.get("message") or ""]
        told += [f"{name}={value}" for name, value in progress.get("metrics", {}).items()]
        log.info("progress %s", " ".join(filter(None, told)))

    def log(self, line: str) -> None:
        """Log it."""
        log.info("%s", line)

    def declare(self, name: str) -> None:
        """Log it."""
        log.info("artifact %s", name)

    def saved(self, checkpoint: Path, step: int) -> None:
        """Log it."""
        log.info("checkpoint of step %d: %s", step, checkpoint)

    def should_stop(self) -> bool:
        """Nobody says so here."""
        return False


class _Process:
    child: InChild | None = None
    is_told_of_forks = False
    of_thread: Callable[[], Surroundings | None] | None = None
    outside = Outside()


def begin_child(request: Request, emitter: Emitter) -> InChild:
    """Make this process the child of an attempt."""
    _Process.child = child = InChild(request, emitter)
    return child


def notice() -> None:
    """Tell the child of an attempt that it is to end soon."""
    if _Process.child is not None:
        _Process.child.noticed = True


def terminate(*, asked: bool = True) -> bool:
    """Tell the child of an attempt to end; with `asked`, only one that asks for that. Say whether it was told."""
    child = _Process.child
    if child is None or (asked and not child.has_asked):
        return False
    child.terminate()
    return True


def _hold_sigterm() -> None:
    """Let SIGTERM be a word to the function that runs; on the main thread."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)
        if not _Process.is_told_of_forks:
            _Process.is_told_of_forks = True
            os.register_at_fork(after_in_child=let_sigterm_through)


def let_sigterm_through() -> None:
    """Let SIGTERM end this process again: one that the function has forked, and a warm one between its calls."""
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    if _Process.child is not None:
        _Process.child.terminate()


def serve_threads(find: Callable[[], Surroundings | None]) -> None:
    """Make this process a worker; `find` returns where the task of the calling thread runs, None for no task."""
    _Process.of_thread = find


def is_child() -> bool:
    """Say whether this process is the child of a function."""
    return _Process.child is not None


def is_worker() -> bool:
    """Say whether this process is a worker."""
    return _Process.of_thread is not None


def here() -> Surroundings:
    """Return where the caller runs."""
    if _Process.child is not None:
        return _Process.child
    return (_Process.of_thread() if _Process.of_thread is not None else None) or _Process.outside
