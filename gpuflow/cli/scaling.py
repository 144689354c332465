"""`gpuflow scaling`: what scales the fleet now, the machines that it launched, and why it did what it did."""

from __future__ import annotations

import click

from gpuflow.cli.options import json_option


@click.group(invoke_without_command=True, short_help="Show what scales the fleet.")
@json_option
@click.pass_context
def scaling(ctx: click.Context, as_json: bool) -> None:
    """Show what scales the fleet: the beat that leads, counts and costs, the machines that were launched."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(status, as_json=as_json)


@scaling.command("status")
@json_option
def status(as_json: bool) -> None:
    """Show the beat that leads, counts and costs, and the machines that were launched."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.scaling.store import scaling_status

    with connected() as app, reachable():
        found = scaling_status(app.redis, app.keys)
    if as_json:
        output.emit_json(found)
        return
    leader = found["leader"]
    output.pairs(
        {
            "leader": f"{leader['owner']}, epoch {leader['epoch']}"
            if leader
            else "none; start `celery -A gpuflow beat`",
            "workers": f"{found['enabled']} enabled, {found['disabled']} disabled",
            "cost so far": f"{found['cost']:.2f}" if found["cost"] else "",
            "cost per hour": f"{found['costPerHour']:.2f}" if found["costPerHour"] else "",
            **{name.replace("_", " "): f"{count:g}" for name, count in found["counts"].items()},
        }
    )
    rows = [[one["id"], one["family"], one["state"], "spot" if one["spot"] else ""] for one in found["machines"]]
    if rows:
        output.table(["machine", "family", "state", "kind"], rows)
    unknown = [[one["id"], one["family"], one["fleet"] or "unknown", one["end"]] for one in found["unknown"]]
    if unknown:
        output.table(["unknown machine", "family", "fleet", "to end it, if it is yours"], unknown)


@scaling.command("decisions")
@click.option(
    "-n", "--limit", "--last", "limit", default=20, show_default=True, type=click.IntRange(1, 500), help="How many."
)
@json_option
def decisions(limit: int, as_json: bool) -> None:
    """Show the last decisions with their reasons, the newest first."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.explaining import server_time
    from gpuflow.scaling.store import ScalingStore

    with connected() as app, reachable():
        found, now = ScalingStore(app.redis, app.keys).decisions(limit), server_time(app)
    if as_json:
        output.emit_json(found)
        return
    rows = [
        [output.when_ago(one["at"], now), one["action"], one.get("worker") or one.get("machine") or "", one["reason"]]
        for one in found
    ]
    output.table(["when", "action", "worker", "why"], rows, empty="nothing has been decided yet")
