"""The worker program of `celery -A gpuflow worker`: Celery's, with our options taken in before it is set up."""

from __future__ import annotations

import logging
import uuid
import warnings
from typing import Any, Final

from celery.apps.worker import Worker as CeleryWorker
from celery.exceptions import CPendingDeprecationWarning
from celery.utils.nodenames import default_nodename, gethostname
from click import ClickException, get_current_context
from click.core import ParameterSource

from gpuflow.errors import GPUFlowError
from gpuflow.importing import end_quickly, load_checker
from gpuflow.logs import dress, get_logger, use_level
from gpuflow.process_guard import guard_process
from gpuflow.secrets import known
from gpuflow.worker import conf_view, confinement
from gpuflow.worker.passed_on import passed_on
from gpuflow.worker.pool import SupervisorPool
from gpuflow.worker.results_folder import check_writable
from gpuflow.worker.runtime import find
from gpuflow.worker.secret_sources import read_token, worker_redactor

log = get_logger("gpuflow.worker")

#: Celery's consumer and ours.
_CONSUMERS: Final = r"(?:celery|gpuflow)\.worker\.consumer"
#: What `-P` calls Celery's pools, by their modules.
_POOLS: Final = {
    "celery.concurrency.eventlet": "eventlet",
    "celery.concurrency.gevent": "gevent",
    "celery.concurrency.prefork": "prefork",
    "celery.concurrency.solo": "solo",
    "celery.concurrency.thread": "threads",
    SupervisorPool.__module__: "prefork",
}


class CannotStart(ClickException):
    """The worker cannot start with these options; shown in one line, exit code 2."""

    exit_code = 2


def check_pool(asked: type, *, named: bool) -> None:
    """Raise CannotStart for a pool that is `named` by `-P`: any other than ours knows nothing of children and limits.

    Celery takes `-P prefork` for the one of the app's settings, which is ours.
    """
    if issubclass(asked, SupervisorPool) and not named:
        return
    name = _POOLS.get(asked.__module__, f"{asked.__module__}:{asked.__name__}")
    raise CannotStart(
        f"-P {name}: a worker has one pool, of threads that watch children; leave -P out, and say with -c how many "
        "threads there are, with --max-jobs how many children at once"
    )


class Worker(CeleryWorker):  # type: ignore[misc]
    """A Celery worker whose node name is made from its worker id, and that remembers what `-Q` said."""

    #: What `-Q` named, or None: then everything that this machine can serve.
    asked_queues: tuple[str, ...] | None = None
    worker_id: str = ""

    def __init__(
        self,
        app: Any = None,
        hostname: str | None = None,
        name: str | None = None,
        isolate: str | None = None,
        worker_token_file: str | None = None,
        spot_notices: str | None = None,
        pool: Any = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(pool, type):  # of the command line; what embeds a worker in a process gives a name
            context = get_current_context(silent=True)
            source = context.get_parameter_source("pool") if context is not None else None
            check_pool(pool, named=source is ParameterSource.COMMANDLINE)
            pool = None
        ours = app or self.app
        given = {"isolate": isolate, "spot_notices": spot_notices}
        if update := {name: value for name, value in given.items() if value is not None}:
            ours.settings = ours.settings.model_copy(update=update)
        settings = ours.settings
        guard_process(settings.umask_bits)
        end_quickly()
        self.worker_id = name or settings.worker_id or f"w-{uuid.uuid4().hex[:10]}"
        try:
            if worker_token_file is not None:
                ours.settings = settings = settings.model_copy(update={"worker_token": read_token(worker_token_file)})
            confinement.check(settings)
            check_writable(settings.results_dir)
            self._start(app, hostname, pool=pool, **kwargs)
        except GPUFlowError as error:
            raise CannotStart(str(error)) from None

    def _start(self, app: Any, hostname: str | None, **kwargs: Any) -> None:
        if not all(char.isascii() and (char.isalnum() or char in "._-") for char in self.worker_id):
            raise GPUFlowError(f"--name {self.worker_id!r} cannot name a worker; use letters, digits, '.', '_' and '-'")
        if hostname in (None, default_nodename(None)):
            hostname = f"{self.worker_id}@{gethostname()}"
        # Celery's gossip tells each worker of every other one's heartbeat: its cost grows with the square of the fleet.
        # Nothing here asks for it; `inspect` and Flower listen for themselves.
        kwargs["without_gossip"] = True
        super().__init__(app=app, hostname=hostname, **kwargs)

    def on_init_blueprint(self) -> None:
        """Set logging up as Celery does, and hide secrets in all that it writes, tracebacks included."""
        super().on_init_blueprint()
        known.add(worker_redactor(self.app.settings))
        conf_view.install()
        use_level(self.app.settings.log_level)
        dress(self.app.settings.log_format, None, "celery", "celery.task")
        load_checker()
        passed_on.install()
        # It says after each cut that Celery 6 will cancel what runs then; here a lease decides that.
        warnings.filterwarnings("ignore", category=CPendingDeprecationWarning, module=_CONSUMERS)
        for name in ("httpx", "httpcore"):  # they log whole URLs, and the path of a web hook is often its key
            logging.getLogger(name).setLevel(logging.WARNING)

    def on_consumer_ready(self, consumer: Any) -> None:
        """Say that work is taken now; also after a cut connection."""
        super().on_consumer_ready(consumer)
        if (runtime := find()) is not None and runtime.systemd is not None:
            runtime.systemd.ready()
        log.info("ready", worker=self.worker_id, queues=",".join(self.asked_queues or ()) or "all that fit")

    def install_platform_tweaks(self, worker: Any) -> None:
        """Install Celery's signal handlers, then our own for SIGTERM, SIGINT and SIGQUIT (`worker.stopping`)."""
        super().install_platform_tweaks(worker)
        runtime = find()
        if runtime is not None and runtime.stopper is not None:
            runtime.stopper.install_signals()

    def on_stopped(self) -> None:
        """Say that it has ended, after all that Celery does at the end."""
        super().on_stopped()
        if (runtime := find()) is not None and runtime.systemd is not None:
            runtime.systemd.ended()

    def setup_includes(self, includes: Any) -> None:
        """Load the modules of `--include`. Raises GPUFlowError for one that is not there."""
        try:
            super().setup_includes(includes)
        except ModuleNotFoundError as error:
            if not any(f"{name}.".startswith(f"{error.name}.") for name in includes):
                raise  # one of those needs it: the traceback says which
            raise GPUFlowError(
                f"--include {','.join(includes)}: {error}; install it where the worker runs, or put it into the folder "
                "that it is started in"
            ) from None

    def setup_queues(self, include: Any, exclude: Any = None) -> None:
        """Remember `-Q` before Celery turns it into queues."""
        names = include.split(",") if isinstance(include, str) else include
        if names:
            self.asked_queues = tuple(name.strip() for name in names if name.strip())
        super().setup_queues(include, exclude)
