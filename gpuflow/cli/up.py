"""`gpuflow up`: a local cluster that stays until Ctrl-C."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from gpuflow.cli.errors import DONE, Terminated, interrupted
from gpuflow.cli.options import include_option, modules_of

if TYPE_CHECKING:
    from gpuflow.cluster import LocalCluster
    from gpuflow.settings import Settings

_TEND_SECONDS: Final = 0.5
#: Workers that --autoscale starts at most, beside those of --workers.
MOST_LAUNCHED: Final = 4


@click.command(short_help="Start a local cluster.")
@click.option("--workers", default=1, type=click.IntRange(0, 64), metavar="N", help="Workers (default 1).")
@click.option("--max-jobs", type=click.IntRange(1, 1024), metavar="N", help="Most child processes of a worker at once.")
@include_option
@click.option("--autoscale", is_flag=True, help="Start more workers as the backlog grows, and end them when they idle.")
@click.option("--max", "most", type=click.IntRange(1, 64), metavar="N", help="Most workers beside those (default 4).")
@click.option("--no-beat", is_flag=True, help="Without beat (reconcile, cleanup, scaling).")
@click.option("--no-flower", is_flag=True, help="Without Flower, where it is installed.")
@click.option("--flower-port", type=click.IntRange(1, 65_535), help="Flower's port (default: 5555, or the next free).")
@click.option("--no-gateway", is_flag=True, help="Without the gateway, where it is installed.")
@click.option("--gateway-port", type=click.IntRange(1, 65_535), help="The gateway's port (default: 8080, or the next).")
def up(
    workers: int,
    max_jobs: int | None,
    include: tuple[str, ...],
    autoscale: bool,
    most: int | None,
    no_beat: bool,
    no_flower: bool,
    flower_port: int | None,
    no_gateway: bool,
    gateway_port: int | None,
) -> int:
    """Start a broker (unless REDIS_URL is set), workers, beat, gateway and Flower; print the addresses.

    Ctrl-C stops all.

    A part that ends is started again.
    """
    from gpuflow.cli.errors import bad_input
    from gpuflow.cli.output import line, note
    from gpuflow.cli.session import signals_interrupt
    from gpuflow.cluster import LocalCluster, commands
    from gpuflow.process_guard import guard_process
    from gpuflow.settings import Settings

    if (autoscale or most) and no_beat:
        raise bad_input("--autoscale needs beat, which --no-beat leaves out; give one of them")
    if (autoscale or most) and include:
        raise bad_input("--include is not known to the workers that --autoscale starts; give one of them")
    settings = Settings.load()
    guard_process(settings.umask_bits)
    flower = gateway = None
    if commands.flower_installed() and not no_flower:
        flower = flower_port or commands.free_port(commands.FLOWER_PORT)
    if not no_gateway:
        if commands.gateway_installed():
            gateway = gateway_port or commands.free_port(commands.GATEWAY_PORT)
        else:
            note("no gateway: it is not installed; pip install 'gpuflow[gateway]'")
    with signals_interrupt():
        try:
            with LocalCluster(
                settings,
                workers=workers,
                max_jobs=max_jobs,
                include=modules_of(include),
                beat=not no_beat,
                most_launched=(most or MOST_LAUNCHED) if autoscale or most else 0,
                flower_port=flower,
                gateway_port=gateway,
                follow=True,
                note=note,
            ) as cluster:
                try:
                    _tell(cluster, settings, flower, gateway)
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


def _login(settings: Settings) -> str:
    """Say how to log in to Flower; nothing where the user has set a login of his own."""
    import os

    from gpuflow.cluster import commands

    if not commands.flower_login(settings.state_dir, os.environ):
        return ""
    return f" (user {commands.FLOWER_USER}, password in {commands.flower_password_file(settings.state_dir)})"


def _token(settings: Settings) -> str:
    """Say where the gateway's token is; nothing where it is the user's own."""
    from gpuflow.gateway.login import login_file

    return "" if settings.worker_token else f" (token in {login_file(settings.state_dir)})"


def _tell(cluster: LocalCluster, settings: Settings, flower: int | None, gateway: int | None) -> None:
    from gpuflow.cli.output import pairs
    from gpuflow.settings import mask_url

    pairs(
        {
            "broker": mask_url(cluster.url) + (" (found by your other gpuflow commands)" if cluster.embedded else ""),
            "workers": ", ".join(cluster.worker_ids),
            "gateway": f"http://127.0.0.1:{gateway}{_token(settings)}" if gateway else "",
            "flower": f"http://127.0.0.1:{flower}{_login(settings)}" if flower else "",
            "results": str(settings.results_dir),
            "logs": str(cluster.logs),
        }
    )
