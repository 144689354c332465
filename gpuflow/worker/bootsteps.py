"""The boot steps that make a Celery worker a gpuflow worker.

Machine (worker): options, hardware, admission, lease table. Presence (consumer): the registry entry. Subscriptions
(consumer): the control queue, and the class of workers by which this one waits for demand queues.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from celery import bootsteps
from celery.exceptions import WorkerShutdown
from celery.signals import task_postrun
from celery.worker.consumer.mingle import Mingle
from celery.worker.control import control_command
from celery.worker.state import maybe_shutdown
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

import gpuflow.worker.inspecting
import gpuflow.worker.revoking  # noqa: F401  (both register their commands)
from gpuflow.audit.entries import record
from gpuflow.broker import installed, lease_table
from gpuflow.broker.lease import new_token
from gpuflow.build import full_version
from gpuflow.celery_app import TASK_MODULES, GPUFlow
from gpuflow.errors import GPUFlowError, InvalidSettings
from gpuflow.fleet import versions
from gpuflow.fleet.disk import free_mib
from gpuflow.fleet.hardware import probe
from gpuflow.logs import get_logger
from gpuflow.routing.capability import Capability
from gpuflow.routing.families import CELERYS, CONTROL_QUEUE, NOTICE_QUEUES, TASK_OF_TYPE
from gpuflow.settings.model import MOST_COST
from gpuflow.spec.user_types import registered, usable
from gpuflow.surroundings import serve_threads
from gpuflow.worker.admission import Admission
from gpuflow.worker.consumer import fail_unreadable
from gpuflow.worker.event_batches import EventBatches
from gpuflow.worker.housekeeping import Housekeeping
from gpuflow.worker.machine_gpus import MachineGpus
from gpuflow.worker.main import CannotStart
from gpuflow.worker.merged_tasks import requeues_run
from gpuflow.worker.pool import publishes_again
from gpuflow.worker.preflight import require_durable, require_own_id
from gpuflow.worker.presence import PresenceThread
from gpuflow.worker.queue_matcher import QueueMatcher
from gpuflow.worker.reserving import Reserving
from gpuflow.worker.runtime import Runtime, current, find, install
from gpuflow.worker.sessions.neighbours import Neighbours
from gpuflow.worker.sessions.setup import make_sessions, yield_to
from gpuflow.worker.signed_work import SignedWork
from gpuflow.worker.slots import Limits
from gpuflow.worker.stopping import Stopper
from gpuflow.worker.supported_runtimes import SupportedRuntimes
from gpuflow.worker.systemd import SystemdNotifier, SystemdWatch
from gpuflow.worker.task_limits import limits_of
from gpuflow.worker.thread_context import of_this_thread
from gpuflow.worker.user_environments import environments_of

log = get_logger("gpuflow.worker")

#: CPUs that one job without GPUs is counted for, where it asks for none itself.
CPUS_PER_JOB = 4


def parse_labels(given: tuple[str, ...], tags: tuple[str, ...]) -> dict[str, str]:
    """Return the labels of `--label k=v` and WORKER_TAGS (labels without a value). Raises InvalidSettings."""
    labels = dict.fromkeys(tags, "")
    for text in given:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InvalidSettings(f"--label {text!r} is not of the form key=value")
        labels[key.strip()] = value.strip()
    return labels


def user_types(entries: tuple[str, ...]) -> tuple[str, ...]:
    """Return the task types of users' own executors that are registered here; `entries` is the setting `executors`.

    Raises InvalidSettings for a bad entry of it; a package that registers a bad name is told of in the log.
    """
    for one in registered(entries):
        if one.problem and one.source != "entry point":
            raise InvalidSettings(one.problem)
        if one.problem:
            log.warning("executor_not_usable", package=one.package, problem=one.problem)
    return tuple(sorted(usable(entries)))


def parse_executors(given: str | None, own: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """Return the task types of `--executors a,b`, None for all; `own` are those of users that are registered here.

    Raises InvalidSettings for an unknown one.
    """
    if given is None:
        return None
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    unknown = [name for name in names if name not in TASK_OF_TYPE and name not in own]
    if unknown or not names:
        raise InvalidSettings(
            f"--executors {given!r}: {unknown[0] if unknown else ''!r} is no task type; "
            f"give some of {', '.join((*TASK_OF_TYPE, *own))}"
        )
    return names


class Machine(bootsteps.StartStopStep):  # type: ignore[misc]
    """Finds out what this machine is, and installs the runtime of the process."""

    requires = ("celery.worker.components:Pool",)

    def __init__(
        self,
        worker: Any,
        label: tuple[str, ...] = (),
        ephemeral: bool = False,
        gpus: str | None = None,
        executors: str | None = None,
        max_jobs: int | None = None,
        cost: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(worker, **kwargs)
        app = worker.app
        shadowing_check(Path.cwd())
        cost = app.settings.cost_per_hour if cost is None else cost
        if not 0 <= cost <= MOST_COST:
            cause = "is below 0" if cost < 0 else f"is no amount up to {MOST_COST:.0f}"
            raise InvalidSettings(f"--cost {cost:g} {cause}; give what an hour of this machine costs")
        if max_jobs is not None and max_jobs < 0:
            raise InvalidSettings(f"--max-jobs {max_jobs} is below 0; give the most child processes at once")
        hardware = probe(only=gpus)
        for problem in hardware.problems:
            log.warning("hardware_problem", problem=problem)
        labels = parse_labels(label, app.settings.worker_tags)
        capability = Capability.of(
            hardware,
            labels,
            disk_free_mib=free_mib(app.settings.results_dir),
            disk_floor_mib=app.settings.disk_floor_bytes >> 20,
        )
        limits = Limits(
            threads=worker.concurrency,
            max_jobs=max_jobs,
            cpu_jobs=max(1, hardware.cpu_count // CPUS_PER_JOB),
            one_job_only=ephemeral,
        )
        table = lease_table.LeaseTable(
            app.keys,
            app.settings.lease_seconds,
            owner=f"{worker.worker_id}:{new_token()}",
            member=worker.worker_id,
        )
        table.sweeper.on_lost = partial(_end_unwanted, app)
        machine_gpus = MachineGpus(capability.gpus, app.settings.lock_dir)
        own_types = user_types(app.settings.executors)
        types = parse_executors(executors, own_types)
        named = dict.fromkeys(TASK_OF_TYPE) | environments_of(app.settings, own_types)
        taken = {name: named[name] for name in types} if types is not None else named
        sessions = make_sessions(app.settings, table, machine_gpus, worker.worker_id) if not ephemeral else None
        supported_runtimes = SupportedRuntimes(
            app.settings,
            taken,
            gpus=bool(capability.gpus),
            sessions=sessions is not None,
            functions={
                name: getattr(task, "loading_places", 0)
                for name, task in app.tasks.items()
                if not name.startswith(CELERYS) and task.__module__ not in TASK_MODULES
            },
        )
        neighbours = Neighbours(app.redis, app.keys, machine_gpus.group(), worker.worker_id)
        table.gate = admission = Admission(
            QueueMatcher(app.redis, app.keys, capability, families=worker.asked_queues, cost=cost),
            limits,
            machine_gpus,
            Reserving(machine_gpus, app.redis, app.keys, worker.worker_id),
            supported_runtimes=supported_runtimes,
            patience_seconds=app.settings.model_patience_seconds,
            sessions=sessions,
            neighbours=neighbours,
        )
        if admission.sessions is not None:
            admission.sessions.keeper.on_idle = lambda: yield_to(neighbours, admission)
        table.reclaim = lambda free, new_run: app.ledger.reclaim(
            free, table.owner, table.lease_seconds, new_run=new_run
        )
        table.on_unreadable = lambda task_id, why: fail_unreadable(app, task_id, why)
        if app.signer is not None:
            table.checker = SignedWork(app, app.signer, worker.worker_id)
        installed.install(table)
        runtime = Runtime(
            app=app,
            worker_id=worker.worker_id,
            hardware=hardware,
            labels=labels,
            leases=table,
            admission=admission,
            ephemeral=ephemeral,
            asked_queues=worker.asked_queues,
            executors=types,
            user_types=own_types,
            supported_runtimes=supported_runtimes,
            machine_gpus=machine_gpus,
            limits=limits_of(app.settings),
        )
        runtime.stopper = Stopper(runtime, float(app.conf.worker_soft_shutdown_timeout or 0))
        install(runtime)
        app.publishes_again = publishes_again
        app.requeues_run = requeues_run
        serve_threads(of_this_thread)
        task_postrun.connect(_forget_attempt, weak=False)

    def start(self, worker: Any) -> None:
        """Say what was found."""
        runtime = current()
        names = ", ".join(gpu.name for gpu in runtime.hardware.gpus) or runtime.hardware.nvml or "no GPU"
        settings = runtime.app.settings
        notifier = SystemdNotifier.from_environment(os.environ)
        if notifier is not None:
            runtime.systemd = SystemdWatch(runtime, notifier)
            runtime.systemd.start()
        if runtime.stopper is not None:
            runtime.stopper.start()
            if settings.spot_notices == "aws":
                # Here, as few workers need the HTTP client, whose import is a twelfth of a start.
                from gpuflow.worker.spot_notices import SpotNotices

                SpotNotices(settings.spot_metadata_url, runtime.stopper.drain).start()
        log.info("machine", worker=runtime.worker_id, gpus=names, cpus=runtime.hardware.cpu_count)

    def terminate(self, worker: Any) -> None:
        """Stop every child at once (cold shutdown)."""
        current().stop_all("shutdown")

    def info(self, worker: Any) -> dict[str, Any]:
        """Show the machine in `inspect stats` and Flower."""
        runtime = find()
        if runtime is None:
            return {}
        return {
            "gpuflow": {
                "worker": runtime.worker_id,
                "labels": dict(runtime.labels),
                "gpus": [
                    {"uuid": gpu.uuid, "name": gpu.name, "totalMib": gpu.total_mib} for gpu in runtime.hardware.gpus
                ],
                "freeGpus": list(runtime.admission.free_gpus()),
                "bandwidthBytesPerSecond": runtime.app.settings.worker_network_bandwidth_bytes_per_second,
                "leases": len(runtime.leases.held()),
                "running": sorted(runtime.running),
                "sessions": runtime.admission.sessions.to_dict() if runtime.admission.sessions else [],
            }
        }


class Upkeep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Keeps results and model cache of this machine in bounds while the worker runs."""

    requires = (Machine,)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._thread: Housekeeping | None = None

    def start(self, worker: Any) -> None:
        """Start the thread."""
        self._thread = Housekeeping(current())
        self._thread.start()

    def stop(self, worker: Any) -> None:
        """Let the thread end; what it was removing is finished by the next worker."""
        if self._thread is not None:
            self._thread.stop()


@control_command(args=[("task_id", str)])  # type: ignore[untyped-decorator]
def gpuflow_cancel(state: Any, task_id: str) -> dict[str, Any]:
    """Stop the attempt of a task that runs here."""
    runtime = find()
    return {"ok": bool(runtime and runtime.stop(task_id, "cancelled"))}


@control_command(args=[("worker_id", str), ("deadline_seconds", float)])  # type: ignore[untyped-decorator]
def gpuflow_drain(state: Any, worker_id: str, deadline_seconds: float | None = None) -> dict[str, Any]:
    """Drain this worker, if it is the one that is named."""
    runtime = find()
    if runtime is None or runtime.stopper is None or runtime.worker_id != worker_id:
        return {"ok": False}
    runtime.stopper.drain("asked for", deadline_seconds)
    return {"ok": True}


@control_command(args=[("worker_ids", list)])  # type: ignore[untyped-decorator]
def gpuflow_follow(state: Any, worker_ids: list[str]) -> dict[str, Any]:
    """Look at once at what this worker is to be, if it is one of those that are named."""
    runtime = find()
    named = runtime is not None and runtime.presence is not None and runtime.worker_id in worker_ids
    if runtime is not None and runtime.presence is not None and named:
        runtime.presence.notify()
    return {"ok": named}


def _forget_attempt(task_id: str | None = None, **_: Any) -> None:
    runtime = find()
    if runtime is not None and task_id:
        runtime.app.attempts.end(task_id)


def shadowing_check(folder: Path) -> None:
    """Raise GPUFlowError when a `tasks` module in the current folder hides ours."""
    found = find_spec("tasks")
    place = Path((found.origin if found else None) or "tasks").resolve()
    if not (place.parent / "pipelines.py").exists():
        raise GPUFlowError(
            f"{place} hides gpuflow's own package `tasks`; rename it (or move it into a package), "
            f"then start the worker in {folder} again with --include its.new.name"
        )


class Presence(bootsteps.StartStopStep):  # type: ignore[misc]
    """The worker's entry in the registry; survives reconnects."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: Any) -> None:
        """Make sure of broker and id, then start the heartbeat thread; once."""
        runtime = current()
        if runtime.presence is not None:
            return
        settings = runtime.app.settings
        try:
            require_durable(runtime.app.redis, settings)
            former = require_own_id(
                runtime.fleet,
                runtime.worker_id,
                runtime.hardware.hostname,
                timeout_seconds=settings.heartbeat_timeout_seconds,
                lease_seconds=settings.lease_seconds,
                alive=_waits,
            )
            versions.join(runtime.fleet, runtime.worker_id)
        except GPUFlowError as error:
            log.error("cannot_start", worker=runtime.worker_id, cause=str(error))
            _note_refusal(runtime, str(error))
            raise WorkerShutdown(CannotStart.exit_code) from None
        runtime.leases.end_former_runs(runtime.app.redis, former)
        runtime.fleet.begin_anew(runtime.worker_id, runtime.hardware.hostname, full_version())
        runtime.presence = PresenceThread(runtime, consumer.hostname)
        runtime.presence.follow_orders()
        runtime.presence.start()
        _mingle_once(consumer)


def _waits() -> None:
    """Say that the consumer loop is alive, and end it where the worker is to end."""
    current().leases.tick()
    maybe_shutdown()


def _end_unwanted(app: GPUFlow, task_ids: list[str]) -> None:
    """End what was lost and is not wanted, on a thread of its own: the keeper of the leases waits for nothing."""

    def do() -> None:
        try:
            app.end_unwanted(task_ids)
        except (RedisError, OperationalError) as error:
            log.warning("end_not_told_yet", tasks=task_ids[:20], cause=str(error))

    threading.Thread(target=do, name="gpuflow-unwanted", daemon=True).start()


def _note_refusal(runtime: Runtime, why: str) -> None:
    """Have the audit log say that this worker was not let in; it ends in any case."""
    details = {"host": runtime.hardware.hostname, "reason": why}
    try:
        record(runtime.app.redis, runtime.app.keys, "worker.refused", f"worker:{runtime.worker_id}", details)
    except RedisError as error:
        log.warning("refusal_not_noted", cause=str(error))


def _mingle_once(consumer: Any) -> None:
    """Leave out Celery's mingle from now on: at a reconnect it would cost a second and tell nothing new."""
    for step in consumer.steps:
        if isinstance(step, Mingle):
            step.start = lambda _: None


class Subscriptions(bootsteps.StartStopStep):  # type: ignore[misc]
    """Consumes the control queue, and says which class of workers this one is.

    Demand queues are not consumed by name: their messages come as the ready index and the admission say.
    """

    requires = (Presence,)

    def start(self, consumer: Any) -> None:
        """Begin to take."""
        runtime = current()
        EventBatches(consumer).install()
        runtime.admission.matcher.enlist()
        consumer.add_task_queue(CONTROL_QUEUE)
        for queue in NOTICE_QUEUES:
            consumer.add_task_queue(queue)
        runtime.connected = True

    def stop(self, consumer: Any) -> None:
        """Send the events that wait (before a reconnect, and at the end)."""
        current().connected = False
        consumer._flush_events()
