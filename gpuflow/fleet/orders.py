"""What an operator may order a worker to be, by hand: one step for the command line and the monitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from gpuflow.fleet.desired import DesiredState
from gpuflow.fleet.registry import Fleet, WorkerEntry

#: `release` leaves the worker to the autoscaler again.
Order = Literal["enabled", "disabled", "release"]
#: Sends a command to the workers by Celery's remote control, so that they need not wait for their next heartbeat.
Broadcast = Callable[..., Any]


class OrderRefused(Exception):
    """The worker cannot follow; the text names it and the mend."""


def find_running(fleet: Fleet, worker_id: str) -> WorkerEntry:
    """Return a worker that has not gone. Raises OrderRefused."""
    found = fleet.find(worker_id)
    if found is None or found.is_gone:
        raise OrderRefused(f"no worker {worker_id!r} is there; `gpuflow workers` lists them")
    return found


def order_worker(fleet: Fleet, broadcast: Broadcast, worker_id: str, order: Order, reason: str = "") -> None:
    """Write what a worker is to be, and notify it. Raises OrderRefused and redis errors."""
    find_running(fleet, worker_id)
    if order == "release":
        answer = fleet.release(worker_id)
    else:
        answer = fleet.desire(worker_id, DesiredState(order), reason=reason)
    if answer == "gone":
        raise OrderRefused(f"no worker {worker_id!r} is there; `gpuflow workers` lists them")
    if answer == "draining":
        raise OrderRefused(f"worker {worker_id} is draining and will stop; start it again to change that")
    broadcast("gpuflow_follow", arguments={"worker_ids": [worker_id]})


def drain_worker(fleet: Fleet, broadcast: Broadcast, worker_id: str, deadline_seconds: float | None) -> WorkerEntry:
    """Let a worker finish what it runs and stop; return it as it was. Raises OrderRefused and redis errors."""
    worker = find_running(fleet, worker_id)
    fleet.ask_to_drain(worker_id, deadline_seconds)
    arguments = {"worker_id": worker_id, "deadline_seconds": deadline_seconds}
    broadcast("gpuflow_drain", arguments=arguments)
    return worker


__all__ = ["Order", "OrderRefused", "drain_worker", "find_running", "order_worker"]
