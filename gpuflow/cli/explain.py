"""`gpuflow explain`: which queue a template or task goes to, who could run it, and why the others cannot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuflow.cli.options import json_option, load_template

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.fleet.registry import WorkerEntry
    from gpuflow.routing.requirement import Requirement


@click.command(short_help="Say which queue and workers a template or task goes to, and why.")
@click.argument("target", metavar="FILE|ID")
@json_option
def explain(target: str, as_json: bool) -> None:
    """Say for each task which queue it goes to, and for each worker whether it can run it, or which requirement fails.

    Without a fleet, a template is compared with this machine, as `gpuflow run` would use it.
    """
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.errors import BrokerUnavailable
    from gpuflow.settings import Settings

    settings = Settings.load()
    try:
        with connected(settings) as app, reachable():
            found = _on_fleet(app, target)
    except BrokerUnavailable:
        if settings.redis_url:
            raise
        found = _on_this_machine(target)
    if as_json:
        output.emit_json(found)
        return
    for task in found:
        waits = f" ({task['state']})" if task.get("state") else ""
        output.line(f"{task['name']}{waits}: queue {task['queue']}")
        if not task["workers"]:
            output.line("  no worker is there; start one with `celery -A gpuflow worker`")
        for worker in task["workers"]:
            verdict = "can run it" if worker["fits"] else "; ".join(worker["reasons"])
            output.line(f"  {worker['id']}: {verdict}")


def _on_fleet(app: GPUFlow, target: str) -> list[dict[str, Any]]:
    from gpuflow.fleet.registry import Fleet
    from gpuflow.routing.requirement import Requirement
    from gpuflow.submission import choose_requirement

    workers = Fleet(app.redis, app.keys).workers()
    found = []
    if not Path(target).exists():
        pipeline = app.pipelines.find(target)
        if pipeline is not None:
            ids = [task for stage in pipeline.stages.values() for task in stage.tasks]
            records = [record for record in app.ledger.find_many(ids) if record is not None]
        else:
            task = app.ledger.find(target)
            records = [] if task is None else [task]
        if pipeline is not None or records:
            for record in records:
                ask = Requirement.from_dict(record.requirement or {})
                found.append(_explained(record.name or record.id, record.queue, ask, workers, state=str(record.state)))
            return found
    for stage in load_template(target).stages:
        light = stage.task_type == "echo"
        ask = choose_requirement(app, _resources(stage.spec), light=light)
        found.append(_explained(stage.name, ask.queue_name(), ask, workers))
    return found


def _on_this_machine(target: str) -> list[dict[str, Any]]:
    from gpuflow.fleet.hardware import probe
    from gpuflow.fleet.registry import WorkerEntry, WorkerState
    from gpuflow.routing.capability import Capability
    from gpuflow.routing.resources import requirement_from_resources

    hardware = probe()
    here = WorkerEntry(
        id="this machine", state=WorkerState.IDLE, capability=Capability.of(hardware).to_dict(), queues=("tasks",)
    )
    found = []
    for stage in load_template(target).stages:
        wants_gpu = bool(hardware.gpus) and stage.task_type != "echo"
        ask = requirement_from_resources(_resources(stage.spec), gpu_available=wants_gpu)[0]
        found.append(_explained(stage.name, ask.queue_name(), ask, [here]))
    return found


def _resources(spec: Mapping[str, Any]) -> Any:
    return spec.get("resources") or {}


def _explained(
    name: str, queue: str, ask: Requirement, workers: list[WorkerEntry], state: str | None = None
) -> dict[str, Any]:
    judged = [
        {"id": worker.id, "fits": not (reasons := reasons_against(worker, queue, ask)), "reasons": reasons}
        for worker in workers
        if str(worker.state) != "OFFLINE"
    ]
    return {
        "name": name,
        "state": state,
        "queue": queue,
        "requirement": ask.to_dict(),
        "workers": sorted(judged, key=lambda one: (not one["fits"], one["id"])),
    }


def reasons_against(worker: WorkerEntry, queue: str, ask: Requirement) -> list[str]:
    """Return why a worker cannot take a task of this queue now; empty if it can."""
    from gpuflow.routing.capability import Capability
    from gpuflow.routing.fit import match
    from gpuflow.routing.queues import family_matches, is_demand_queue

    reasons = [reason.message for reason in match(ask, Capability.from_dict(worker.capability)).reasons]
    families = [name for name in worker.queues if is_demand_queue(name)]
    # A worker without -Q serves the plain queue too; with -Q it serves the families that it named.
    unrestricted = any(not is_demand_queue(name) and not name.startswith("gpuflow.") for name in worker.queues)
    if not reasons and not unrestricted and not any(family_matches(queue, family) for family in families):
        reasons.append(f"its -Q does not cover {queue}")
    if not worker.enabled:
        reasons.append("it is disabled")
    if str(worker.state) == "DRAINING":
        reasons.append("it drains")
    return reasons
