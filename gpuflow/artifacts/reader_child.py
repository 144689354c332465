"""The reader: a limited process that downloads and unpacks for a worker. Run by `gpuflow.worker.download_child`.

It reads one JSON object a line from its stdin and writes one a line to its stdout. First come its limits and settings;
then orders (`fetch`, `unpack`), each answered by `done` or `failed`. Before bytes of a transfer pass it asks for them
(`take`) where the worker has a cap, which all of its transfers share. It ends with its stdin.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuflow.artifacts.archive import unpack
from gpuflow.artifacts.store import fetch
from gpuflow.artifacts.task_access import task_hosts
from gpuflow.artifacts.throttle import Throttle
from gpuflow.errors import ArtifactError, GPUFlowError
from gpuflow.process_guard import guard_memory
from gpuflow.settings import Settings


def _say(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class _SharedThrottle(Throttle):
    """Asks the worker for what its cap lets pass."""

    def wait_for_bytes(self, count: int) -> None:
        """Wait until the worker lets `count` more bytes pass."""
        if self.bytes_per_second is not None and count > 0:
            _say({"take": count})
            if not sys.stdin.readline():
                raise ArtifactError("the worker has gone")


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    import resource  # there is none on Windows, where this module can be imported all the same

    for what, most in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)  # one that the worker has stays
        resource.setrlimit(what, (bound, bound))


def _do(order: Mapping[str, Any], settings: Settings) -> Mapping[str, Any]:
    target = Path(order["target"])
    if order["do"] == "unpack":
        unpack(Path(order["source"]), target, fresh=Path(order["fresh"]))
        return {}
    stored = fetch(
        order["url"],
        target,
        settings=settings,
        sha256=order["sha256"],
        token=order["token"] or "",  # none is added here: who may have one is judged where the task is known
        max_bytes=order["max_bytes"],
        hosts=task_hosts(settings),
        throttle=_SharedThrottle(settings.worker_network_bandwidth_bytes_per_second),
    )
    return asdict(stored)


def _answer(order: Mapping[str, Any], settings: Settings) -> Mapping[str, Any]:
    try:
        return {"done": _do(order, settings)}
    except MemoryError:
        return _failure("ArtifactError", f"{order.get('name')} needs more memory than a reader has; split it", None)
    except (GPUFlowError, OSError) as error:
        failure = _failure(type(error).__name__, str(error), getattr(error, "errno", None))
        failure["failed"]["setting"] = getattr(error, "setting", "")
        return failure


def _failure(kind: str, message: str, number: int | None) -> dict[str, Any]:
    return {"failed": {"type": kind, "message": message, "errno": number}}


def main() -> None:
    """Serve the worker until it closes the line."""
    guard_memory()
    first = json.loads(sys.stdin.readline())
    os.environ.update(first["environment"])
    settings = Settings.model_validate(first["settings"])
    _limit(first["cpu_seconds"], first["memory_bytes"])
    for line in sys.stdin:
        _say(_answer(json.loads(line), settings))


if __name__ == "__main__":
    main()
