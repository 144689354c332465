"""The autoscaler: a thread of each beat, of which the one that leads acts.

A round sees the fleet, brings launched machines on their way, decides, and writes what is decided. What is to be done
outside Redis stands in Redis before, so a beat may die between any two lines: the next leader continues from there. A
beat that was paused meanwhile changes nothing, since each write names its epoch; what it may still launch is launched
by its id, and exists once.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from gpuflow.celery_app import GPUFlow
from gpuflow.errors import BrokerUnavailable, GPUFlowError
from gpuflow.fleet.desired import AUTOMATIC, DesiredState
from gpuflow.fleet.disk import free_mib
from gpuflow.fleet.hardware import probe
from gpuflow.fleet.identity import fleet_tag
from gpuflow.fleet.registry import Fleet
from gpuflow.logs import get_logger
from gpuflow.repeating import repeating
from gpuflow.routing.capability import Capability
from gpuflow.scaling import snapshot as snapshots
from gpuflow.scaling.decide import decide
from gpuflow.scaling.model import Action, Kind
from gpuflow.scaling.policy_file import Launching, LoadedPolicy, load_policy
from gpuflow.scaling.provisioners import Provisioner, ProvisionerError, UnknownMachine, Wanted, provisioner_of
from gpuflow.scaling.store import Leadership, Machine, NoLeader, ScalingStore, decision_text
from gpuflow.settings import Settings

log = get_logger("gpuflow.scaling")

#: After so many seconds without a sign of life another beat may lead; with a short poll interval sooner.
LONGEST_TERM_SECONDS: Final = 15.0
SHORTEST_TERM_SECONDS: Final = 2.0
#: Machines of other fleets are looked for so often, in seconds.
UNKNOWN_LOOK_SECONDS: Final = 60.0
#: The same failure is logged so often, in seconds.
SAID_AGAIN_SECONDS: Final = 3600.0
_DESIRED: Final = {
    Kind.ENABLE: DesiredState.ENABLED,
    Kind.DISABLE: DesiredState.DISABLED,
    Kind.DRAIN: DesiredState.DRAINING,
    Kind.RETIRE: DesiredState.RETIRED,
}


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A provisioner, with what it says is there; None: it cannot say now."""

    provisioner: Provisioner
    there: Mapping[str, str] | None


class Autoscaler(threading.Thread):
    """Scales a fleet while this beat leads."""

    def __init__(
        self,
        app: GPUFlow,
        loaded: LoadedPolicy,
        make: Callable[[Launching, str], Provisioner],
        *,
        name: str = "",
    ) -> None:
        super().__init__(name="gpuflow-autoscaler", daemon=True)
        self._app = app
        self._loaded = loaded
        self._policy = loaded.policy
        self._make = make
        self._families = {family.name: family for family in loaded.policy.families}
        self._launching = {one.family: one for one in loaded.launching}
        self._tag = ""
        self._provisioners: dict[str, Provisioner] = {}
        self._looks_at = 0.0
        self._said: dict[str, float] = {}
        self._poll_seconds = app.settings.elastic_auto_poll_interval_seconds
        term = min(LONGEST_TERM_SECONDS, max(SHORTEST_TERM_SECONDS, 3 * self._poll_seconds))
        self._step_seconds = term / 5
        self._leader = Leadership(app.redis, app.keys, term, name)
        self._fleet = Fleet(app.redis, app.keys)
        self._store = ScalingStore(app.redis, app.keys)
        self._stop_event = threading.Event()

    def stop(self) -> None:
        """End after the current round."""
        self._stop_event.set()

    def run(self) -> None:
        """Lead where nobody else does, and make a round at each poll interval; a broker that is away is tried again."""
        next_round = 0.0
        while not self._stop_event.wait(min(self._step_seconds, self._poll_seconds)):
            try:
                if self._leader.lead() and time.monotonic() >= next_round:
                    next_round = time.monotonic() + self._poll_seconds
                    self.round()
            except NoLeader:
                log.warning("scaling_round_ended", cause="another beat leads by now, or this one was paused")
            except (RedisError, OperationalError, BrokerUnavailable) as error:
                log.warning("scaling_not_done", cause=str(error))
            except GPUFlowError as error:
                self._say("scaling_failed", error)
            except Exception:
                log.exception("scaling_stumbled")

    def round(self) -> tuple[Action, ...]:
        """Make one round; return what was decided. Raises NoLeader and redis errors."""
        try:
            self._follow_fleet()
        except ProvisionerError as error:  # workers are enabled and disabled all the same
            self._say("scaling_failed", error)
            has_machines = False
        else:
            has_machines = True
            self._tend({family: self._source(provisioner) for family, provisioner in self._provisioners.items()})
        self._leader.go_on()
        seen = snapshots.read(self._app.redis, self._app.keys, self._app.settings.task_topic)
        decided = decide(seen.snapshot, self._policy)
        actions = tuple(action for action in decided if has_machines or action.kind is not Kind.LAUNCH)
        changed = []
        for action in actions:
            self._leader.go_on()
            if action.kind is Kind.LAUNCH:
                self._launch(action, seen.now)
            elif self._write(action):
                changed.append(action.worker)
        if changed:
            self._app.control.broadcast("gpuflow_follow", arguments={"worker_ids": changed})
        return actions

    def _follow_fleet(self) -> None:
        """Find out which fleet this is: a broker that was flushed is another one. Note the machines of others.

        Raises ProvisionerError where a provisioner cannot be made: then none may be used.
        """
        tag = fleet_tag(self._leader.look(), self._app.keys)
        if tag != self._tag:
            # The tag is set last: where a provisioner cannot be made, the next round tries again.
            self._provisioners = _provisioners(self._loaded, self._make, tag)
            if self._tag:
                log.warning("fleet_renewed", before=self._tag, now=tag, cause="the broker has lost its fleet id")
            self._tag, self._looks_at = tag, 0.0
        if time.monotonic() < self._looks_at:
            return
        self._looks_at = time.monotonic() + UNKNOWN_LOOK_SECONDS
        found: list[UnknownMachine] = []
        for provisioner in {id(one): one for one in self._provisioners.values()}.values():
            try:
                with self._leading():
                    found += provisioner.unknown()
            except ProvisionerError as error:
                self._say("machines_not_listed", error)
        self._store.note_unknown(found)

    # -- workers -----------------------------------------------------------------------------------------------------

    def _write(self, action: Action) -> bool:
        """Write what a worker is to be; say whether that is new."""
        fields = {"action": str(action.kind), "worker": action.worker, "reason": action.reason}
        answer = self._fleet.desire(
            action.worker,
            _DESIRED[action.kind],
            by=AUTOMATIC,
            reason=action.reason,
            leader=(self._leader.name, self._leader.epoch),
            decision=decision_text(self._leader, **fields),
        )
        if answer == "fenced":
            raise NoLeader
        if answer == "written":
            self._store.count(str(action.kind))
            log.info("scaled", **fields)
        return answer == "written"

    # -- machines ----------------------------------------------------------------------------------------------------

    def _leading(self) -> AbstractContextManager[None]:
        """Go on to lead while a provisioner is asked, which may take longer than a term; in the same epoch alone."""

        def go_on() -> bool:
            try:
                self._leader.go_on()
            except NoLeader:
                self._leader.epoch = 0
                return False
            except RedisError as error:
                log.warning("scaling_not_done", cause=str(error))
            return True

        return repeating(go_on, self._step_seconds, "gpuflow-leading")

    def _source(self, provisioner: Provisioner) -> _Source:
        try:
            with self._leading():
                return _Source(provisioner=provisioner, there=provisioner.machines())
        except ProvisionerError as error:
            self._say("machines_not_listed", error)
            return _Source(provisioner=provisioner, there=None)

    def _say(self, event: str, error: GPUFlowError) -> None:
        """Log why something cannot be done: each cause once in a while, not at every round."""
        now, what = time.monotonic(), f"{event}: {error}"
        if self._said.get(what, 0.0) <= now:
            self._said = {one: until for one, until in self._said.items() if until > now}
            self._said[what] = now + SAID_AGAIN_SECONDS
            log.warning(event, cause=str(error))

    def _launch(self, action: Action, now: float) -> None:
        family = self._families[action.family]
        machine = Machine(
            id=f"{family.name}-{secrets.token_hex(6)}",
            family=family.name,
            wanted_at=now,
            spot=action.spot,
            cost_per_hour=family.cost(spot=action.spot),
            epoch=self._leader.epoch,
        )
        fields = {"action": "launch", "family": family.name, "machine": machine.id, "reason": action.reason}
        self._store.step("begin", machine, self._leader, decision=fields, add={"launched": 1})
        log.info("scaled", **fields)
        self._start(machine, now)

    def _start(self, machine: Machine, now: float) -> None:
        """Have a machine launched that stands in Redis; what fails is ended, and its family waits."""
        self._leader.go_on()
        options = self._launching[machine.family].worker_options
        wanted = Wanted(id=machine.id, family=machine.family, spot=machine.spot, worker_options=options)
        try:
            with self._leading():
                self._provisioners[machine.family].launch(wanted)
        except ProvisionerError as error:
            self._leader.go_on()
            self._fail(machine, now, "launch_failures", f"the launch failed: {error}")

    def _fail(self, machine: Machine, now: float, counter: str, why: str) -> None:
        wait = self._store.note_failure(machine.family, now)
        log.warning("machine_failed", machine=machine.id, cause=why, retry_seconds=wait)
        self._end(machine, now, f"{why}; the next launch of {machine.family} waits {wait:.0f} s", counter)

    def _tend(self, sources: Mapping[str, _Source]) -> None:
        """Bring every machine on its way: launch what was to be, end what has drained, never came, or is unknown."""
        seen = snapshots.read(self._app.redis, self._app.keys, self._app.settings.task_topic)
        if seen.snapshot.gathering:
            return
        for machine in seen.machines.values():
            self._leader.go_on()
            self._tend_one(machine, seen, sources.get(machine.family))
        for source in {id(source.provisioner): source for source in sources.values()}.values():
            for machine_id, family in (source.there or {}).items():
                if machine_id not in seen.machines:
                    self._adopt(machine_id, family, seen, source.provisioner)

    def _tend_one(self, machine: Machine, seen: snapshots.Seen, source: _Source | None) -> None:
        worker = seen.workers.get(machine.id)
        age = seen.now - machine.wanted_at
        if machine.state == "ending":
            # A worker that came after all drains first: it was told to end before it took anything.
            if worker is None and not seen.held.get(machine.id):
                self._terminate(machine, seen.now)
        elif worker is not None:
            if machine.state == "launching":
                self._store.step("note", replace(machine, state="running"), self._leader)
                self._store.note_success(machine.family)
        elif machine.state == "running":
            if not seen.held.get(machine.id):
                self._end(machine, seen.now, "its worker has stopped and holds nothing")
        elif age > self._deadline(machine.family):
            self._fail(machine, seen.now, "never_registered", f"its worker did not register within {age:.0f} s")
        elif source is not None and source.there is not None and machine.id not in source.there:
            if machine.epoch == self._leader.epoch:
                if age > source.provisioner.listed_within_seconds:
                    self._fail(machine, seen.now, "launch_failures", "it has ended before its worker registered")
            else:  # the beat that was to launch it may have died before it did
                moved = replace(machine, epoch=self._leader.epoch)
                self._store.step("note", moved, self._leader)
                self._start(moved, seen.now)

    def _deadline(self, family: str) -> float:
        found = self._launching.get(family)
        return found.deadline_seconds if found is not None else 0.0

    def _adopt(self, machine_id: str, family: str, seen: snapshots.Seen, provisioner: Provisioner) -> None:
        """Take in a machine that bears our tag and that Redis does not know; without a worker it is ended."""
        self._leader.go_on()
        lives = machine_id in seen.workers or seen.held.get(machine_id, 0) > 0
        known = self._families.get(family)
        machine = Machine(
            id=machine_id,
            family=family,
            state="running" if lives else "launching",
            wanted_at=seen.now,
            cost_per_hour=known.cost_per_hour if known is not None else 0.0,
            epoch=self._leader.epoch,
        )
        reason = "it bears the tag of this fleet and stands in no record"
        fields = {"action": "adopt" if lives else "terminate", "machine": machine_id, "family": family}
        log.warning("orphan_found", **fields)
        answer = self._store.step(
            "begin", machine, self._leader, decision={**fields, "reason": reason}, add={"orphans": 1}
        )
        if answer == "done" and not lives:
            self._end(machine, seen.now, reason, provisioner=provisioner)

    def _end(
        self, machine: Machine, now: float, why: str, counter: str = "", provisioner: Provisioner | None = None
    ) -> None:
        """End a machine whose worker does not live. First it stands in Redis, with an order for a worker that comes."""
        ending = replace(machine, state="ending")
        fields = {"action": "terminate", "machine": machine.id, "family": machine.family, "reason": why}
        add = {counter: 1.0} if counter else {}
        if self._store.step("end", ending, self._leader, decision=fields, add=add) == "done":
            log.info("scaled", **fields)
            self._terminate(ending, now, provisioner)

    def _terminate(self, machine: Machine, now: float, provisioner: Provisioner | None = None) -> None:
        provisioner = provisioner or self._provisioners.get(machine.family)
        if provisioner is None:
            cause = f"the policy has no family {machine.family!r}; put it back, with max: 0"
            log.warning("machine_not_terminated", machine=machine.id, cause=cause)
            return
        try:
            with self._leading():
                provisioner.terminate(machine.id)
        except ProvisionerError as error:
            log.warning("machine_not_terminated", machine=machine.id, cause=str(error))
            return
        self._leader.go_on()
        hours = max(0.0, now - machine.wanted_at) / 3600
        self._store.step("forget", machine, self._leader, add={"terminated": 1, "cost": hours * machine.cost_per_hour})


def _provisioners(
    loaded: LoadedPolicy, make: Callable[[Launching, str], Provisioner], tag: str
) -> dict[str, Provisioner]:
    """Return the provisioner of each family; families that are launched alike share one."""
    shared: dict[Any, Provisioner] = {}
    found = {}
    for one in loaded.launching:
        how = (one.command, one.instance, one.container, one.timeout_seconds)
        if how not in shared:
            shared[how] = make(one, tag)
        found[one.family] = shared[how]
    return found


class Releaser(threading.Thread):
    """Enables once what an earlier autoscaler has disabled, when no beat leads any more."""

    def __init__(self, app: GPUFlow, pause_seconds: float = LONGEST_TERM_SECONDS / 3) -> None:
        super().__init__(name="gpuflow-releaser", daemon=True)
        self._fleet = Fleet(app.redis, app.keys)
        self._control = app.control
        self._pause_seconds = pause_seconds

    def run(self) -> None:
        """Try until it is done; a broker that is away is tried again."""
        while not self._is_done():
            time.sleep(self._pause_seconds)

    def _is_done(self) -> bool:
        try:
            count = self._fleet.release_forsaken()
            if count > 0:
                log.info("enabled_again", workers=count, cause="nothing scales this fleet any more")
                self._control.broadcast("gpuflow_follow", arguments={"worker_ids": self._fleet.ids()})
        except (RedisError, OperationalError) as error:
            log.warning("workers_not_released", cause=str(error))
            return False
        return count >= 0


def is_asked_for(settings: Settings) -> bool:
    """Whether the operator wants the fleet scaled: by a policy, or by any setting of scaling that is set expressly."""
    said = any(settings.is_set(name) for name in type(settings).model_fields if name.startswith("elastic_auto_"))
    asked = settings.scaling_policy is not None or settings.is_set("enable_elastic_scaling") or said
    return settings.enable_elastic_scaling and asked


def start(app: GPUFlow) -> Autoscaler | None:
    """Start the autoscaler of a beat process where it is asked for. A bad policy is logged, and nothing scales."""
    settings = app.settings
    if not is_asked_for(settings):
        Releaser(app).start()
        return None

    def here() -> Capability:
        return Capability.of(
            probe(),
            dict.fromkeys(settings.worker_tags, ""),
            disk_free_mib=free_mib(settings.results_dir),
            disk_floor_mib=settings.disk_floor_bytes >> 20,
        )

    try:
        loaded = load_policy(settings, here)
    except GPUFlowError as error:
        log.error("scaling_off", cause=str(error))
        Releaser(app).start()
        return None

    def make(one: Launching, tag: str) -> Provisioner:
        recorded = [str(machine_id) for machine_id in app.redis.hkeys(app.keys.machines)]
        return provisioner_of(one, settings, app.broker_address(), tag, recorded=recorded)

    scaler = Autoscaler(app, loaded, make)
    scaler.start()
    return scaler
