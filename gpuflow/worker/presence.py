"""Keeps a worker's entry in the registry fresh, on a thread of its own that no task can starve.

What the worker holds is written before a task can be seen to run (`note_held`), so that nobody is told that a worker is
free which is full: a few fields, once for each attempt. The whole entry is written once a second at most.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import psutil
from redis.exceptions import RedisError

from gpuflow.build import full_version
from gpuflow.fleet import versions
from gpuflow.fleet.desired import DesiredState
from gpuflow.fleet.disk import free_mib
from gpuflow.fleet.gpu_reservation import Reservation, boot_seconds
from gpuflow.fleet.hardware import live
from gpuflow.fleet.hardware_host import read as read_host
from gpuflow.fleet.registry import Fleet, WorkerEntry, WorkerState
from gpuflow.logs import get_logger
from gpuflow.policy.code import allowed_kinds
from gpuflow.routing.families import CONTROL_QUEUE, NOTICE_QUEUES
from gpuflow.worker.gpu_watch import WATCH_SECONDS, GpuWatch
from gpuflow.worker.preflight import own_process
from gpuflow.worker.runtime import Runtime

log = get_logger("gpuflow.presence")

#: A broker that is away or full is tried again after this many seconds.
RETRY_SECONDS: Final = 1.0
#: What it runs is told at most once in so many seconds: a worker of short tasks would write its entry all the time.
REST_SECONDS: Final = 1.0
#: So long an attempt waits for another write to end, before it begins without having said what is held, in seconds.
NOTE_WAIT_SECONDS: Final = 5.0
#: The free disk is looked at so often, in seconds: a full one must not draw tasks in.
DISK_SECONDS: Final = 1.0
#: Between these states a worker goes with each task.
_PASSING: Final = (WorkerState.IDLE, WorkerState.BUSY)
#: What of its load changes with each task.
_HELD: Final = ("jobs", "freeJobs", "usage", "sessions", "kept")
#: So many of the demand queues that a worker serves are named in its entry at most.
MOST_QUEUES: Final = 200


class PresenceThread(threading.Thread):
    """Writes the entry at once, then every heartbeat interval, and whenever what it tells changes."""

    def __init__(self, runtime: Runtime, node: str) -> None:
        super().__init__(name="gpuflow-presence", daemon=True)
        self.runtime = runtime
        self.fleet = Fleet(runtime.app.redis, runtime.app.keys)
        self.node = node
        self._started_at = time.time()
        self._stop_event = threading.Event()
        self._written: tuple[Any, ...] | None = None
        self._written_at = 0.0
        self._writing = threading.Lock()
        self._write_began_at = 0.0
        self._held: dict[str, Any] = {}
        #: What the server knows of what is held; None: nobody is sure.
        self._known: dict[str, Any] | None = None
        self._change: object = None
        #: Something changed while the entry was made: it may tell of what came and went since, and is written again.
        self._outdated = False
        self._worked_at = time.monotonic()
        #: When its loop last began a turn (monotonic seconds).
        self.turned_at = time.monotonic()
        self._is_notified = threading.Event()

    def run(self) -> None:
        """Beat until stopped; a broker that is away is tried again at the next turn."""
        settings = self.runtime.app.settings
        next_beat = try_again = next_watch = next_disk = 0.0
        next_look = time.monotonic() + settings.heartbeat_interval_seconds
        watch = GpuWatch(self.runtime)
        if self.runtime.admission.capability.lacks_disk:
            self._tell_of_disk(lacks=True)
        while not self._stop_event.wait(0.25):
            self.turned_at = time.monotonic()
            if time.monotonic() >= next_watch:
                watch.look_quietly()
                next_watch = time.monotonic() + WATCH_SECONDS
            now = time.monotonic()
            if not self.runtime.admission.idle():
                self._worked_at = now
            if not self.runtime.admission.enabled:
                self.runtime.stop_replicas()
                self.runtime.admission.unload_idle("the worker is disabled")
            if now >= next_look:
                self.runtime.supported_runtimes.look()
                next_look = time.monotonic() + settings.heartbeat_interval_seconds
            if now >= next_disk:
                next_disk = now + DISK_SECONDS
                if self._disk_has_passed_the_floor():
                    next_beat = 0.0
            if now < try_again or (now < next_beat and not self._is_due(now) and not self._is_notified.is_set()):
                continue
            try:
                if self._is_notified.is_set():
                    self._is_notified.clear()
                    self.follow_orders()
                self._renew_class()
                self.write()
                self.follow_orders()
                self._leave_a_newer_fleet()
                self._tell_models()
                next_beat = time.monotonic() + settings.heartbeat_interval_seconds
            except RedisError as error:
                log.warning("heartbeat_not_written", cause=str(error))
                try_again = time.monotonic() + RETRY_SECONDS

    def write(self) -> None:
        """Write the entry now. Raises redis errors."""
        loads = self._gpu_loads()  # by the driver, which may hang: nobody waits for that
        with self._writing:
            self._write_began_at = time.monotonic()
            change = self.runtime.machine_gpus.change
            self.runtime.machine_gpus.looked_at()
            summary, entry = self._summary(), self._entry(loads)
            self._outdated = self._summary() != summary
            self._known = None
            self.fleet.announce(entry)
            self._written, self._written_at = summary, time.monotonic()
            self._held, self._change = {}, change
            self._known = {name: entry.load[name] for name in _HELD}

    def note_held(self) -> None:
        """Write what the worker holds now, unless the server knows it, as by a write that began since this was called.

        Called before each attempt, when its message holds what it needs. No attempt depends on it: errors, and a write
        that takes longer than NOTE_WAIT_SECONDS, leave it to the next heartbeat.
        """
        asked_at = self._worked_at = time.monotonic()
        if not self._writing.acquire(timeout=NOTE_WAIT_SECONDS):
            log.debug("held_not_written", cause="another write goes on")
            return
        try:
            if self._write_began_at <= asked_at:
                self._write_held()
        except RedisError as error:
            log.debug("held_not_written", cause=str(error))
        except Exception:
            log.exception("held_not_written")
        finally:
            self._writing.release()

    def _write_held(self) -> None:
        self._write_began_at = time.monotonic()
        change = self.runtime.machine_gpus.change
        held, is_changed = self._held_load(), self.runtime.hardware.gpus and change is not self._change
        if held == self._known and not is_changed:
            return
        self._held |= held
        if is_changed:
            self._held |= self._held_gpus()
        self._known = None
        self.fleet.note_load(self.runtime.worker_id, self._started_at, self._held)
        self._known, self._change = held, change

    def _entry(self, loads: Mapping[str, Any]) -> WorkerEntry:
        runtime = self.runtime
        return WorkerEntry(
            id=runtime.worker_id,
            state=self._state(),
            hostname=runtime.hardware.hostname,
            node=self.node,
            pid=os.getpid(),
            process=own_process(),
            enabled=runtime.admission.enabled,
            ephemeral=runtime.ephemeral,
            capability=runtime.admission.capability.to_dict(),
            queues=self._queues(),
            class_name=runtime.admission.matcher.name,
            tasks=tuple(sorted(runtime.running)),
            load=self._load(loads),
            bandwidth_bytes_per_second=runtime.app.settings.worker_network_bandwidth_bytes_per_second,
            started_at=self._started_at,
            heartbeat_at=time.time(),
            interval_seconds=runtime.app.settings.heartbeat_interval_seconds,
            timeout_seconds=runtime.app.settings.heartbeat_timeout_seconds,
            version=full_version(),
        )

    def _is_due(self, now: float) -> bool:
        """Whether something has changed that is to be told now."""
        summary, before = self._summary(), self._written
        if before is None:
            return True
        if summary == before and not (self._held or self._outdated):
            return False
        passing = summary[0] in _PASSING and before[0] in _PASSING
        return not passing or now >= self._written_at + REST_SECONDS

    def _disk_has_passed_the_floor(self) -> bool:
        before = self.runtime.admission.capability
        now = replace(before, disk_free_mib=free_mib(self.runtime.app.settings.results_dir))
        if now.lacks_disk is before.lacks_disk:
            return False
        self._tell_of_disk(lacks=now.lacks_disk)
        return True

    def _tell_of_disk(self, *, lacks: bool) -> None:
        settings = self.runtime.app.settings
        place = {"folder": str(settings.results_dir), "floor_bytes": int(settings.disk_floor_bytes)}
        if lacks:
            log.error("disk_below_the_floor", **place)
        else:
            log.info("disk_above_the_floor", **place)

    def _renew_class(self) -> None:
        """Say again of which class this worker is: with the disk as it is now, and on a server that lost its memory."""
        matcher = self.runtime.admission.matcher
        matcher.has_free_disk(free_mib(self.runtime.app.settings.results_dir))
        matcher.enlist()

    def _leave_a_newer_fleet(self) -> None:
        """Drain when the fleet has moved on to a version that this one cannot work beside. Raises redis errors."""
        why = versions.too_old(self.fleet)
        if why and self.runtime.stopper is not None and not self.runtime.admission.draining:
            log.error("too_old_for_the_fleet", worker=self.runtime.worker_id, cause=why)
            self.runtime.stopper.drain(why)

    def _tell_models(self) -> None:
        """Say which models this worker has, until the next beat; one that takes nothing has none for others."""
        if self.runtime.admission.draining or not self.runtime.admission.enabled:
            self._leave_models()
            return
        pipe = self.runtime.app.redis.pipeline(transaction=False)
        term = self.runtime.app.settings.heartbeat_timeout_seconds
        for name in self.runtime.admission.models.names():
            pipe.set(self.runtime.app.keys.warm(name), self.runtime.worker_id, px=int(term * 1000))
        pipe.execute()

    def _leave_models(self) -> None:
        """Take back what was said of models, unless another worker has said it since."""
        client: Any = self.runtime.app.redis
        keys = [self.runtime.app.keys.warm(name) for name in self.runtime.admission.models.names()]
        ours = [key for key in keys if client.get(key) == self.runtime.worker_id]
        if ours:
            client.delete(*ours)

    def notify(self) -> None:
        """Follow at once what stands in Redis; it is followed at each heartbeat anyway."""
        self._is_notified.set()

    def follow_orders(self) -> None:
        """Become what this worker is to be: enabled, disabled, or draining. Raises redis errors."""
        admission = self.runtime.admission
        order, seconds_left = self.fleet.order(self.runtime.worker_id)
        if order.ends:
            if self.runtime.stopper is not None and not admission.draining:
                self.runtime.stopper.drain(order.text() or "asked for", seconds_left)
            return
        enabled = order.state is not DesiredState.DISABLED
        if enabled is admission.enabled:
            return
        admission.enabled = enabled
        log.info("enabled" if enabled else "disabled", worker=self.runtime.worker_id, why=order.text())
        if enabled:
            self.runtime.leases.wake()

    def stop(self) -> None:
        """Stop beating and say that the worker has gone."""
        self._stop_event.set()
        if self.is_alive():
            self.join(timeout=2)
        try:
            self._leave_models()
            self.fleet.leave(self.runtime.worker_id)
        except RedisError as error:
            log.warning("leave_not_written", cause=str(error))

    def _state(self) -> WorkerState:
        if self.runtime.admission.draining:
            return WorkerState.DRAINING
        if not self.runtime.connected:
            return WorkerState.CONNECTING
        return WorkerState.BUSY if self.runtime.admission.jobs() else WorkerState.IDLE

    def _summary(self) -> tuple[Any, ...]:
        """Return what is told at once when it changes; the queues that were seen are told with the next beat."""
        admission = self.runtime.admission
        running = tuple(sorted(self.runtime.running))
        gpus = self.runtime.machine_gpus.last_seen()
        models, problems = admission.models.names(), self._gpu_problems()
        return (self._state(), admission.matcher.name, models, running, gpus, problems, admission.enabled)

    def _gpu_problems(self) -> tuple[str, ...]:
        """Return what is wrong with the GPUs: since the start, and now."""
        now = self.runtime.machine_gpus.problem
        return (*self.runtime.hardware.problems, *([now] if now else []))

    def _queues(self) -> tuple[str, ...]:
        """Return the queues served by name, and the demand queues that were seen and are served."""
        runtime = self.runtime
        asked = runtime.asked_queues or (runtime.app.settings.task_topic,)
        demanded = runtime.admission.matcher.names()[:MOST_QUEUES]
        return tuple(sorted({CONTROL_QUEUE, *NOTICE_QUEUES, *asked, *demanded}))

    def _load(self, loads: Mapping[str, Any]) -> dict[str, Any]:
        hardware, admission = self.runtime.hardware, self.runtime.admission
        families = admission.matcher.families
        load: dict[str, Any] = {
            "cpuPercent": psutil.cpu_percent(),
            "memoryAvailableMib": read_host().memory_available_mib,
            "diskFreeMib": free_mib(self.runtime.app.settings.results_dir),
            "driverProblem": hardware.driver_problem,
            "gpuProblems": self._gpu_problems(),
            **self._held_load(),
            "freeGpus": [],
            "idleSeconds": None if not admission.idle() else round(time.monotonic() - self._worked_at, 1),
            "maxJobs": admission.limits.max_jobs,
            "costPerHour": admission.matcher.cost,
            "families": None if families is None else list(families),
            "executors": None if self.runtime.executors is None else list(self.runtime.executors),
            "userTypes": list(self.runtime.user_types),
            "offers": self.runtime.supported_runtimes.to_dict(),
            "protocol": versions.told(),
            "limits": self.runtime.limits.to_dict(),
            "allowsCode": sorted(allowed_kinds(self.runtime.app.settings.allow_code)),
            "secrets": list(self.runtime.supported_runtimes.secrets),
            "signing": self.runtime.app.signer.public() if self.runtime.app.signer is not None else {},
        }
        if hardware.gpus:
            load |= self._gpu_load()
            load["gpus"] = loads
        return load

    def _gpu_loads(self) -> dict[str, Any]:
        gpus = self.runtime.hardware.gpus
        return {
            gpu.uuid: {"freeMib": gpu.free_mib, "utilizationPercent": gpu.utilization_percent}
            for gpu in (live([gpu.uuid for gpu in gpus]).loads if gpus else ())
        }

    def _held_load(self) -> dict[str, Any]:
        admission = self.runtime.admission
        return {
            "jobs": admission.jobs(),
            "freeJobs": admission.free_jobs(),
            "usage": admission.usage().to_dict(),
            "sessions": admission.sessions.to_dict() if admission.sessions is not None else [],
            "kept": admission.sessions.kept() if admission.sessions is not None else {},
        }

    def _held_gpus(self) -> dict[str, Any]:
        gpus = self.runtime.machine_gpus
        seen_at, free = gpus.looked_at(), gpus.snapshot(self.runtime.admission.capability)
        return {"gpusSeenAt": seen_at, "freeGpus": sorted(free.whole), "roomMib": dict(free.room_mib)}

    def _gpu_load(self) -> dict[str, Any]:
        gpus = self.runtime.machine_gpus
        reserved = gpus.reservation()
        return {
            "foreignMib": gpus.held_back(),
            **self._held_gpus(),
            "reservation": None if reserved is None else _told(reserved),
            "locks": gpus.identity(),
        }


def _told(reserved: Reservation) -> dict[str, Any]:
    left = None if reserved.deadline is None else max(0.0, reserved.deadline - boot_seconds())
    return {"task": reserved.task, "queue": reserved.queue, "gpus": list(reserved.gpus), "secondsLeft": left}
