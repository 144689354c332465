"""What a worker makes sure of before it takes its first task: a broker that keeps what it accepts, an id of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import psutil
import redis
from redis.exceptions import ResponseError

from gpuflow.broker import replay
from gpuflow.errors import GPUFlowError
from gpuflow.fleet.registry import Fleet, WorkerEntry
from gpuflow.logs import get_logger
from gpuflow.settings import Settings

log = get_logger("gpuflow.preflight")

#: How often a silent namesake is looked at, in seconds.
_LOOK_SECONDS = 1.0


def require_durable(client: redis.Redis, settings: Settings) -> None:
    """Raise GPUFlowError for a broker that may lose what it has accepted, unless GPUFLOW_ALLOW_VOLATILE is set.

    Where the user may not read the configuration, the operator declares by that setting that the broker is durable.
    What a user may not ask of the rights of others is left to `gpuflow doctor`.
    """
    if settings.allow_volatile:
        return
    try:
        persistence: Any = client.info("persistence")
        memory: Any = client.info("memory")
        appends = bool(persistence.get("aof_enabled"))
        policy = str(memory.get("maxmemory_policy", "noeviction")) if memory.get("maxmemory") else "noeviction"
    except ResponseError as error:
        raise GPUFlowError(
            f"this user may not ask the broker whether it keeps its data ({error}); if it has an append-only file and "
            "evicts nothing, say so with GPUFLOW_ALLOW_VOLATILE=1"
        ) from None
    mend = "; or accept that tasks can be lost with GPUFLOW_ALLOW_VOLATILE=1"
    if not appends:
        raise GPUFlowError(
            "the broker has no append-only file: a restart would lose accepted tasks; "
            f"set `appendonly yes` on the server{mend}"
        )
    if policy != "noeviction":
        raise GPUFlowError(
            f"the broker may evict tasks when its memory is full (maxmemory-policy {policy}); "
            f"set `maxmemory-policy noeviction` on the server{mend}"
        )
    with contextlib.suppress(replay.CannotBeSeen):
        server: Any = client.info("server")
        denied = replay.left_out(client, server, settings.key_prefix)
        if denied:
            raise GPUFlowError(
                "the broker leaves out most of its append-only file when it starts, for its user `default` may too "
                f"little ({denied}): a restart would lose accepted tasks; {replay.MEND}{mend}"
            )


def require_own_id(fleet: Fleet, worker_id: str, hostname: str, timeout_seconds: float) -> None:
    """Raise GPUFlowError when a live worker has this id.

    One of this machine whose process is gone is succeeded at once. One elsewhere may have died: its next heartbeat
    is awaited for `timeout_seconds`, after which its entry has expired.
    """
    entry = fleet.find(worker_id)
    if entry is None or entry.is_gone:
        return
    taken = (
        f"worker id {worker_id!r} is in use by process {entry.pid} on {entry.hostname}; "
        "start this one with another --name, or stop that one"
    )
    if entry.hostname == hostname:
        if _runs(entry):
            raise GPUFlowError(taken)
        return
    log.warning("waiting_for_namesake", worker=worker_id, hostname=entry.hostname, seconds=timeout_seconds)
    pause = threading.Event()
    deadline = time.monotonic() + timeout_seconds + _LOOK_SECONDS
    while time.monotonic() < deadline:
        pause.wait(_LOOK_SECONDS)
        newest = fleet.find(worker_id)
        if newest is None or newest.is_gone:
            return
        if newest.heartbeat_at != entry.heartbeat_at:
            raise GPUFlowError(taken)
    raise GPUFlowError(taken)


def _runs(entry: WorkerEntry) -> bool:
    """Whether the process of an entry still runs: the same id, and not started after the entry was."""
    try:
        process = psutil.Process(entry.pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= entry.started_at + 1
    except psutil.Error:
        return False
