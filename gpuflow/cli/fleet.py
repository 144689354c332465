"""`gpuflow queues` and `gpuflow workers`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from gpuflow.cli.options import json_option
from gpuflow.cli.worker_tokens import create_worker, delete_worker, rotate_worker_token
from gpuflow.routing.describe import ago

if TYPE_CHECKING:
    from gpuflow.fleet.orders import Order
    from gpuflow.fleet.registry import WorkerEntry

#: Between two looks at a worker that is to stop.
_LOOK_SECONDS: Final = 0.5


@click.command(short_help="List the queues.")
@click.option("--all", "everyone", is_flag=True, help="Also those in which nothing waits or runs.")
@click.option("--merged", is_flag=True, help="Only what the merge layer has done.")
@json_option
def queues(everyone: bool, merged: bool, as_json: bool) -> None:
    """List the queues: what waits, how long the oldest has waited, what runs, and how many workers serve it. Those
    that wait and nobody serves come first, then those that wait longest.

    Below them, or by itself with --merged: how many calls were merged, and what that saved. --json lists all queues.
    """
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.explaining import server_time
    from gpuflow.fleet.queue_rows import queue_rows

    with connected() as app, reachable():
        rows = [] if merged else queue_rows(app.redis, app.keys, app.settings.task_topic)
        counts = app.merger.store.counts()
        later: Any = app.redis.zcard(app.keys.delayed)
        now = server_time(app)
    if as_json:
        output.emit_json(counts if merged else rows)
        return
    if merged:
        output.line(merge_line(counts))
        return
    shown = [row for row in rows if everyone or row["waiting"] or row["running"]]
    output.table(
        ["queue", "waiting", "oldest", "running", "workers"],
        [[*queue_cells(row, now), row["running"], len(row["workers"]) or "none"] for row in by_need(shown)],
        empty="nothing waits or runs",
    )
    if len(rows) > len(shown):
        output.note(f"{len(rows) - len(shown)} more are empty; --all lists them")
    if later:
        waiting = "1 more waits for its" if later == 1 else f"{later} more wait for their"
        output.note(
            f"{waiting} time: the next attempt, an ETA, or a worker of a newer version; `gpuflow explain ID` says which"
        )
    if counts:
        output.line(merge_line(counts))


def by_need(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return queues in the order in which they need somebody: those that wait and nobody serves, then the oldest."""

    def need(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return (not row["waiting"] or bool(row["workers"]), not row["waiting"], row["oldestAt"] or 0.0, row["name"])

    return sorted(rows, key=need)


def queue_cells(row: Mapping[str, Any], now: float) -> list[object]:
    """Return name, depth and oldest wait of a queue for a table; `now` is the server's."""
    oldest = "" if row["oldestAt"] is None else ago(max(0.0, now - row["oldestAt"]))
    return [row["name"], row["waiting"], oldest]


def merge_line(counts: Mapping[str, int]) -> str:
    """Return what the merge layer has done, for people."""
    if not counts:
        return "no calls have been merged yet"

    def count(name: str, noun: str) -> str:
        number = counts.get(name, 0)
        return f"{number:,} {noun}" + ("" if number == 1 else "s")

    runs = count("new", "run") if not counts.get("regrouped") else f"{counts['new'] + counts['regrouped']:,} runs"
    return (
        f"merged calls: {count('calls', 'call')} in {runs} ({counts.get('coalesced', 0):,} coalesced, "
        f"{counts.get('batched', 0):,} batched, {counts.get('hit', 0):,} answered by earlier results); "
        f"saved {count('saved_generations', 'generation')} and {count('saved_tokens', 'token')}"
    )


@click.group(invoke_without_command=True, short_help="List the workers; show, steer, create or delete one.")
@click.option("--all", "everyone", is_flag=True, help="Also those that have gone.")
@json_option
@click.pass_context
def workers(ctx: click.Context, everyone: bool, as_json: bool) -> None:
    """List the workers; show, enable, disable, drain, create or delete one."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_workers, everyone=everyone, as_json=as_json)


for _command in (create_worker, rotate_worker_token, delete_worker):
    workers.add_command(_command)


@workers.command("list")
@click.option("--all", "everyone", is_flag=True, help="Also those that have gone.")
@json_option
def list_workers(everyone: bool = False, as_json: bool = False) -> None:
    """List the workers that are there."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.fleet.registry import Fleet
    from gpuflow.fleet.standing import public, standings, unreadable_text

    with connected() as app, reachable():
        fleet = Fleet(app.redis, app.keys)
        known, unreadable = fleet.readable()
        known = fleet.as_seen(known)
    shown = [worker for worker in known if everyone or not worker.is_gone]
    if as_json:
        output.emit_json([public(worker) for worker in shown])
        return
    output.table(
        ["worker", "state", "host", "gpus", "cpus", "labels", "tasks", "seen", "version"],
        [_row(worker) for worker in shown],
        empty="no worker is there; start one with `celery -A gpuflow worker`, or `gpuflow up`",
    )
    for worker in shown:
        for one in standings(worker):
            if one.needs_a_look:
                output.note(f"{worker.id} {one.text}")
    if len(known) > len(shown):
        output.note(f"{_left([worker for worker in known if worker.is_gone])}; --all lists them")
    if unreadable:
        output.note(unreadable_text(unreadable))


@workers.command("show")
@click.argument("worker_id", metavar="ID")
@json_option
def show_worker(worker_id: str, as_json: bool) -> None:
    """Show all that is known of a worker."""
    from gpuflow.cli import output
    from gpuflow.cli.errors import bad_input
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.explaining import server_time
    from gpuflow.fleet.registry import UNREADABLE, Fleet
    from gpuflow.fleet.standing import public, unreadable_text

    with connected() as app, reachable():
        try:
            fleet = Fleet(app.redis, app.keys)
            worker = fleet.find(worker_id)
            shown = {} if worker is None else public(fleet.as_seen([worker])[0])
            now = server_time(app)
        except UNREADABLE:
            raise bad_input(unreadable_text([worker_id])) from None
    if worker is None:
        raise bad_input(f"no worker {worker_id!r}; `gpuflow workers list --all` lists them")
    if as_json:
        output.emit_json(shown)
        return
    capability, load = shown.pop("capability"), shown.pop("load")
    load["offers"] = _offers(load.pop("offers", None))
    shown["standing"] = "; ".join(one["text"] for one in shown["standing"]) or "well"
    times = {"startedAt": "started", "heartbeatAt": "heartbeat"}
    output.pairs(
        {times.get(key, key): output.when_ago(value, now) if key in times else value for key, value in shown.items()}
    )
    output.pairs({"gpus": gpu_text(worker), "labels": _labels(worker)})
    output.pairs({key: value for key, value in capability.items() if key not in ("gpus", "labels", "schema")})
    output.pairs(load)


def _offers(offers: object) -> str:
    """Return how many runtimes a worker offers with and without GPUs: each with what it lacks would be pages."""
    if not isinstance(offers, Mapping):
        return ""
    told = []
    for where, found in offers.items():
        names, lacking = found.get("names") or [], found.get("lacking") or {}
        told.append(f"{where}: {len(names)} of {len(names) + len(lacking)} runtimes")
    return f"{'; '.join(told)} (--json lists them, and what the others lack)" if told else ""


@workers.command("enable")
@click.argument("worker_id", metavar="ID")
@click.option("--auto", "automatic", is_flag=True, help="Leave it to the autoscaler again, as `release` does.")
def enable_worker(worker_id: str, automatic: bool) -> None:
    """Let a worker take work, whatever the autoscaler thinks, until it is released."""
    _set(worker_id, "release" if automatic else "enabled", "")


@workers.command("disable")
@click.argument("worker_id", metavar="ID")
@click.option("--reason", default="", metavar="TEXT", help="Why; `gpuflow workers` and `gpuflow explain` show it.")
def disable_worker(worker_id: str, reason: str) -> None:
    """Let a worker take nothing new and unload its idle models, until it is enabled or released.

    What runs there ends as it would have; control tasks are still done.
    """
    _set(worker_id, "disabled", reason)


@workers.command("release")
@click.argument("worker_id", metavar="ID")
def release_worker(worker_id: str) -> None:
    """Leave a worker that was enabled or disabled by hand to the autoscaler again; it is enabled."""
    _set(worker_id, "release", "")


def _set(worker_id: str, what: Order, reason: str) -> None:
    """Write what a worker is to be, by hand, and tell it. Raises bad input for one that is not there, or ends."""
    from gpuflow.cli import output
    from gpuflow.cli.errors import bad_input
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.fleet.orders import OrderRefused, order_worker
    from gpuflow.fleet.registry import Fleet

    with connected() as app, reachable():
        try:
            order_worker(Fleet(app.redis, app.keys), app.control.broadcast, worker_id, what, reason)
        except OrderRefused as error:
            raise bad_input(str(error)) from None
    texts = {
        "enabled": "is enabled by hand",
        "disabled": "is disabled by hand and takes nothing new",
        "release": "is left to the autoscaler",
    }
    output.line(f"{worker_id} {texts[what]}")


@workers.command("drain")
@click.argument("worker_id", metavar="ID")
@click.option("--deadline", metavar="TIME", help="When the machine goes away, such as 90s: what runs is saved before.")
@click.option("--wait", "-w", "waiting", is_flag=True, help="Wait until the worker has stopped.")
def drain_worker(worker_id: str, deadline: str | None, waiting: bool) -> None:
    """Let a worker finish what it runs, take nothing new, and stop.

    With --deadline, what does not finish in time saves its state and goes back to the front of its queue. --wait ends
    with exit code 1 when the worker goes away without a word, or is silent past the deadline.
    """
    from gpuflow.cli import output
    from gpuflow.cli.errors import bad_input
    from gpuflow.cli.session import connected
    from gpuflow.cli.watch import PATIENCE_SECONDS
    from gpuflow.client import reachable
    from gpuflow.errors import BrokerUnavailable, GPUFlowError
    from gpuflow.fleet.orders import OrderRefused
    from gpuflow.fleet.orders import drain_worker as order_drain
    from gpuflow.fleet.registry import Fleet
    from gpuflow.fleet.standing import standings
    from gpuflow.spec.units import duration_seconds

    try:
        seconds = None if deadline is None else duration_seconds(deadline)
    except ValueError as error:
        raise bad_input(f"--deadline {deadline!r}: {error}") from None
    with connected() as app, reachable():
        fleet = Fleet(app.redis, app.keys)
        try:
            ordered = order_drain(fleet, app.control.broadcast, worker_id, seconds)
        except OrderRefused as error:
            raise bad_input(str(error)) from None
        tasks = f"; it runs {len(ordered.tasks)}" if ordered.tasks else ""
        output.line(f"{worker_id} takes nothing new{tasks}")
        until = None if seconds is None else time.monotonic() + seconds
        away_since: float | None = None
        while waiting:
            try:
                with reachable():
                    worker = fleet.find(worker_id)
            except BrokerUnavailable:  # a broker that restarts ends no wait
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > PATIENCE_SECONDS:
                    raise
                time.sleep(_LOOK_SECONDS)
                continue
            away_since = None
            if worker is None or worker.stopped:
                output.line(f"{worker_id} has stopped")
                return
            if not worker.is_there and (worker.is_gone or (until is not None and time.monotonic() > until)):
                raise GPUFlowError(
                    f"{worker_id} {standings(worker)[0].text}, and has not said that it stops; look after its machine: "
                    "what it ran is lost and begins elsewhere"
                )
            time.sleep(_LOOK_SECONDS)


def gpu_text(worker: WorkerEntry) -> str:
    """Return the GPUs of a worker: `4x a100 80 GB`."""
    kinds = Counter((gpu["names"][0], gpu["vram_gb"]) for gpu in worker.capability.get("gpus") or ())
    return ", ".join(f"{count}x {name} {vram:g} GB" for (name, vram), count in kinds.items()) or "none"


def _left(gone: Sequence[WorkerEntry]) -> str:
    """Return how many are left out of the list: those that ended by themselves are no fault."""
    stopped = sum(worker.stopped for worker in gone)
    counts = {"have gone": len(gone) - stopped, "have stopped": stopped}
    return " and ".join(f"{count} more {verb}" for verb, count in counts.items() if count)


def _row(worker: WorkerEntry) -> list[object]:
    from gpuflow.fleet.standing import heard_seconds, state_text

    heard = heard_seconds(worker)
    return [
        worker.id,
        state_text(worker),
        worker.hostname,
        gpu_text(worker),
        f"{worker.capability.get('cpu_count', 0):g}",
        _labels(worker),
        len(worker.tasks),
        "never" if heard is None else f"{ago(heard)} ago",
        worker.version,
    ]


def _labels(worker: WorkerEntry) -> str:
    labels = dict(worker.capability.get("labels") or {})
    return ", ".join(f"{key}={value}" if value else key for key, value in labels.items())
