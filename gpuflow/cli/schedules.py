"""`gpuflow schedules`: templates that beat submits at the times of a cron expression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuflow.cli.options import json_option, load_template, show_warnings, template_options

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow


@click.group(invoke_without_command=True, short_help="Submit templates at set times.")
@json_option
@click.pass_context
def schedules(ctx: click.Context, as_json: bool) -> None:
    """Submit templates at set times: list the schedules, add one, remove one. Beat submits what is due."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(listing, as_json=as_json)


@schedules.command("list")
@json_option
def listing(as_json: bool) -> None:
    """List the schedules: when each runs next, and what came of its last run."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.explaining import server_time

    with connected() as app, reachable():
        found, now = rows_of(app), server_time(app)
    if as_json:
        output.emit_json(found)
        return
    rows = [
        [
            one["name"],
            one["cron"],
            one["zone"],
            output.when_due(one["next"], now),
            output.when_ago(one["last"], now),
            one["error"] or one["pipeline"],
        ]
        for one in found
    ]
    output.table(["name", "cron", "zone", "next", "last", "came of it"], rows, empty="there are no schedules")


@schedules.command("add")
@template_options
@click.option("--cron", "expression", required=True, metavar="CRON", help='Five fields, such as "0 3 * * *".')
@click.option("--tz", "zone", default="UTC", metavar="ZONE", help="Time zone, such as Europe/Paris (default UTC).")
@click.option("--name", metavar="NAME", help="Name of the schedule (default: that of the template).")
@click.option("--replace", is_flag=True, help="Replace a schedule of this name.")
@json_option
def add(
    source: str,
    overrides: tuple[str, ...],
    labels: tuple[str, ...],
    expression: str,
    zone: str,
    name: str | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Submit a template at the times of a cron expression, from now on. FILE is a path, `-`, or a shipped name."""
    from gpuflow.artifacts.uploads import refuse_uploads
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.schedules.store import Schedule, ScheduleStore

    template = load_template(source, overrides, labels)
    show_warnings(template)
    refuse_uploads(template)
    with connected() as app, reachable():
        store = ScheduleStore(app.redis, app.keys, app.signer)
        schedule = Schedule(
            name=name or template.name,
            cron=expression,
            zone=zone,
            owner=template.owner,
            created_at=store.now(),
            template=template.to_dict(),
        )
        store.put(schedule, replace=replace)
        following = schedule.parsed().next_after(schedule.created_at)
    if as_json:
        output.emit_json({"name": schedule.name, "next": following})
    else:
        click.echo(f"{schedule.name}: next at {output.when(following)}")


@schedules.command("remove")
@click.argument("name")
def remove(name: str) -> None:
    """Remove a schedule. What it has submitted goes on."""
    from gpuflow.cli.errors import bad_input
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.schedules.store import ScheduleStore

    with connected() as app, reachable():
        if not ScheduleStore(app.redis, app.keys, app.signer).remove(name):
            raise bad_input(f"no schedule {name!r}; `gpuflow schedules` lists them")
    click.echo(f"{name} is removed")


def rows_of(app: GPUFlow) -> list[dict[str, Any]]:
    """Return the schedules with their next and last runs, JSON-able; a record that cannot be read has an error."""
    from gpuflow.errors import GPUFlowError
    from gpuflow.schedules.store import LastRun, Schedule, ScheduleStore

    store = ScheduleStore(app.redis, app.keys, app.signer)
    runs, now, found = store.runs(), store.now(), []
    for name, text in store.texts().items():
        run = runs.get(name, LastRun())
        last = {"last": run.due or None, "pipeline": run.pipeline, "error": run.error}
        try:
            one = Schedule.from_json(name, text)
            following = one.parsed().next_after(now)
        except (GPUFlowError, ValueError, KeyError, TypeError, OverflowError) as error:
            row = {"name": name, "cron": "", "zone": "", "owner": "", "next": None, **last}
            found.append({**row, "error": f"it cannot be read: {error}; remove it"})
            continue
        found.append({"name": name, "cron": one.cron, "zone": one.zone, "owner": one.owner, "next": following, **last})
    return found
