"""What beat does itself, beside its schedule: sweep every second, reconcile under a lock every few, keep models served,
seal and trim the audit log, scale where it leads. Needs no worker.

Started by the app when a beat process of this app starts (`gpuflow.celery_app`).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from kombu.exceptions import OperationalError
from redis.exceptions import LockError, RedisError

from gpuflow.audit.actors import acts_as_process
from gpuflow.audit.sealing import SEAL_SECONDS, Sealer, audit_key, unsealed
from gpuflow.broker.sweeper import Sweeper
from gpuflow.celery_app import GPUFlow
from gpuflow.errors import GPUFlowError
from gpuflow.importing import load_checker
from gpuflow.logs import dress, get_logger, use_level
from gpuflow.outages import outage
from gpuflow.scaling import autoscaler
from gpuflow.serving.replicas import Replicas
from gpuflow.tokens.broker_users import BrokerRefuses
from gpuflow.tokens.store import TokenStore
from gpuflow.tokens.workers import WorkerTokens
from gpuflow.upkeep.reconciler import Reconciler

log = get_logger("gpuflow.duties")

SWEEP_SECONDS: Final = 1.0
RECONCILE_SECONDS: Final = 10.0
#: A reconciler that holds the lock longer is taken for dead, in seconds.
LOCK_SECONDS: Final = 120.0
#: Most segments of the audit log that one round seals: the other duties wait for it.
SEGMENTS_A_ROUND: Final = 50
#: More unsealed entries of the audit log than this are told as an error, and again whenever they have doubled.
MANY_UNSEALED: Final = 100_000


class Duties(threading.Thread):
    """Sweeps and reconciles until the process ends."""

    def __init__(self, app: GPUFlow) -> None:
        super().__init__(name="gpuflow-duties", daemon=True)
        self._app = app
        self._sweeper = Sweeper(app.keys, app.settings.lease_seconds)
        self._reconciler = Reconciler(app)
        self._sealing = Sealing(app)
        self._replicas = Replicas(app)
        self._stop_event = threading.Event()

    def stop(self) -> None:
        """End after the current round."""
        self._stop_event.set()

    def run(self) -> None:
        """Do the rounds; what fails is tried again at the next one, and stops no other duty."""
        every = min(RECONCILE_SECONDS, self._app.settings.lease_seconds)
        rounds = max(1, round(every / SWEEP_SECONDS))
        count = 0
        while not self._stop_event.wait(SWEEP_SECONDS):
            count += 1
            _attempt(self.sweep)
            if count % rounds == 0:
                _attempt(self.reconcile)
                _attempt(self.serve)
                _attempt(self.seal)

    def sweep(self) -> None:
        """Sweep once. Raises redis errors."""
        began = time.monotonic()
        self._sweeper.sweep(self._app.redis)
        outage.over(began)

    def seal(self) -> None:
        """Seal and trim the audit log. Raises redis errors."""
        self._sealing.round()

    def serve(self) -> None:
        """Submit and cancel replicas of served models. Raises redis errors."""
        self._replicas.reconcile()

    def reconcile(self) -> None:
        """Reconcile, unless another process does. Raises redis errors."""
        lock = self._app.redis.lock(f"{self._app.keys.prefix}gpuflow.reconcile", timeout=LOCK_SECONDS, blocking=False)
        if not lock.acquire():
            return
        try:
            self._reconciler.run()
            self._restore_users()
        finally:
            try:
                lock.release()
            except LockError:
                log.warning("reconcile_lock_expired")

    def _restore_users(self) -> None:
        """Make the users of workers again that a restart of the server has lost. Raises redis errors."""
        app = self._app
        store = TokenStore(app.redis, app.keys)
        tokens = WorkerTokens(app.redis, store, address=app.broker_address(), queues=[app.settings.task_topic])
        try:
            for name in tokens.restore():
                log.warning("worker_login_restored", worker=name)
        except BrokerRefuses:
            log.debug("worker_logins_not_seen", cause="this user may not list the users of the broker")


class Sealing:
    """Seals and trims the audit log of an app, one round at a time.

    While its key cannot be read the log goes on unsealed: each round tries the key again, and entries are never trimmed
    unsealed, so what waits is counted and told.
    """

    def __init__(self, app: GPUFlow) -> None:
        self._app = app
        self._sealer: Sealer | None = None
        self._told = ""
        self._many = MANY_UNSEALED

    def round(self) -> None:
        """Seal a bounded number of segments, trim, and tell where much is left unsealed. Raises redis errors."""
        settings = self._app.settings
        sealer = self._sealer = self._sealer or self._made()
        if sealer is not None:
            sealer.seal(least_seconds=SEAL_SECONDS, most_segments=SEGMENTS_A_ROUND)
            sealer.trim(settings.audit_retention_days * 86_400, settings.audit_max_entries)
        self._tell_many(unsealed(self._app.redis, self._app.keys))

    def _made(self) -> Sealer | None:
        """Return the sealer; None where its key cannot be read, told once for each cause."""
        try:
            return Sealer(self._app.redis, self._app.keys, audit_key(self._app.settings))
        except GPUFlowError as error:
            if str(error) != self._told:
                self._told = str(error)
                log.error("audit_not_sealed", cause=self._told)
            return None

    def _tell_many(self, count: int) -> None:
        if count <= MANY_UNSEALED:
            self._many = MANY_UNSEALED
        elif count > self._many:
            self._many = 2 * count
            log.error("audit_many_unsealed", entries=count)


def _attempt(duty: Callable[[], None]) -> None:
    """Do one duty; what it raises is logged."""
    try:
        duty()
    except (RedisError, OperationalError) as error:
        log.warning("duties_not_done", cause=str(error))
    except Exception:
        log.exception("duties_stumbled")


def start(app: GPUFlow) -> None:
    """Start the duties of a beat process, and its autoscaler."""
    acts_as_process(f"beat:{socket.gethostname()}")
    use_level(app.settings.log_level)
    dress(app.settings.log_format, None, "celery")
    load_checker()
    Duties(app).start()
    autoscaler.start(app)
