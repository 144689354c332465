"""What a worker makes sure of before it takes its first task: a broker that keeps what it accepts, an id of its own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
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
    fleet: Fleet,
    worker_id: str,
    hostname: str,
    *,
    timeout_seconds: float,
    lease_seconds: float,
    alive: Callable[[], object] = lambda: None,
) -> list[str]:
    """Return the owner tokens by which former runs of this worker still hold leases, though their processes are gone.

    One of this machine whose process is gone is succeeded at once; where it was in another container, that is believed
    by its name and number, and its leases are left to their end. Any other may have died: its next heartbeat is awaited
    for `timeout_seconds`, and the end of its leases for `lease_seconds`, after which it has given up what it ran.
    `alive` is called while that is waited for. Raises GPUFlowError for a worker that lives, or whose leases do.
    """
    held = _held(fleet, worker_id)  # before its entry: one that begins meanwhile is not among them
    entry = fleet.find(worker_id)
    if entry is not None:
        ended, here = has_ended(entry.process), entry.hostname == hostname
        if ended:
            return [*held]
        if ended is None and here and not _runs(entry):
            return []
        if here and not entry.is_gone:
            raise GPUFlowError(_taken(worker_id, entry))
    if (entry is None or entry.is_gone) and not any(held.values()):
        return [*held]
    term = max(timeout_seconds, lease_seconds)
    where = entry.hostname if entry is not None else ""
    log.warning("waiting_for_namesake", worker=worker_id, hostname=where, seconds=term)
    pause = threading.Event()
    deadline = time.monotonic() + term + _LOOK_SECONDS
    newest = entry
    while time.monotonic() < deadline:
        pause.wait(_LOOK_SECONDS)
        alive()
        held, newest = _held(fleet, worker_id), fleet.find(worker_id)
        is_gone = newest is None or newest.is_gone
        if newest is not None and not is_gone and (entry is None or newest.heartbeat_at != entry.heartbeat_at):
            break
        if is_gone and not any(held.values()):
            return [*held]
    raise GPUFlowError(_taken(worker_id, newest))


def _taken(worker_id: str, entry: WorkerEntry | None) -> str:
    mend = "start this one with another --name, or stop that one"
    if entry is None or entry.is_gone:
        return f"a worker with the id {worker_id!r} sends no heartbeat and renews its leases; {mend}"
    return f"worker id {worker_id!r} is in use by process {entry.pid} on {entry.hostname}; {mend}"


def _held(fleet: Fleet, worker_id: str) -> dict[str, bool]:
    """Return the owner tokens of a worker that stand beside messages, and whether a lease of each is live."""
    found: dict[str, bool] = {}
    for lease in held_leases(fleet.client, fleet.keys):
        if lease.worker == worker_id:
            found[lease.owner] = found.get(lease.owner, False) or lease.is_live
    return found


def own_process() -> str:
    """Return what tells this process from all others of its machine, whatever becomes of clocks; "" if nothing does.

    Four words: the machine's boot, the namespace of process ids, the process id, and when it began in ticks since boot.
    """
    try:
        boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
        return f"{boot.read_text('ascii').strip()} {namespace.readlink()} {os.getpid()} {_began(os.getpid())}"
    except (OSError, ValueError, IndexError):
        return ""


def has_ended(process: str) -> bool | None:
    """Say whether a process has ended, by what `own_process` returned there; None: that cannot be told from here."""
    there, here = process.split(), own_process().split()
    if len(there) != 4 or there[:2] != here[:2]:
        return None
    try:
        return _began(int(there[2])) != there[3]
    except FileNotFoundError:
        return None if psutil.pid_exists(int(there[2])) else True  # it may be hidden from this user
    except (OSError, ValueError, IndexError):
        return None


def _began(pid: int) -> str:
    """Return when a process began, in ticks since boot; "" for one that has ended and is not waited for. Linux."""
    state, *numbers = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return "" if state == "Z" else numbers[18]


def _runs(entry: WorkerEntry) -> bool:
    """Whether the process of an entry still runs: the same id, and not started after the entry was."""
    try:
        process = psutil.Process(entry.pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= entry.started_at + 1
    except psutil.Error:
        return False
