"""A simulated fleet in accelerated time: a trace of tasks, machines that take minutes to come, and a policy that polls.

Everything is deterministic by the seed. Times are in seconds since midnight, costs per hour in any one currency.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.requirement import Requirement
from gpuflow.scaling.fitting import Place
from gpuflow.scaling.model import Action, Demand, Family, Kind, MachineFacts, Snapshot, WorkerFacts

DAY = 86_400.0
LAST = 1.5 * DAY
POLL_SECONDS = 30.0
#: A machine that ends is paid for so long after that was decided, in seconds.
SHUTDOWN_SECONDS = 45.0


def _machine(cpus: float, name: str = "", memory_gb: float = 0.0) -> Capability:
    gpu = GpuCapability(uuid="GPU-0", index=0, names=(name,), vram_gb=memory_gb, total_mib=int(memory_gb * 1024))
    return Capability(gpus=(gpu,) if name else (), cpu_count=cpus, memory_mib=262_144, disk_free_mib=1 << 20)


@dataclass(frozen=True)
class Work:
    """One sort of tasks: what it asks for, how long it takes (median and spread of a lognormal), its part of a day."""

    asked: Requirement
    seconds: float
    spread: float
    share: float


#: Three kinds of machines, with on-demand prices of one large provider, rounded, and how long a worker takes to come.
FAMILIES = (
    Family(name="cpu", capability=_machine(16), most=20, cost_per_hour=0.7, slots=4),
    Family(name="a10", capability=_machine(8, "a10", 24), most=40, cost_per_hour=1.2, slots=1),
    Family(name="a100", capability=_machine(16, "a100", 80), most=40, cost_per_hour=4.1, slots=1),
)
LAUNCH_SECONDS = {"cpu": 90.0, "a10": 180.0, "a100": 240.0}
WORK = (
    Work(asked=Requirement(), seconds=180, spread=0.6, share=0.35),
    Work(asked=Requirement(gpu_count=1, vram_gb_min=16), seconds=420, spread=0.5, share=0.4),
    Work(asked=Requirement(gpu_count=1, vram_gb_min=48), seconds=1200, spread=0.5, share=0.25),
)


@dataclass(frozen=True)
class Job:
    """A task of the trace."""

    at: float
    work: int
    seconds: float
    priority: int


def trace(seed: int, count: int = 500) -> list[Job]:
    """Return a day: a third comes by chance, by day more than by night, and the rest in ten bursts of one sort each."""
    chance = random.Random(seed)
    steady, bursts = count // 3, 10
    times = [(_by_day(chance), _sort(chance)) for _ in range(steady)]
    for number in range(bursts):
        size = (count - steady) // bursts + (number < (count - steady) % bursts)
        begin, work = chance.uniform(0.25, 0.85) * DAY, _sort(chance)
        times += [(begin + chance.uniform(0, 300), work) for _ in range(size)]
    jobs = []
    for at, work in sorted(times):
        sort = WORK[work]
        seconds = sort.seconds * math.exp(chance.gauss(0, sort.spread))
        jobs.append(Job(at=at, work=work, seconds=seconds, priority=9 if chance.random() < 0.1 else 5))
    return jobs


def _by_day(chance: random.Random) -> float:
    while True:
        at = chance.random()
        if chance.random() < 0.3 + 0.7 * math.sin(math.pi * at) ** 2:
            return at * DAY


def _sort(chance: random.Random) -> int:
    return chance.choices(range(len(WORK)), [one.share for one in WORK])[0]


@dataclass
class Machine:
    """A machine of the simulation, and the worker on it."""

    id: str
    family: Family
    wanted_at: float
    ready_at: float
    draining: bool = False
    jobs: int = 0
    idle_since: float = 0.0
    place: Place = field(default_factory=lambda: Place(id="", capability=Capability()))

    def facts(self, now: float) -> WorkerFacts:
        """Return its worker as scaling sees it."""
        return WorkerFacts(
            id=self.id,
            capability=self.family.capability,
            draining=self.draining,
            leases=self.jobs,
            most_jobs=self.family.slots,
            idle_seconds=None if self.jobs else now - self.idle_since,
            cost_per_hour=self.family.cost_per_hour,
        )


@dataclass
class Day:
    """What a day gave: the wait of each task, the cost, and a sample at each poll (time, backlog, machines, cost)."""

    waits: list[float] = field(default_factory=list)
    cost: float = 0.0
    peak: Counter[str] = field(default_factory=Counter)
    peak_cost_per_hour: float = 0.0
    samples: list[tuple[float, int, int, float]] = field(default_factory=list)


Scale = Callable[[Snapshot], Sequence[Action]]


class Fleet:
    """Runs one trace under one policy; with `static` those machines are there from midnight to midnight."""

    def __init__(self, jobs: Sequence[Job], seed: int, scale: Scale | None, static: Counter[str] | None = None) -> None:
        self._jobs = jobs
        self._chance = random.Random(seed + 1)
        self._scale = scale
        self._machines: dict[str, Machine] = {}
        self._families = {family.name: family for family in FAMILIES}
        self._demands = [Demand(queue=one.asked.queue_name(), requirement=one.asked) for one in WORK]
        self._waiting: list[list[Job]] = [[] for _ in WORK]
        self._running: Counter[int] = Counter()
        self._mean: list[float | None] = [None] * len(WORK)
        self._ends: list[tuple[float, int, str, Job]] = []
        self._count = 0
        self.day = Day()
        for name, number in (static or {}).items():
            for _ in range(number):
                self._launch(self._families[name], 0.0, 0.0)

    def run(self) -> Day:
        """Let the day pass, and what it left over; what waits at `LAST` has waited until then."""
        arrivals, position, now, polled = self._jobs, 0, 0.0, 0.0
        while now < DAY or (now < LAST and (self._ends or any(self._waiting))):
            coming = arrivals[position].at if position < len(arrivals) else math.inf
            ending = self._ends[0][0] if self._ends else math.inf
            ready = min((one.ready_at for one in self._machines.values() if one.ready_at > now), default=math.inf)
            now = min(coming, ending, ready, polled)
            while position < len(arrivals) and arrivals[position].at <= now:
                self._waiting[arrivals[position].work].append(arrivals[position])
                position += 1
            while self._ends and self._ends[0][0] <= now:
                self._finish(now)
            self._assign(now)
            if polled <= now:
                self._poll(now)
                polled += POLL_SECONDS
        self.day.waits += [now - job.at for jobs in self._waiting for job in jobs]
        for machine in list(self._machines.values()):
            self._end(machine, now, 0.0)
        return self.day

    def _launch(self, family: Family, now: float, takes: float) -> None:
        self._count += 1
        machine = Machine(id=f"{family.name}-{self._count}", family=family, wanted_at=now, ready_at=now + takes)
        machine.idle_since = machine.ready_at
        machine.place = Place.of_worker(machine.facts(machine.ready_at))
        self._machines[machine.id] = machine

    def _end(self, machine: Machine, now: float, more: float = SHUTDOWN_SECONDS) -> None:
        del self._machines[machine.id]
        self.day.cost += (now + more - machine.wanted_at) / 3600 * machine.family.cost_per_hour

    def _finish(self, now: float) -> None:
        _, _, name, job = heapq.heappop(self._ends)
        machine = self._machines[name]
        machine.jobs -= 1
        self._running[job.work] -= 1
        mean = self._mean[job.work]
        self._mean[job.work] = job.seconds if mean is None else mean + (job.seconds - mean) / 5
        if not machine.jobs:
            machine.idle_since = now
            if machine.draining:
                self._end(machine, now)

    def _assign(self, now: float) -> None:
        """Give what waits, the most urgent first, to the cheapest machine with a free slot."""
        heads = sorted(
            ((-job.priority, job.at, number) for number, jobs in enumerate(self._waiting) for job in jobs),
        )
        full: set[int] = set()
        for _, _, number in heads:
            if number in full:
                continue
            able = [
                one
                for one in self._machines.values()
                if one.ready_at <= now
                and not one.draining
                and one.jobs < (one.family.slots or 1)
                and one.place.serves(self._demands[number])
            ]
            if not able:
                full.add(number)
                continue
            machine = min(able, key=lambda one: (one.family.cost_per_hour, one.id))
            waiting = self._waiting[number]
            job = min(waiting, key=lambda one: (-one.priority, one.at))
            waiting.remove(job)
            machine.jobs += 1
            self._running[number] += 1
            self._count += 1
            self.day.waits.append(now - job.at)
            heapq.heappush(self._ends, (now + job.seconds, self._count, machine.id, job))

    def _poll(self, now: float) -> None:
        for action in self._scale(self._snapshot(now)) if self._scale is not None else ():
            if action.kind is Kind.LAUNCH:
                family = self._families[action.family]
                takes = LAUNCH_SECONDS[family.name] * math.exp(self._chance.gauss(0, 0.25))
                self._launch(family, now, takes)
            elif (machine := self._machines[action.worker]).jobs:
                machine.draining = True
            else:
                self._end(machine, now)
        counts = Counter(one.family.name for one in self._machines.values())
        per_hour = sum(one.family.cost_per_hour for one in self._machines.values())
        for name, number in counts.items():
            self.day.peak[name] = max(self.day.peak[name], number)
        self.day.peak_cost_per_hour = max(self.day.peak_cost_per_hour, per_hour)
        self.day.samples.append((now, sum(map(len, self._waiting)), sum(counts.values()), per_hour))

    def _snapshot(self, now: float) -> Snapshot:
        machines = self._machines.values()
        return Snapshot(
            workers=tuple(one.facts(now) for one in machines if one.ready_at <= now),
            machines=tuple(
                MachineFacts(
                    id=one.id,
                    family=one.family.name,
                    state="running" if one.ready_at <= now else "launching",
                    age_seconds=now - one.wanted_at,
                    cost_per_hour=one.family.cost_per_hour,
                )
                for one in machines
            ),
            demands=tuple(
                replace(
                    demand,
                    waiting=dict(Counter(job.priority for job in self._waiting[number])),
                    running=self._running[number],
                    oldest_seconds=max((now - job.at for job in self._waiting[number]), default=0.0),
                    task_seconds=self._mean[number],
                )
                for number, demand in enumerate(self._demands)
                if self._waiting[number] or self._running[number]
            ),
        )
