"""Lets a limited process of its own download and unpack for one preparation, so that nothing hostile holds the worker.

The process is a child behind a shim: it ends with the worker, whatever ends that. It starts with the first order, and
is killed as soon as nobody waits for the preparation any more.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from gpuflow.artifacts.archive import fresh_folder
from gpuflow.artifacts.partial import DiskTrouble
from gpuflow.artifacts.store import StoredFile, TooLarge, shown_url
from gpuflow.artifacts.task_access import address_alone
from gpuflow.artifacts.throttle import shared_throttle
from gpuflow.errors import ArtifactError, NotAllowed
from gpuflow.settings import Settings
from gpuflow.worker.child import Child, ChildEnd
from gpuflow.worker.child_environment import child_environment, is_forbidden, python_path
from gpuflow.worker.confinement import of_reader

_COMMAND: Final = (sys.executable, "-P", "-m", "gpuflow.artifacts.reader_child")
#: Address space of a reader, in bytes: Python and its libraries, the window of a decompressor, some blocks.
MEMORY_BYTES: Final = 2 << 30
#: Whether somebody still waits is looked at so often, in seconds.
TICK_SECONDS: Final = 0.25
#: The settings that reading needs.
_SETTINGS: Final = (
    "offline",
    "store_url",
    "gateway_url",
    "orchestrator_base_url",
    "worker_network_bandwidth_bytes_per_second",
    "download_max_bytes",
    "allow_hosts",
)
_LOG_TAIL: Final = 2000


class NotWaitedFor(Exception):
    """Nobody waits for what was to be read any more."""


class ReaderDied(ArtifactError, OSError):
    """The process that reads ended without an answer; another attempt may go well."""


class ChildReader:
    """Reads in a process of its own, in a `with` block of one thread.

    `wanted` says whether somebody still waits; `cpu_seconds` is the processor time that all of it may take. Its methods
    raise ArtifactError, TooLarge, DiskTrouble, OSError as reading here would, ReaderDied, and NotWaitedFor.
    """

    def __init__(self, *, settings: Settings, cwd: Path, wanted: Callable[[], bool], cpu_seconds: float) -> None:
        self._settings, self._cwd, self._wanted = settings, cwd, wanted
        self._cpu_seconds = max(1, math.ceil(cpu_seconds))
        self._throttle = shared_throttle(settings.worker_network_bandwidth_bytes_per_second)
        self._child: Child | None = None
        self._output: Iterator[tuple[str, bytes]] = iter(())
        self._log = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        """End the process, if there is one; the next order starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            self._end(child)

    def fetch(
        self,
        url: str,
        target: Path,
        *,
        settings: Settings,
        sha256: str | None,
        token: str | None,
        max_bytes: int | None,
    ) -> StoredFile:
        """Fetch a file."""
        order = {"do": "fetch", "url": url, "sha256": sha256, "token": token, "max_bytes": max_bytes}
        return StoredFile(**self._ask({**order, "target": str(target)}, f"{target.name} of {shown_url(url)}"))

    def unpack(self, source: Path, target: Path) -> None:
        """Unpack an archive; nothing half unpacked is left, also when the reader is killed."""
        fresh = fresh_folder(target)
        order = {"do": "unpack", "source": str(source), "target": str(target), "fresh": str(fresh)}
        try:
            self._ask(order, source.name)
        except BaseException:
            self._kill()
            raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _ask(self, order: Mapping[str, Any], name: str) -> dict[str, Any]:
        child = self._child or self._start()
        try:
            child.send(json.dumps({**order, "name": name}).encode())
            for kind, line in self._output:
                if not self._wanted():
                    raise NotWaitedFor(name)
                if kind == "event":
                    answer = json.loads(line)
                    if "take" in answer:
                        self._throttle.wait_for_bytes(int(answer["take"]))
                        child.send(b"{}")
                    elif "done" in answer:
                        return dict(answer["done"])
                    else:
                        raise _error(answer["failed"])
                elif kind == "log":
                    self._log = f"{self._log}{line.decode('utf-8', 'replace')}\n"[-_LOG_TAIL:]
        except BrokenPipeError:
            pass
        self._child = None
        raise self._died(self._end(child), name)

    def _start(self) -> Child:
        settings = self._settings.model_dump(mode="json", include=set(_SETTINGS))
        token = self._settings.worker_token
        # Keys of buckets are the worker's: in the first line, since the environment of a process that begins is open to
        # others of its user. What reads for strangers has no use for the rest.
        variables = {name: value for name, value in os.environ.items() if not is_forbidden(name)}
        packages = python_path()
        environment = child_environment(
            os.environ, pass_env=self._settings.pass_env, given={"PYTHONPATH": packages} if packages else {}
        )
        first = {
            "settings": {
                **settings,
                "worker_token": token.get_secret_value() if token else None,
                "redis_url": address_alone(self._settings.redis_url),
            },
            "environment": {name: value for name, value in variables.items() if environment.get(name) != value},
            "cpu_seconds": self._cpu_seconds,
            "memory_bytes": MEMORY_BYTES,
        }
        child = Child(
            _COMMAND,
            request=json.dumps(first) + "\n",
            environment=environment,
            cwd=self._cwd,
            talks=True,
            confinement=of_reader(self._settings, self._cwd),
        )
        self._child, self._output = child, child.read(TICK_SECONDS)
        return child

    def _end(self, child: Child) -> ChildEnd:
        """Wait until nothing of the process is left."""
        for _ in self._output:
            pass
        with contextlib.suppress(OSError):
            child.end_input()
        return child.wait()

    def _died(self, end: ChildEnd, name: str) -> ReaderDied:
        if end.signal in (signal.SIGXCPU, signal.SIGKILL):
            why = f"it was ended after {self._cpu_seconds} s of processor time (GPUFLOW_PREPARE_SEC), or by the system"
        else:
            why = (self._log.strip().splitlines() or ["it gave no reason"])[-1]
        return ReaderDied(f"{name} could not be read: {why}; is it what it should be?")


def _error(failed: Mapping[str, Any]) -> Exception:
    """Return the exception that the reader was stopped by."""
    kind, message, number = failed["type"], str(failed["message"]), failed["errno"]
    if kind == "DiskTrouble":
        return DiskTrouble(message, number)
    if kind == "TooLarge":
        return TooLarge(message)
    if kind == "NotAllowed":
        return NotAllowed(message, str(failed.get("setting") or ""))
    return OSError(number, message) if number is not None else ArtifactError(message)
