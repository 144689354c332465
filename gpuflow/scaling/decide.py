"""What to do to a fleet now: `decide(snapshot, policy)`. Pure and total; the same snapshot gives the same actions.

In this order: nothing on a snapshot that cannot be relied on; every queue with waiting messages that nobody serves gets
one worker at once, enabled or launched; every worker that is there and switched off is enabled for what finds no free
slot, since it costs nothing; the least number of workers and machines; machines are launched where a backlog calls for
it; machines that are too many end; what idles is disabled, or retired where it was launched.

Nothing flaps, because one sum decides both ways: the slots that each queue needs. A machine is launched while some are
missing, and retired only if none are missing without it; a worker is disabled only if nothing would find no free slot.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

from gpuflow.scaling.fitting import Place, shortfalls, worth
from gpuflow.scaling.model import Action, Demand, Family, Kind, Policy, Snapshot, WorkerFacts

#: So many idle workers are looked at in one round at most: each costs a sum over the fleet.
MOST_LOOKED_AT: Final = 100


def decide(snapshot: Snapshot, policy: Policy) -> tuple[Action, ...]:
    """Return the actions that bring the fleet nearer to the policy; none on a snapshot that is stale."""
    if snapshot.gathering or snapshot.age_seconds > policy.stale_seconds:
        return ()
    plan = _Plan(snapshot, policy)
    plan.serve_everything()
    plan.use_spares()
    plan.keep_the_least()
    plan.work_off_backlogs()
    plan.end_surplus()
    plan.end_idle()
    return tuple(plan.actions)


class _Plan:
    """The fleet as it will be after the actions so far."""

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self.policy = policy
        self.actions: list[Action] = []
        self._families = {family.name: family for family in policy.families}
        self._held_back = {name for name, seconds in snapshot.held_back.items() if seconds > 0}
        self._machines = {one.id: one for one in snapshot.machines}
        self._workers = {one.id: one for one in snapshot.workers}
        self._demands = sorted(snapshot.demands, key=lambda demand: demand.urgency)
        ending = {one.id for one in snapshot.workers if one.draining}
        there = [one for one in snapshot.machines if one.state != "ending" and one.id not in ending]
        self._counts = Counter(one.family for one in there)
        self._spots = Counter(one.family for one in there if one.spot)
        #: What drains costs until it has gone.
        self._cost = sum(one.cost_per_hour for one in snapshot.machines)
        self.active = [Place.of_worker(one) for one in snapshot.workers if _is_active(one)]
        self.active += [
            Place.of_family(self._families[one.family], one.id)
            for one in there
            if one.state == "launching" and one.family in self._families and one.id not in self._workers
        ]
        self._spare = sorted(
            (one for one in snapshot.workers if _may_be_enabled(one)),
            key=lambda one: (one.cost_per_hour, worth(one.capability), one.id),
        )

    # -- up ----------------------------------------------------------------------------------------------------------

    def serve_everything(self) -> None:
        """Let every queue with waiting messages be served by somebody, whatever thresholds and cool-downs say."""
        for demand in self._demands:
            if not demand.depth or any(place.serves(demand) for place in self.active):
                continue
            why = f"{_waiting(demand)} and no enabled worker serves it"
            worker = next((one for one in self._spare if Place.of_worker(one).serves(demand)), None)
            if worker is not None:
                self._enable(worker, why)
            elif (family := self._cheapest(demand)) is not None:
                self._launch(family, why)

    def use_spares(self) -> None:
        """Enable workers for whatever waits and finds no free slot: thresholds and targets are for launching alone."""
        waiting = self._without_slot()
        for demand in self._demands:
            while waiting.get(demand.queue):
                worker = next((one for one in self._spare if Place.of_worker(one).serves(demand)), None)
                if worker is None:
                    break
                self._enable(worker, f"{_waiting(demand)} and no enabled worker has a free slot for it")
                waiting = self._without_slot()

    def _without_slot(self, without: str = "") -> dict[str, int]:
        """Return how many of the tasks that wait in each queue find no free slot at a worker that is there."""
        waiting = [(demand, demand.depth) for demand in self._demands if demand.depth]
        there = [place for place in self.active if not place.coming and place.id != without]
        return shortfalls(waiting, there, beside_held=True)

    def keep_the_least(self) -> None:
        """Enable up to the least number of active workers, and launch up to that of each family."""
        least = self.policy.min_active
        while len(self.active) < least and self._spare:
            self._enable(self._spare[0], f"{len(self.active)} workers are enabled, at least {least} are to be")
        for family in self._families.values():
            while self._counts[family.name] < family.least and self._may_launch(family):
                count = self._counts[family.name]
                self._launch(family, f"{count} machines of {family.name} run, at least {family.least} are to")

    def work_off_backlogs(self) -> None:
        """Launch as many as are missing to work a backlog off within its target."""
        for demand in self._demands:
            if not demand.depth or not self._is_backlog(demand):
                continue
            why = f"{_waiting(demand)}, the oldest for {demand.oldest_seconds:.0f} s; {self._needed_text(demand)}"
            while self._missing().get(demand.queue, 0) > 0:
                worker = next((one for one in self._spare if Place.of_worker(one).serves(demand)), None)
                if worker is not None:
                    self._enable(worker, why)
                elif (family := self._cheapest(demand)) is not None:
                    self._launch(family, why)
                else:
                    break

    def _is_backlog(self, demand: Demand) -> bool:
        """Whether machines may be launched for what waits in a queue.

        Where it is known how long its tasks take, the sum alone tells how many are missing: four tasks of an hour are a
        backlog, four of a second are none. Else it takes `enable_threshold` of them, or a wait as long as the target.
        """
        if demand.task_seconds is not None or demand.depth >= self.policy.enable_threshold:
            return True
        return demand.oldest_seconds >= self._target_seconds(demand)

    def _has_rested(self, worker: WorkerFacts) -> bool:
        return worker.toggled_seconds is None or worker.toggled_seconds >= self.policy.cooldown_seconds

    def _cheapest(self, demand: Demand) -> Family | None:
        """Return the cheapest kind of machine that serves a queue and may be launched now."""
        able = [
            family
            for family in self._families.values()
            if Place.of_family(family, "").serves(demand) and self._may_launch(family)
        ]
        spot = self._is_next_spot
        return min(able, key=lambda one: (one.cost(spot=spot(one)), worth(one.capability), one.name), default=None)

    def _is_next_spot(self, family: Family) -> bool:
        return self._spots[family.name] + 1 <= family.spot_share * (self._counts[family.name] + 1)

    def _may_launch(self, family: Family) -> bool:
        budget, cost = self.policy.budget_per_hour, family.cost(spot=self._is_next_spot(family))
        return (
            family.name not in self._held_back
            and self._counts[family.name] < family.most
            and (budget is None or self._cost + cost <= budget + 1e-9)
        )

    def _enable(self, worker: WorkerFacts, why: str) -> None:
        self._spare.remove(worker)
        self.active.append(Place.of_worker(worker))
        self.actions.append(Action(kind=Kind.ENABLE, worker=worker.id, reason=why))

    def _launch(self, family: Family, why: str) -> None:
        spot = self._is_next_spot(family)
        self._counts[family.name] += 1
        self._spots[family.name] += spot
        self._cost += family.cost(spot=spot)
        self.active.append(Place.of_family(family, f"+{self._counts[family.name]}"))
        self.actions.append(Action(kind=Kind.LAUNCH, family=family.name, spot=spot, reason=why))

    # -- down --------------------------------------------------------------------------------------------------------

    def end_surplus(self) -> None:
        """End machines above the most of their family, or of a family that is no more: those that idle first."""
        ours = [one for one in self._workers.values() if one.id in self._machines and _is_active(one)]
        for worker in sorted(ours, key=lambda one: (one.leases > 0, -(one.idle_seconds or 0), one.id)):
            name = self._machines[worker.id].family
            family = self._families.get(name)
            most = family.most if family is not None else 0
            if worker.by_hand or self._counts[name] <= most or self._alone_serves(worker):
                continue
            cause = f"at most {most} are to" if family is not None else "the policy has no such family"
            kind = Kind.DRAIN if worker.leases else Kind.RETIRE
            self._end(kind, worker, f"{self._counts[name]} machines of {name} run, {cause}")

    def end_idle(self) -> None:
        """Disable the workers that idle, and retire the machines: the dearest first."""
        idle = [one for one in self._workers.values() if self._has_idled(one)]
        order = sorted(idle, key=lambda one: (-one.cost_per_hour, -(one.idle_seconds or 0), one.id))
        before: dict[str, int] | None = None
        for worker in order[:MOST_LOOKED_AT]:
            machine = self._machines.get(worker.id)
            family = self._families.get(machine.family) if machine is not None else None
            if sum(not place.coming for place in self.active) <= self.policy.min_active:
                return
            if family is not None and self._counts[family.name] <= family.least:
                continue
            place = Place.of_worker(worker)
            served = [one for one in self._demands if one.depth and place.serves(one)]
            if sum(one.depth for one in served) > self.policy.disable_queue_max:
                continue
            before = self._missing() if before is None else before
            if self._alone_serves(worker) or self._missing(without=worker.id) != before:
                continue
            if machine is None and any(self._without_slot(without=worker.id).get(one.queue) for one in served):
                continue
            kind = Kind.RETIRE if machine is not None else Kind.DISABLE
            self._end(kind, worker, f"it has idled for {worker.idle_seconds or 0:.0f} s and is not needed")

    def _has_idled(self, worker: WorkerFacts) -> bool:
        if not _is_active(worker) or worker.by_hand or worker.ephemeral or worker.leases or worker.idle_seconds is None:
            return False
        if worker.id not in {place.id for place in self.active} or not self._has_rested(worker):
            return False
        machine = self._machines.get(worker.id)
        family = self._families.get(machine.family) if machine is not None else None
        least = self.policy.idle_seconds
        if family is not None and family.idle_seconds is not None:
            least = family.idle_seconds
        since = (
            worker.idle_seconds if worker.toggled_seconds is None else min(worker.idle_seconds, worker.toggled_seconds)
        )
        return since >= least

    def _alone_serves(self, worker: WorkerFacts) -> bool:
        """Whether something waits that no other worker which is there already serves."""
        others = [place for place in self.active if place.id != worker.id and not place.coming]
        place = Place.of_worker(worker)
        return any(
            place.serves(demand) and not any(other.serves(demand) for other in others)
            for demand in self._demands
            if demand.depth
        )

    def _end(self, kind: Kind, worker: WorkerFacts, why: str) -> None:
        self.active = [place for place in self.active if place.id != worker.id]
        machine = self._machines.get(worker.id)
        if machine is not None:
            self._counts[machine.family] -= 1
            self._spots[machine.family] -= machine.spot
        self.actions.append(Action(kind=kind, worker=worker.id, reason=why))

    # -- the sum -----------------------------------------------------------------------------------------------------

    def _missing(self, without: str = "") -> dict[str, int]:
        """Return how many slots each queue lacks."""
        needs = [(demand, self._needed(demand)) for demand in self._demands]
        return shortfalls(needs, [place for place in self.active if place.id != without])

    def _needed(self, demand: Demand) -> int:
        """Return how many tasks of a queue have to run at once: all that there are at most.

        Of those that run, half the time is behind them on average. Where no task has ended yet, those that run keep
        their slots, and there is one more for each `enable_threshold` that wait.
        """
        if not demand.depth:
            return demand.running
        if demand.task_seconds is None:
            wanted = demand.running + math.ceil(demand.depth / max(1, self.policy.enable_threshold))
        else:
            work = (demand.depth + demand.running / 2) * demand.task_seconds
            wanted = math.ceil(work / max(0.001, self._target_seconds(demand)))
        return max(1, demand.running, min(demand.depth + demand.running, wanted))

    def _needed_text(self, demand: Demand) -> str:
        needed, target = self._needed(demand), self._target_seconds(demand)
        took = "no task of it has ended yet"
        if demand.task_seconds is not None:
            took = f"a task takes {demand.task_seconds:.1f} s"
        return f"{took}, so {needed} are to run at once for a backlog of {target:.0f} s"

    def _target_seconds(self, demand: Demand) -> float:
        """Return the least target of the families that serve a queue, else that of the policy."""
        targets = [
            family.target_backlog_seconds
            for family in self._families.values()
            if Place.of_family(family, "").serves(demand)
        ]
        return min(targets, default=self.policy.target_backlog_seconds)


def _is_active(worker: WorkerFacts) -> bool:
    return worker.alive and worker.enabled and not worker.draining


def _may_be_enabled(worker: WorkerFacts) -> bool:
    return worker.alive and not worker.enabled and not worker.draining and not worker.by_hand


def _waiting(demand: Demand) -> str:
    count = demand.depth
    return f"{count} {'task waits' if count == 1 else 'tasks wait'} in {demand.queue}"
