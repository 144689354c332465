"""What `gpuflow doctor` says of the fleet behind a broker: workers, queues that nobody serves, unreadable messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gpuflow.cli.checks import Check

if TYPE_CHECKING:
    from gpuflow.broker.keys import Keys
    from gpuflow.fleet.registry import WorkerEntry
    from gpuflow.settings import Settings

#: Workers and queues that a check names; the others are counted.
_MOST_NAMED: Final = 5
#: What is to be done about workers, by how they stand (`fleet.standing`).
_OF_WORKERS: Final = {
    "silent": "look after their machines and their way to the broker; what they run starts elsewhere when leases end",
    "disk-full": "make room in RESULTS_DIR there; below GPUFLOW_DISK_FLOOR_BYTES they take no task",
    "no-driver": "run `nvidia-smi` there; in a container, start it with the NVIDIA container toolkit (--gpus all)",
    "gpu-problem": "run `gpuflow hardware` and `nvidia-smi` there",
    "low-memory": "see what uses it there; tasks may ask for `resources.hardware.memory`",
    "clock-skewed": "synchronise it there: timedatectl set-ntp true",
    "outdated": "drain and upgrade them (docs/howto/upgrade-and-rotate.md)",
}


def fleet_checks(client: Any, settings: Settings) -> list[Check]:
    """Check the fleet. Raises redis errors."""
    from gpuflow.broker.keys import Keys
    from gpuflow.cli.checks_signing import signing_of_workers
    from gpuflow.fleet.registry import Fleet

    keys = Keys(settings.key_prefix)
    known, unreadable = Fleet(client, keys).readable()
    return [
        *_workers([worker for worker in known if not worker.is_gone], unreadable),
        *signing_of_workers(settings, [worker for worker in known if not worker.is_gone]),
        *_queues(client, keys, settings.task_topic, known),
        *_messages(client, keys),
    ]


def _workers(there: list[WorkerEntry], unreadable: list[str]) -> list[Check]:
    from gpuflow.cli.checks_locks import shared_by_all
    from gpuflow.fleet.standing import by_kind, unreadable_text

    found = []
    heard = [worker.id for worker in there if worker.is_there]
    if heard:
        found.append(Check(name="workers", status="ok", detail=f"{len(heard)}: {_named(heard, ', ')}"))
    if unreadable:
        mend = "upgrade gpuflow here, or remove the entry: gpuflow workers delete NAME"
        found.append(Check(name="unreadable workers", status="warn", detail=unreadable_text(unreadable), mend=mend))
    for kind, standing in by_kind(there).items():
        if standing[0][1].needs_a_look:
            detail = _named([f"{worker} {one.text}" for worker, one in standing], "; ")
            name = f"{standing[0][1].label} workers"
            found.append(Check(name=name, status="warn", detail=detail, mend=_OF_WORKERS[kind]))
    if found:
        return [*found, *shared_by_all((worker.id, worker.load) for worker in there)]
    mend = "start one with `celery -A gpuflow worker`, or `gpuflow up`"
    return [Check(name="workers", status="warn", detail="no worker is there", mend=mend)]


def _queues(client: Any, keys: Keys, plain_queue: str, known: list[WorkerEntry]) -> list[Check]:
    """Warn of work that waits where nobody serves."""
    from gpuflow.fleet.queue_rows import queue_rows
    from gpuflow.routing.describe import ago

    seconds, _ = client.time()
    waiting = [row for row in queue_rows(client, keys, plain_queue, known) if row["waiting"] and not row["workers"]]
    if not waiting:
        return []
    told = [
        f"{row['name']} ({row['waiting']}" + (f", {ago(seconds - row['oldestAt'])})" if row["oldestAt"] else ")")
        for row in sorted(waiting, key=lambda row: row["oldestAt"] or 0.0)
    ]
    detail = f"tasks wait, and no worker that takes work serves {_named(told, ', ')}"
    mend = "`gpuflow explain ID` of such a task says what is missing; `gpuflow status --state QUEUED` lists them"
    return [Check(name="queues", status="warn", detail=detail, mend=mend)]


def _messages(client: Any, keys: Keys) -> list[Check]:
    """Warn of messages that were put aside."""
    count = client.llen(keys.unreadable)
    if not count:
        return []
    detail = f"{count} of them were put aside: nobody could read or run them"
    mend = "`gpuflow dead messages` shows them; `--purge` forgets them"
    return [Check(name="unreadable messages", status="warn", detail=detail, mend=mend)]


def _named(texts: list[str], separator: str) -> str:
    more = len(texts) - _MOST_NAMED
    return separator.join(texts[:_MOST_NAMED]) + (f"{separator}and {more} more" if more > 0 else "")
