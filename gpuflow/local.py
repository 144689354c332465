"""A fleet inside a Python program: an embedded broker and workers, as long as a `with` block lasts.

For notebooks, services on one machine and tests of pipelines. `gpuflow run` and `gpuflow up` do the same for a shell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Final

from kombu import pools

from gpuflow.broker.connection import producer_pools
from gpuflow.celery_app import GPUFlow
from gpuflow.cluster import LocalCluster
from gpuflow.errors import GPUFlowError
from gpuflow.logs import get_logger
from gpuflow.repeating import repeating
from gpuflow.settings import Settings

log = get_logger("gpuflow.local")

#: How often the processes are checked, and how often one may end in short order before they are left alone.
_TEND_SECONDS: Final = 1.0
_MOST_ENDS: Final = 3


@contextmanager
def local_fleet(
    folder: str | PathLike[str] | None = None,
    *,
    workers: int = 1,
    max_jobs: int | None = None,
    include: Sequence[str] = (),
) -> Iterator[GPUFlow]:
    """Start an embedded broker and workers; give the app to submit with: `submit(..., app=app)`.

    `folder`: where broker, logs and results are kept, for a fleet that shares nothing with others of this user; by
    default those of `gpuflow run`. REDIS_URL is not used. `max_jobs`: the most child processes of a worker at once;
    `include`: modules with Celery tasks of yours, which the workers are to have.
    A worker that ends is started again. At the end of the block all processes are ended; records and results stay in
    the folder, and what has not ended continues with the next fleet in it. Raises GPUFlowError where a part does not
    start.
    """
    own: dict[str, object] = {"redis_url": None}
    if folder is not None:
        root = Path(folder).absolute()
        own |= {"state_dir": root / "state", "results_dir": root / "results"}
    with ExitStack() as stack:
        cluster = stack.enter_context(
            LocalCluster(
                Settings.load().model_copy(update=own),
                workers=workers,
                max_jobs=max_jobs,
                include=include,
                most_ends=_MOST_ENDS,
                note=lambda line: log.warning("local_fleet", message=line),
            )
        )
        app = GPUFlow("gpuflow", settings=cluster.settings, set_as_current=False)
        stack.callback(_disconnect, app)
        cluster.wait_ready()
        stack.enter_context(_tended(cluster))
        yield app


def _disconnect(app: GPUFlow) -> None:
    """End an app that no one uses any more."""
    close_connections(app)
    app.close()
    app.redis.close()


def close_connections(app: GPUFlow) -> None:
    """Close all Celery connections of the app; kombu's pools, which are of the process, would keep theirs."""
    producers = app.amqp.producer_pool
    own = (producers, producers.connections, app.pool)
    app.backend.result_consumer.stop()
    for pool in own:
        pool.force_close_all()
    for kept in (pools.connections, producer_pools):
        for address in [address for address, pool in kept.items() if any(pool is one for one in own)]:
            dict.pop(kept, address)  # by the key itself: `del` takes the connection of which that was made


def _tended(cluster: LocalCluster) -> AbstractContextManager[None]:
    """Return a context in which what ends is brought back."""

    def tend() -> bool:
        try:
            cluster.tend()
        except GPUFlowError as error:
            log.error("local_fleet_failed", error=str(error))
            return False
        return True

    return repeating(tend, _TEND_SECONDS, "gpuflow-local-fleet")
