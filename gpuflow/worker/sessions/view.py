"""What a sandboxed session sees at the place of all results: a folder of its own, with the files of its requests alone.

Mounts cannot be added to a running sandbox, and the folders of later tasks do not exist when it begins. So the worker
makes the attempt's folder here, copies beside it what the task may read of other results, and copies what was written
to the real folder when the request has ended. The session can change whatever it sees, at any moment: everything here
is entered by descriptors, without links, and put in place by rename from a folder that the session does not see.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil

from gpuflow.artifacts.held_files import hold_tree
from gpuflow.artifacts.store import RESERVED_PREFIX
from gpuflow.errors import ArtifactError
from gpuflow.logs import get_logger
from gpuflow.protocol import Request
from gpuflow.settings import Settings
from gpuflow.worker.child_user import child_user, files_as, let_through
from gpuflow.worker.confinement import Confinement, inputs_of

log = get_logger("gpuflow.sessions")

#: Below the results folder: a folder for each worker, and in it one for each session, `<pid>-<number>`.
FOLDER: Final = f"{RESERVED_PREFIX}sessions"
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: The worker's: the attempt's log is written to the real folder.
_LOGS: Final = "logs"

_numbers = itertools.count(1)


class View:
    """The folder of one session. `confine` returns how the session is confined that sees a folder."""

    def __init__(
        self, settings: Settings, worker_id: str, request: Request, confine: Callable[[Path], Confinement]
    ) -> None:
        """Make the folder. Raises OSError."""
        self._results = settings.results_dir
        self._user = child_user(settings)
        self._settings = settings
        self._home = settings.results_dir / FOLDER / worker_id / f"{os.getpid()}-{next(_numbers)}"
        self._aside = self._home / "aside"
        self._seen = self._home / "seen"
        self._lock = threading.Lock()
        #: Folders of other attempts that the session sees: those of its opening are mounted.
        self._shown = set(inputs_of(request, settings))
        for folder in (self._seen, self._aside):
            folder.mkdir(parents=True, mode=0o700)
        if self._user is not None:
            for folder in (settings.results_dir / FOLDER, self._home.parent):
                let_through(folder)
            for folder in (self._home, self._seen, self._aside):
                os.chown(folder, self._user.uid, self._user.gid)
        self.confinement = confine(self._seen)

    def admit(self, request: Request) -> None:
        """Make the folder of an attempt, and show what it may read of other results. Raises OSError."""
        with self._lock, files_as(self._user):
            try:
                for folder in inputs_of(request, self._settings):
                    if folder not in self._shown:
                        self._show(folder)
                        self._shown.add(folder)
            except ArtifactError as error:
                raise OSError(f"the results that the task reads cannot be shown to its session: {error}") from error
            task, attempt = _names(request)
            with self._task(task) as parent:
                os.mkdir(attempt, 0o700, dir_fd=parent)

    def collect(self, request: Request) -> None:
        """Copy what a request has left to the real folder of its attempt. Raises OSError, ArtifactError."""
        task, attempt = _names(request)
        with self._own() as own, files_as(self._user):
            hold_tree(self._seen, (task, attempt), own / attempt, links=False, copies=True)
            for entry in sorted((own / attempt).iterdir()):
                if entry.name != _LOGS:
                    entry.rename(Path(request.output_dir) / entry.name)

    def forget(self, request: Request) -> None:
        """Remove the folder of an attempt. What cannot be removed goes with the session."""
        task, attempt = _names(request)
        with contextlib.suppress(OSError), files_as(self._user), self._task(task) as parent:
            shutil.rmtree(attempt, ignore_errors=True, dir_fd=parent)
        with contextlib.suppress(OSError):
            (self._seen / task).rmdir()

    def remove(self) -> None:
        """Remove it all, when no process of the session is left."""
        shutil.rmtree(self._home, ignore_errors=True)

    def _show(self, folder: Path) -> None:
        task, attempt = folder.relative_to(self._results.resolve()).parts
        with self._own() as own:
            hold_tree(folder, (), own / attempt, copies=True)
            with self._task(task) as parent:
                os.rename(own / attempt, attempt, dst_dir_fd=parent)

    @contextlib.contextmanager
    def _own(self) -> Iterator[Path]:
        """Make a folder that the session does not see, and remove it in the end."""
        own = self._aside / str(next(_numbers))
        with files_as(self._user):
            own.mkdir(mode=0o700)
        try:
            yield own
        finally:
            shutil.rmtree(own, ignore_errors=True)

    @contextlib.contextmanager
    def _task(self, name: str) -> Iterator[int]:
        """Open the folder of a task, which is made if need be; a link of that name is none. Raises OSError."""
        seen = os.open(self._seen, _OPEN)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=seen)
            task = os.open(name, _OPEN, dir_fd=seen)
            try:
                yield task
            finally:
                os.close(task)
        finally:
            os.close(seen)


def _names(request: Request) -> tuple[str, str]:
    folder = Path(request.output_dir)
    return folder.parent.name, folder.name


def forget_views(settings: Settings, worker_id: str) -> None:
    """Remove what sessions of an earlier process of this worker have left: it was killed."""
    for path in (settings.results_dir / FOLDER / worker_id).glob("*-*"):
        pid = path.name.partition("-")[0]
        if not pid.isdecimal() or int(pid) == os.getpid() or not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
