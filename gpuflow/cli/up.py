"""`gpuflow up`: a local cluster that stays until Ctrl-C."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from gpuflow.cli.errors import DONE, Terminated, interrupted

if TYPE_CHECKING:
    from gpuflow.cluster import LocalCluster
    from gpuflow.settings import Settings

_TEND_SECONDS: Final = 0.5


@click.command(short_help="Start a local cluster.")
@click.option("--workers", default=1, type=click.IntRange(0, 64), metavar="N", help="Workers (default 1).")
@click.option("--max-jobs", type=click.IntRange(1, 1024), metavar="N", help="Most child processes of a worker at once.")
@click.option("--no-beat", is_flag=True, help="Without beat (reconcile, cleanup, scaling).")
@click.option("--no-flower", is_flag=True, help="Without Flower, where it is installed.")
@click.option("--flower-port", type=click.IntRange(1, 65_535), help="Flower's port (default: 5555, or the next free).")
def up(workers: int, max_jobs: int | None, no_beat: bool, no_flower: bool, flower_port: int | None) -> int:
    """Start a broker (unless REDIS_URL is set), workers, beat and Flower; print the addresses; Ctrl-C stops all.

    A part that ends is started again.
    """
    from gpuflow.cli.output import line, note
    from gpuflow.cli.session import signals_interrupt
    from gpuflow.cluster import LocalCluster
    from gpuflow.cluster.commands import FLOWER_PORT, flower_installed, free_port
    from gpuflow.settings import Settings

    settings = Settings.load()
    flower = (flower_port or free_port(FLOWER_PORT)) if flower_installed() and not no_flower else None
    with signals_interrupt():
        try:
            with LocalCluster(
                settings, workers=workers, max_jobs=max_jobs, beat=not no_beat, flower_port=flower, note=note
            ) as cluster:
                try:
                    _tell(cluster, settings, flower)
                    cluster.wait_ready()
                    line("ready; Ctrl-C stops all")
                    while True:
                        cluster.tend()
                        time.sleep(_TEND_SECONDS)
                except KeyboardInterrupt:
                    note("stopping; what runs goes back to its queue")
                    raise
        except Terminated as error:
            return interrupted(error)
        except KeyboardInterrupt:
            return DONE


def _tell(cluster: LocalCluster, settings: Settings, flower: int | None) -> None:
    from gpuflow.cli.output import pairs
    from gpuflow.settings import mask_url

    pairs(
        {
            "broker": mask_url(cluster.url) + (" (found by your other gpuflow commands)" if cluster.embedded else ""),
            "workers": ", ".join(cluster.worker_ids),
            "flower": f"http://127.0.0.1:{flower}" if flower else "",
            "results": str(settings.results_dir),
            "logs": str(cluster.logs),
        }
    )
