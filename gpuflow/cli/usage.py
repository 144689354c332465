"""`gpuflow usage`: GPU-seconds, energy and cost by owner, pipeline, model, worker or task type."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from gpuflow.cli.options import json_option

if TYPE_CHECKING:
    from gpuflow.ledger.records import Usage
    from gpuflow.ledger.usage import By


@click.command(short_help="Show what was used, by owner, pipeline, model, worker or type.")
@click.option(
    "--by",
    default="owner",
    show_default=True,
    type=click.Choice(["owner", "pipeline", "model", "worker", "type"]),
    help="What to sum by.",
)
@click.option(
    "--since", metavar="TIME", help="Only attempts that ended in the last 7d, 12h, ...; else all kept records."
)
@click.option("-n", "--limit", default=50, show_default=True, type=click.IntRange(1, 100_000), help="How many rows.")
@json_option
def usage(by: str, since: str | None, limit: int, as_json: bool) -> None:
    """Show the GPU-seconds, energy, cost and artifacts of attempts that have ended, the largest first.

    It sums over the records that are kept (GPUFLOW_RETENTION_DAYS). The cost is in the unit of the workers' --cost.
    """
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.ledger.records import Usage
    from gpuflow.ledger.usage import usage_rows

    seconds = None if since is None else _seconds(since)
    with connected() as app, reachable():
        after = 0.0 if seconds is None else int(app.redis.time()[0]) - seconds
        rows = usage_rows(app.redis, app.keys, cast("By", by), after)
    total = sum((row.usage for row in rows), Usage())
    if as_json:
        output.emit_json({"by": by, "rows": [row.public() for row in rows[:limit]], "total": total.public()})
        return
    cells = [[row.name or "none", row.tasks, row.attempts, *_cells(row.usage)] for row in rows[:limit]]
    if len(rows) > 1:
        cells.append(["total", sum(row.tasks for row in rows), sum(row.attempts for row in rows), *_cells(total)])
    output.table(
        [by, "tasks", "attempts", "GPU hours", "hours", "energy", "cost", "artifacts"],
        cells,
        empty="no attempt has ended in that time",
    )
    if len(rows) > limit:
        output.note(f"{len(rows) - limit} more; --limit shows them")


def _seconds(text: str) -> float:
    from gpuflow.cli.errors import bad_input
    from gpuflow.spec.units import duration_seconds

    try:
        return float(duration_seconds(text))
    except ValueError as error:
        raise bad_input(f"--since {text}: {error}") from None


def _cells(used: Usage) -> list[str]:
    return [
        f"{used.gpu_seconds / 3600:.3f}" if used.gpu_seconds else "",
        f"{used.seconds / 3600:.3f}",
        f"{used.energy_joules / 3.6e6:.3f} kWh" if used.energy_joules else "",
        f"{used.cost:.4f}" if used.cost else "",
        f"{used.artifact_bytes / 1e6:.1f} MB" if used.artifact_bytes else "",
    ]
