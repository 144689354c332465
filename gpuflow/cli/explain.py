"""`gpuflow explain`: why a task waits, which queue and workers it goes to, and what keeps it from the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuflow.cli.options import json_option, load_template, show_filled, show_warnings

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.routing.explain import Explanation
    from gpuflow.settings import Settings
    from gpuflow.spec import Template


@click.command(short_help="Say why a task waits, or where a template would run.")
@click.argument("target", metavar="FILE|ID")
@json_option
def explain(target: str, as_json: bool) -> None:
    """Say for each task why it waits: its queue and its place there, who could run it and what they are busy with, and
    for every other worker which requirement fails, the nearest miss first.

    Without a fleet, a template is compared with this machine, as `gpuflow run` would use it.
    """
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.errors import BrokerUnavailable
    from gpuflow.settings import Settings

    settings = Settings.load()
    try:
        # The workers of a run that has ended are no fleet: stored data answers for ids, not for templates.
        with connected(settings, stored=not _is_template(target)) as app, reachable():
            found = _on_fleet(app, target)
    except BrokerUnavailable:
        if settings.redis_url:
            raise
        found = _on_this_machine(target, settings)
    if as_json:
        output.emit_json([one.to_dict() for one in found])
        return
    for number, one in enumerate(found):
        if number:
            output.line()
        for line in one.to_lines():
            output.line(line)


def _is_template(target: str) -> bool:
    from gpuflow.spec.presets import list_presets

    return target == "-" or Path(target).exists() or target in list_presets("pipelines")


def _on_fleet(app: GPUFlow, target: str) -> list[Explanation]:
    from gpuflow.explaining import explain_records, explain_template, find_records

    if not Path(target).exists():
        records = find_records(app, target)
        if records:
            return explain_records(app, records)
    return explain_template(app, _shown(target))


def _shown(target: str) -> Template:
    """Return a template, and tell what of it is not used, as every command that reads one does."""
    template = load_template(target)
    show_warnings(template)
    show_filled(template)
    return template


def _on_this_machine(target: str, settings: Settings) -> list[Explanation]:
    from gpuflow.explaining import explain_here
    from gpuflow.fleet.disk import free_mib
    from gpuflow.fleet.hardware import probe
    from gpuflow.routing.capability import Capability
    from gpuflow.routing.views import WorkerView
    from gpuflow.spec.user_types import usable

    capability = Capability.of(
        probe(), disk_free_mib=free_mib(settings.results_dir), disk_floor_mib=settings.disk_floor_bytes >> 20
    )
    own = tuple(usable(settings.executors))
    here = WorkerView(id="this machine", capability=capability, user_types=own)
    return explain_here(_shown(target), here)
