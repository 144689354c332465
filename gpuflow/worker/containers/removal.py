"""Removes containers by label: those of an attempt that has ended, and those whose attempt no longer lives.

The standard library alone. As a program, `removal.py SOCKET RUN LOCK`, it removes the containers of one run; the shim
starts it when the tree of a container's task has ended, however that was. Without the lock file there is nothing to do:
the child makes it before its container, and removes it after that. The folder of a session's files, which lies beside
the lock file under the name of the run, goes with it. It speaks two calls of the Docker Engine API 1.41,
which Podman has too. A container that is created is started only by the child that had the answer, so none that
appears later than the list is ever started.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

#: Labels of every container that gpuflow creates.
RUN_LABEL: Final = "gpuflow.run"
TASK_LABEL: Final = "gpuflow.task"
ATTEMPT_LABEL: Final = "gpuflow.attempt"
#: The file that the container's child holds a lock on as long as it lives.
LOCK_LABEL: Final = "gpuflow.lock"

_CALL_SECONDS: Final = 10.0
#: For so long an engine that does not answer is asked again, in seconds; the GPUs of the task are held meanwhile.
_PATIENCE_SECONDS: Final = 20.0
_PAUSE_SECONDS: Final = 0.5
#: The program ends itself after this time, whatever the engine does, in seconds.
_PROGRAM_SECONDS: Final = 60
_MAX_BYTES: Final = 16 << 20
#: How the lock files are called: by the name of the run.
_LOCK_NAME: Final = re.compile(r"[0-9a-f]{32}\.lock")


class EngineError(OSError):
    """The container engine does not answer, or refuses."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_CALL_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_CALL_SECONDS)
        self.sock.connect(self._path)


def call(engine: str, method: str, path: str) -> tuple[int, Any]:
    """Return status and JSON body of one call to the engine at a socket path. Raises EngineError."""
    connection = _Connection(engine)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read(_MAX_BYTES)
        return answer.status, json.loads(body) if body.strip() else None
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise EngineError(f"the container engine at {engine} does not answer: {error}") from error
    finally:
        connection.close()


def find(engine: str, label: str) -> list[dict[str, Any]]:
    """Return the containers with a label (`name` or `name=value`), whatever their state. Raises EngineError."""
    filters = quote(json.dumps({"label": [label]}))
    status, found = call(engine, "GET", f"/v1.41/containers/json?all=1&filters={filters}")
    if status != 200 or not isinstance(found, list):
        raise EngineError(f"the container engine at {engine} does not list containers: {status} {found}")
    return [one for one in found if isinstance(one, dict)]


def remove(engine: str, container: str) -> None:
    """Kill and remove a container; one that is gone is fine. Raises EngineError."""
    status, told = call(engine, "DELETE", f"/v1.41/containers/{quote(container, safe='')}?force=1&v=1")
    if status not in (200, 204, 404) and not (status == 409 and "already in progress" in str(told)):
        raise EngineError(f"the container engine at {engine} does not remove {container}: {status} {told}")


def remove_run(engine: str, run: str) -> int:
    """Remove every container of a run; return how many there were. Raises EngineError after a while of trying."""
    give_up_at = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            found = find(engine, f"{RUN_LABEL}={run}")
            for one in found:
                remove(engine, str(one.get("Id")))
            return len(found)
        except EngineError:
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(_PAUSE_SECONDS)


def remove_lost(engine: str, locks: Path, removed: Callable[[str, str], None] = lambda _id, _task: None) -> int:
    """Remove the containers whose child has ended; return how many. `removed` gets the id and task of each.

    Only those with a lock file in the folder `locks` are looked at: of others this process cannot know. Raises
    EngineError.
    """
    count = 0
    for one in find(engine, LOCK_LABEL):
        labels = one.get("Labels") or {}
        lock = Path(str(labels.get(LOCK_LABEL)))
        if lock.parent == locks and not is_held(lock):
            remove(engine, str(one.get("Id")))
            _forget(lock)
            removed(str(one.get("Id"))[:12], str(labels.get(TASK_LABEL)))
            count += 1
    return count


def _forget(lock: Path) -> None:
    """Remove the folder of a session's files, if there is one, and the lock file. Raises OSError."""
    if _LOCK_NAME.fullmatch(lock.name):  # a label may say anything
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)


def is_held(lock: Path) -> bool:
    """Say whether a living process holds a lock file."""
    import fcntl  # not on Windows, where the command line imports this module

    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # nobody can tell: a container that lives is not removed for that
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def main() -> int:
    """Remove the containers of one run."""
    signal.alarm(_PROGRAM_SECONDS)
    engine, run, lock = sys.argv[1:4]
    if not os.path.lexists(lock):
        return 0
    try:
        remove_run(engine, run)
        _forget(Path(lock))
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
