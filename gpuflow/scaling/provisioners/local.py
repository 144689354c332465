"""Machines that are worker processes of this machine, in sessions of their own: they outlive the beat that began them.

Each has a file `<state dir>/machines/<tag of the fleet>/<id>.json` with its process. A lock on a file of that folder
makes launching and terminating take turns, so that a second launch of one id finds the first. Before fleets had tags,
the files lay in `machines` itself; those of machines that the broker knows are taken over.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from gpuflow.filelocks import holding
from gpuflow.scaling.provisioners import ProvisionerError, UnknownMachine, Wanted
from gpuflow.settings import Settings

#: A worker that is terminated has drained, or never served; what is left of it has so many seconds.
_STOP_SECONDS: Final = 3.0
#: Two processes of one id differ by more than this in when they were created, in seconds.
_SAME_SECONDS: Final = 0.5
#: Files of machines that have ended are kept, so that a launch which comes late does nothing.
_KEPT: Final = 200


class LocalProcesses:
    """Workers of the broker `url` as processes, with the settings of this process.

    `recorded` are the ids of the machines that the broker knows. Raises ProvisionerError: they cannot be taken over.
    """

    listed_within_seconds = 10.0

    def __init__(self, settings: Settings, url: str, tag: str, *, recorded: Iterable[str] = ()) -> None:
        self._settings = settings
        self._url = url
        self._folder = settings.state_dir / "machines" / tag
        self._children: list[subprocess.Popen[bytes]] = []
        self._take_over(recorded)

    def launch(self, wanted: Wanted) -> None:
        """Start a worker."""
        with self._turn():
            path = self._file(wanted.id)
            if path.exists():
                return
            log = self._settings.state_dir / "logs" / f"worker-{wanted.id}.log"
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("ab") as output:
                    process = subprocess.Popen(
                        self._argv(wanted),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        cwd=self._settings.state_dir,
                        env=self._environment(),
                        start_new_session=True,
                    )
            except OSError as error:
                raise ProvisionerError(f"worker {wanted.id} cannot be started: {error.strerror or error}") from None
            self._children.append(process)
            created = psutil.Process(process.pid).create_time()
            self._write(path, {"pid": process.pid, "created": created, "family": wanted.family})

    def terminate(self, machine_id: str) -> None:
        """End a worker: its children stop, and what it may hold goes back."""
        with self._turn():
            path = self._file(machine_id)
            record = self._read(path)
            process = _process(record)
            if process is not None:
                _end(process)
                self._reap()
            self._write(path, {**record, "ended": True})
            self._prune()

    def machines(self) -> dict[str, str]:
        """Return the workers that run."""
        self._reap()
        found = {path.stem: self._read(path) for path in sorted(self._folder.glob("*.json"))}
        return {name: str(record.get("family", "")) for name, record in found.items() if _process(record) is not None}

    def unknown(self) -> list[UnknownMachine]:
        """Return the workers that run for other fleets of this state folder, or for an earlier broker."""
        root = self._folder.parent
        paths = [path for path in sorted([*root.glob("*.json"), *root.glob("*/*.json")]) if path.parent != self._folder]
        records = [(path, self._read(path)) for path in paths]
        return [
            UnknownMachine(
                id=path.stem,
                family=str(record.get("family", "")),
                fleet=path.parent.name if path.parent != root else "",
                host=socket.gethostname(),
                pid=process.pid,
            )
            for path, record in records
            if (process := _process(record)) is not None
        ]

    def _take_over(self, recorded: Iterable[str]) -> None:
        """Move the files of these machines out of the place where versions before tags kept those of every fleet."""
        before = {path.stem: path for path in self._folder.parent.glob("*.json")}
        ours = [before[name] for name in recorded if name in before]
        if ours:
            with self._turn():
                for path in ours:
                    with contextlib.suppress(FileNotFoundError):  # another beat was faster
                        path.rename(self._folder / path.name)

    def _reap(self) -> None:
        """Take in what our children that have ended left, so that none stays a zombie."""
        self._children = [child for child in self._children if child.poll() is None]

    def _argv(self, wanted: Wanted) -> list[str]:
        level = self._settings.log_level
        worker = ["worker", "--name", wanted.id, "--loglevel", level, "--without-mingle", *wanted.worker_options]
        return [sys.executable, "-m", "celery", "-A", "gpuflow", *worker]

    def _environment(self) -> dict[str, str]:
        folders = {"RESULTS_DIR": "results_dir", "GPUFLOW_STATE_DIR": "state_dir", "GPUFLOW_CACHE_DIR": "cache_dir"}
        given = {name: str(getattr(self._settings, setting)) for name, setting in folders.items()}
        # A worker id that was set for this process is that of another worker.
        base = {name: value for name, value in os.environ.items() if name != "WORKER_ID"}
        return {**base, "REDIS_URL": self._url, **given, "PYTHONUNBUFFERED": "1"}

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with holding(self._folder / ".lock"):
                yield
        except OSError as error:
            raise ProvisionerError(
                f"{self._folder} cannot be used: {error.strerror or error}; set GPUFLOW_STATE_DIR to a folder of yours"
            ) from None

    def _file(self, machine_id: str) -> Path:
        if not machine_id or not all(char.isascii() and (char.isalnum() or char in "_-") for char in machine_id):
            raise ProvisionerError(f"{machine_id!r} cannot name a machine")
        return self._folder / f"{machine_id}.json"

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _write(self, path: Path, record: dict[str, Any]) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record), encoding="utf-8")
        part.replace(path)

    def _prune(self) -> None:
        ended = [path for path in self._folder.glob("*.json") if self._read(path).get("ended")]
        for path in sorted(ended, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            path.unlink(missing_ok=True)


def _process(record: dict[str, Any]) -> psutil.Process | None:
    """Return the process of a record if it still runs."""
    try:
        process = psutil.Process(int(record["pid"]))
        same = abs(process.create_time() - float(record["created"])) < _SAME_SECONDS
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, KeyError, ValueError, TypeError):
        return None


def _end(process: psutil.Process) -> None:
    """End a worker in good order, then by force; its shims end their children when it has gone."""
    with contextlib.suppress(psutil.Error):
        family = process.children(recursive=True)
        process.send_signal(signal.SIGQUIT)
        _, left = psutil.wait_procs([process], timeout=_STOP_SECONDS)
        for one in left:
            one.kill()
        _, left = psutil.wait_procs([*left, *family], timeout=_STOP_SECONDS)
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
