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
from gpuflow.broker.held_messages import held_leases
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


def require_own_id(
    fleet: Fleet, worker_id: str, hostname: str, *, timeout_seconds: float, lease_seconds: float
) -> None:
    """Return when no live worker has this id, nor a former one that may still work. Raises GPUFlowError for a live one.

    One of this machine whose process is gone is succeeded at once. Any other may have died: its next heartbeat is
    awaited for `timeout_seconds`, after which its entry has expired, and then the rest of `lease_seconds`, after which
    it has given up what it ran.
    """
    entry = fleet.find(worker_id)
    if entry is not None and entry.hostname == hostname:
        if not _runs(entry):
            return
        if not entry.is_gone:
            raise GPUFlowError(_taken(entry))
    if (entry is None or entry.is_gone) and not _holds_leases(fleet, worker_id):
        return
    term = max(timeout_seconds, lease_seconds)
    where = entry.hostname if entry is not None else ""
    log.warning("waiting_for_namesake", worker=worker_id, hostname=where, seconds=term)
    pause = threading.Event()
    deadline = time.monotonic() + term + _LOOK_SECONDS
    while time.monotonic() < deadline:
        pause.wait(_LOOK_SECONDS)
        newest = fleet.find(worker_id)
        if newest is not None and (entry is None or newest.heartbeat_at != entry.heartbeat_at):
            raise GPUFlowError(_taken(newest))
        if (newest is None or newest.is_gone) and not _holds_leases(fleet, worker_id):
            return
    if newest is not None and not newest.is_gone:
        raise GPUFlowError(_taken(newest))


def _taken(entry: WorkerEntry) -> str:
    return (
        f"worker id {entry.id!r} is in use by process {entry.pid} on {entry.hostname}; "
        "start this one with another --name, or stop that one"
    )


def _holds_leases(fleet: Fleet, worker_id: str) -> bool:
    return any(lease.worker == worker_id and lease.is_live for lease in held_leases(fleet.client, fleet.keys))


def _runs(entry: WorkerEntry) -> bool:
    """Whether the process of an entry still runs: the same id, and not started after the entry was."""
    try:
        process = psutil.Process(entry.pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= entry.started_at + 1
    except psutil.Error:
        return False
