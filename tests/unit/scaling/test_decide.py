"""decide(): a table of situations, and what holds over random fleets and many rounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.requirement import Requirement
from gpuflow.scaling.decide import decide
from gpuflow.scaling.fitting import Place
from gpuflow.scaling.model import Action, Demand, Family, Kind, MachineFacts, Policy, Snapshot, WorkerFacts


def machine(gpus: int = 0, vram: float = 80, cpus: float = 4) -> Capability:
    return Capability(
        gpus=tuple(
            GpuCapability(uuid=f"u{n}", index=n, names=(f"g{vram:g}",), vram_gb=vram, total_mib=int(vram * 1024))
            for n in range(gpus)
        ),
        cpu_count=cpus,
        memory_mib=65_536,
    )


CPU, GPU24, GPU80 = machine(), machine(1, 24), machine(1, 80)
ASK_CPU, ASK_GPU, ASK_80 = Requirement(), Requirement(gpu_count=1), Requirement(gpu_count=1, vram_gb_min=80)


def worker(name: str = "w1", capability: Capability = CPU, **fields: Any) -> WorkerFacts:
    return WorkerFacts(**{"id": name, "capability": capability, "idle_seconds": 1000.0, **fields})


def demand(asked: Requirement | None = ASK_CPU, waiting: int = 1, **fields: Any) -> Demand:
    queue = "celery" if asked is None else asked.queue_name()
    return Demand(**{"queue": queue, "requirement": asked, "waiting": {5: waiting} if waiting else {}, **fields})


def family(name: str = "gpu", capability: Capability = GPU80, **fields: Any) -> Family:
    return Family(**{"name": name, "capability": capability, "most": 3, **fields})


def said(actions: tuple[Action, ...]) -> list[str]:
    return sorted(f"{action.kind} {action.worker or action.family}" for action in actions)


OFF = {"enabled": False, "toggled_seconds": 1000.0}
RAN = {"leases": 1, "idle_seconds": None}

BUSY_80 = (worker(capability=GPU80, **RAN),)

TABLE: dict[str, tuple[Snapshot, Policy, list[str]]] = {
    "an empty fleet": (Snapshot(), Policy(), []),
    "an idle worker is disabled": (
        Snapshot(workers=(worker("w1", toggled_seconds=None), worker("w2", idle_seconds=10.0))),
        Policy(),
        ["disable w1"],
    ),
    "not below the least": (Snapshot(workers=(worker(), worker("w2"))), Policy(min_active=2), []),
    "down to none where none is to be active": (Snapshot(workers=(worker(),)), Policy(min_active=0), ["disable w1"]),
    "the least is enabled again": (
        Snapshot(workers=(worker(**OFF), worker("w2", **OFF))),
        Policy(min_active=1),
        ["enable w1"],
    ),
    "the dearest goes first": (
        Snapshot(workers=(worker("a", cost_per_hour=1), worker("b", cost_per_hour=9))),
        Policy(),
        ["disable b"],
    ),
    "a family that -Q keeps from a queue is not launched for it": (
        Snapshot(demands=(demand(ASK_GPU, 9),)),
        Policy(families=(family("a", families=("cpu",)), family("b", families=("gpu",), cost_per_hour=9, most=1))),
        ["launch b"],
    ),
    "two long tasks are a backlog, whatever the threshold": (
        Snapshot(workers=BUSY_80, demands=(demand(ASK_GPU, 2, running=1, task_seconds=3600.0),)),
        Policy(families=(family(),)),
        ["launch gpu", "launch gpu"],
    ),
    "four short ones are none": (
        Snapshot(workers=BUSY_80, demands=(demand(ASK_GPU, 4, running=1, task_seconds=5.0),)),
        Policy(families=(family(),)),
        [],
    ),
    "nor are a few of which nobody knows how long they take": (
        Snapshot(workers=BUSY_80, demands=(demand(ASK_GPU, 4, running=1),)),
        Policy(families=(family(),)),
        [],
    ),
    "a busy one is left alone": (Snapshot(workers=(worker(**RAN), worker("w2", **RAN))), Policy(min_active=0), []),
    "one that idles for less than the cool-down since it was toggled": (
        Snapshot(workers=(worker(toggled_seconds=30.0), worker("w2", **RAN))),
        Policy(min_active=0),
        [],
    ),
    "one that has never said how long it idles": (
        Snapshot(workers=(worker(idle_seconds=None), worker("w2", idle_seconds=None))),
        Policy(),
        [],
    ),
    "an ephemeral one waits for its job": (Snapshot(workers=(worker(ephemeral=True),)), Policy(min_active=0), []),
    "what an operator said stands": (
        Snapshot(
            workers=(worker("on", by_hand=True), worker("off", by_hand=True, enabled=False)),
            demands=(demand(ASK_CPU, 0),),
        ),
        Policy(min_active=0),
        [],
    ),
    "an operator's disabled worker is not enabled even if it alone could": (
        Snapshot(workers=(worker(by_hand=True, enabled=False),), demands=(demand(),)),
        Policy(min_active=0),
        [],
    ),
    "one waits and nobody serves: enabled below the threshold and within the cool-down": (
        Snapshot(workers=(worker(enabled=False, toggled_seconds=1.0),), demands=(demand(),)),
        Policy(min_active=0),
        ["enable w1"],
    ),
    "the cheapest of those that could": (
        Snapshot(
            workers=(worker("big", GPU80, cost_per_hour=9, **OFF), worker("small", GPU24, cost_per_hour=1, **OFF)),
            demands=(demand(ASK_GPU),),
        ),
        Policy(min_active=0),
        ["enable small"],
    ),
    "one worker for two unserved queues": (
        Snapshot(workers=(worker("big", GPU80, **OFF),), demands=(demand(ASK_GPU), demand(ASK_80))),
        Policy(min_active=0),
        ["enable big"],
    ),
    "a silent worker serves nobody": (
        Snapshot(workers=(worker("dead", alive=False), worker("w2", **OFF)), demands=(demand(),)),
        Policy(min_active=0),
        ["enable w2"],
    ),
    "a draining worker serves nobody": (
        Snapshot(workers=(worker("old", draining=True), worker("w2", **OFF)), demands=(demand(),)),
        Policy(min_active=0),
        ["enable w2"],
    ),
    "-Q keeps a worker from a queue": (
        Snapshot(workers=(worker(families=("gpu",), idle_seconds=1.0), worker("w2", **OFF)), demands=(demand(),)),
        Policy(),
        ["enable w2"],
    ),
    "a plain queue counts": (
        Snapshot(workers=(worker(plain_queues=("celery",), **OFF),), demands=(demand(None),)),
        Policy(min_active=0),
        ["enable w1"],
    ),
    "nobody serves: the cheapest kind is launched": (
        Snapshot(demands=(demand(ASK_GPU),)),
        Policy(families=(family("big", GPU80, cost_per_hour=9), family("small", GPU24, cost_per_hour=2))),
        ["launch small"],
    ),
    "only a kind that fits": (
        Snapshot(demands=(demand(ASK_80),)),
        Policy(families=(family("big", GPU80, cost_per_hour=9), family("small", GPU24, cost_per_hour=2))),
        ["launch big"],
    ),
    "none that fits": (Snapshot(demands=(demand(ASK_80),)), Policy(families=(family("small", GPU24),)), []),
    "one that comes already": (
        Snapshot(demands=(demand(ASK_GPU),), machines=(MachineFacts(id="m", family="gpu", state="launching"),)),
        Policy(families=(family(),)),
        [],
    ),
    "above the most": (
        Snapshot(demands=(demand(ASK_GPU),), machines=(MachineFacts(id="m", family="gpu", state="running"),)),
        Policy(families=(family(most=1),)),
        [],
    ),
    "above the budget": (
        Snapshot(demands=(demand(ASK_GPU),)),
        Policy(budget_per_hour=5, families=(family(cost_per_hour=9),)),
        [],
    ),
    "held back after failures: the next kind": (
        Snapshot(demands=(demand(ASK_GPU),), held_back={"cheap": 20.0}),
        Policy(families=(family("cheap", GPU24, cost_per_hour=1), family("dear", GPU80, cost_per_hour=9))),
        ["launch dear"],
    ),
    "held back, over by now": (
        Snapshot(demands=(demand(ASK_GPU),), held_back={"gpu": -1.0}),
        Policy(families=(family(),)),
        ["launch gpu"],
    ),
    "a spare takes what waits, below the threshold and young": (
        Snapshot(
            workers=(worker("w1", GPU24, **RAN), worker("w2", GPU24, **OFF)), demands=(demand(ASK_GPU, running=1),)
        ),
        Policy(),
        ["enable w2"],
    ),
    "within its cool-down too": (
        Snapshot(
            workers=(worker(**RAN), worker("w2", enabled=False, toggled_seconds=5.0)),
            demands=(demand(waiting=1, running=1, task_seconds=1.0),),
        ),
        Policy(),
        ["enable w2"],
    ),
    "two tasks and one free slot: one spare": (
        Snapshot(
            workers=(worker("w1", GPU24), worker("w2", GPU24, **OFF), worker("w3", GPU24, **OFF)),
            demands=(demand(ASK_GPU, 2),),
        ),
        Policy(),
        ["enable w2"],
    ),
    "who is free takes what waits": (
        Snapshot(workers=(worker("w1", GPU24), worker("w2", GPU24, **OFF)), demands=(demand(ASK_GPU, 1),)),
        Policy(),
        [],
    ),
    "a worker is not free while it runs something else": (
        Snapshot(
            workers=(worker("w1", GPU24, **RAN), worker("w2", idle_seconds=1.0), worker("w3", GPU24, **OFF)),
            demands=(demand(ASK_CPU, 0, running=1), demand(ASK_GPU, 1)),
        ),
        Policy(),
        ["enable w3"],
    ),
    "a spare, though a machine is coming": (
        Snapshot(
            workers=(worker("w1", GPU24, **OFF),),
            demands=(demand(ASK_GPU, 1),),
            machines=(MachineFacts(id="m", family="gpu", state="launching"),),
        ),
        Policy(min_active=0, families=(family(),)),
        ["enable w1"],
    ),
    "a backlog below the threshold and young launches nothing": (
        Snapshot(workers=(worker(**RAN),), demands=(demand(waiting=4, running=1),)),
        Policy(families=(family("cpu", CPU),)),
        [],
    ),
    "a backlog at the threshold": (
        Snapshot(workers=(worker(**RAN),), demands=(demand(waiting=5, running=1),)),
        Policy(families=(family("cpu", CPU),)),
        ["launch cpu"],
    ),
    "below it, but old": (
        Snapshot(
            workers=(worker(**RAN),),
            demands=(demand(waiting=1, running=1, oldest_seconds=301.0, task_seconds=3600.0),),
        ),
        Policy(families=(family("cpu", CPU),)),
        ["launch cpu"],
    ),
    "short tasks are worked off by who is there": (
        Snapshot(workers=(worker(**RAN),), demands=(demand(waiting=40, running=1, task_seconds=1.0),)),
        Policy(families=(family("cpu", CPU),)),
        [],
    ),
    "as many machines as a backlog takes": (
        Snapshot(demands=(demand(ASK_GPU, 20, task_seconds=60.0),)),
        Policy(families=(family(most=10),)),
        ["launch gpu"] * 4,
    ),
    "the least of a family": (Snapshot(), Policy(families=(family(least=2),)), ["launch gpu"] * 2),
    "an idle machine is retired": (
        Snapshot(workers=(worker("m", GPU80),), machines=(MachineFacts(id="m", family="gpu", state="running"),)),
        Policy(min_active=0, families=(family(),)),
        ["retire m"],
    ),
    "not below the least of its family": (
        Snapshot(workers=(worker("m", GPU80),), machines=(MachineFacts(id="m", family="gpu", state="running"),)),
        Policy(min_active=0, families=(family(least=1),)),
        [],
    ),
    "a busy machine above the most drains": (
        Snapshot(
            workers=(worker("a", GPU80, **RAN), worker("b", GPU80, **RAN)),
            machines=tuple(MachineFacts(id=name, family="gpu", state="running") for name in "ab"),
        ),
        Policy(min_active=0, families=(family(most=1),)),
        ["drain a"],
    ),
    "a family that is no more": (
        Snapshot(workers=(worker("m", GPU80),), machines=(MachineFacts(id="m", family="old", state="running"),)),
        Policy(min_active=0),
        ["retire m"],
    ),
    "but not while it alone serves what waits": (
        Snapshot(
            workers=(worker("m", GPU80),),
            machines=(MachineFacts(id="m", family="old", state="running"),),
            demands=(demand(ASK_GPU),),
        ),
        Policy(min_active=0),
        [],
    ),
    "more waits than may for disabling": (
        Snapshot(workers=(worker("a"), worker("b")), demands=(demand(waiting=3),)),
        Policy(min_active=0),
        [],
    ),
    "the only one that serves what waits": (
        Snapshot(workers=(worker("gpu", GPU80), worker("cpu")), demands=(demand(ASK_GPU),)),
        Policy(min_active=0),
        ["disable cpu"],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_situations(name: str) -> None:
    snapshot, policy, expected = TABLE[name]
    actions = decide(snapshot, policy)
    assert said(actions) == expected
    assert all(action.reason and not action.reason.endswith(".") for action in actions)
    assert decide(replace(snapshot, gathering=True), policy) == ()
    assert decide(replace(snapshot, age_seconds=policy.stale_seconds + 0.1), policy) == ()


def test_the_spot_share_is_kept() -> None:
    kinds = [family(most=4, least=4, spot_share=0.5, cost_per_hour=4, spot_cost_per_hour=1)]
    actions = decide(Snapshot(), Policy(families=tuple(kinds)))
    assert [action.spot for action in actions] == [False, True, False, True]


def test_the_reason_names_numbers() -> None:
    found = decide(
        Snapshot(demands=(demand(ASK_GPU, 20, task_seconds=60.0, oldest_seconds=12.0),)),
        Policy(families=(family(most=10),)),
    )
    assert found[0].reason == "20 tasks wait in gpu and no enabled worker serves it"
    assert found[1].reason == (
        "20 tasks wait in gpu, the oldest for 12 s; a task takes 60.0 s, so 4 are to run at once for a backlog of 300 s"
    )


# -- what holds over all fleets --------------------------------------------------------------------------------------

CAPABILITIES = (CPU, GPU24, GPU80, machine(4, 80, 32))
ASKS = (None, ASK_CPU, ASK_GPU, ASK_80, Requirement(gpu_count=2), Requirement(cpu=8))
seconds = st.floats(0, 1000)


@st.composite
def snapshots(draw: Any) -> tuple[Snapshot, Policy]:
    families = tuple(
        Family(
            name=f"f{n}",
            capability=draw(st.sampled_from(CAPABILITIES)),
            least=draw(st.integers(0, 1)),
            most=draw(st.integers(1, 4)),
            cost_per_hour=draw(st.floats(0, 10)),
            spot_share=draw(st.sampled_from((0.0, 0.5, 1.0))),
        )
        for n in range(draw(st.integers(0, 3)))
    )
    workers = tuple(
        WorkerFacts(
            id=f"w{n}",
            capability=draw(st.sampled_from(CAPABILITIES)),
            alive=draw(st.booleans()),
            enabled=draw(st.booleans()),
            draining=draw(st.integers(0, 5)) == 0,
            by_hand=draw(st.integers(0, 3)) == 0,
            plain_queues=("celery",),
            leases=(leases := draw(st.integers(0, 2))),
            idle_seconds=None if leases else draw(seconds),
            toggled_seconds=draw(st.none() | seconds),
            cost_per_hour=draw(st.floats(0, 10)),
        )
        for n in range(draw(st.integers(0, 6)))
    )
    launched = draw(st.lists(st.sampled_from(range(8)), unique=True, max_size=4)) if families else []
    machines = tuple(
        MachineFacts(
            id=f"w{n}",
            family=draw(st.sampled_from([one.name for one in families] + ["gone"])),
            state=draw(st.sampled_from(("launching", "running", "ending"))),
            cost_per_hour=draw(st.floats(0, 10)),
        )
        for n in launched
    )
    demands = tuple(
        Demand(
            queue="celery" if asked is None else asked.queue_name(),
            requirement=asked,
            waiting=draw(st.dictionaries(st.integers(0, 9), st.integers(0, 30), max_size=3)),
            running=draw(st.integers(0, 4)),
            oldest_seconds=draw(seconds),
            task_seconds=draw(st.none() | st.floats(0, 5000)),
        )
        for asked in draw(st.lists(st.sampled_from(ASKS), unique=True, max_size=5))
    )
    policy = Policy(
        idle_seconds=draw(seconds),
        enable_threshold=draw(st.integers(0, 10)),
        disable_queue_max=draw(st.integers(0, 3)),
        min_active=draw(st.integers(0, 3)),
        cooldown_seconds=draw(seconds),
        budget_per_hour=draw(st.none() | st.floats(0, 50)),
        families=families,
    )
    return Snapshot(workers=workers, demands=demands, machines=machines), policy


@settings(max_examples=600)
@given(snapshots())
def test_no_action_does_harm(case: tuple[Snapshot, Policy]) -> None:
    snapshot, policy = case
    actions = decide(snapshot, policy)
    workers = {one.id: one for one in snapshot.workers}
    launched = {one.id for one in snapshot.machines}
    named = [action.worker for action in actions if action.worker]
    assert len(set(named)) == len(named), "two actions for one worker"
    for action in actions:
        if action.kind is Kind.LAUNCH:
            continue
        one = workers[action.worker]
        assert one.alive and not one.by_hand and not one.draining
        assert one.enabled is (action.kind is not Kind.ENABLE)
        if action.kind in (Kind.DISABLE, Kind.RETIRE):
            assert not one.leases
        assert (action.worker in launched) or action.kind in (Kind.ENABLE, Kind.DISABLE)
    ended = {action.worker for action in actions if action.kind in (Kind.DISABLE, Kind.DRAIN, Kind.RETIRE)}
    enabled = {action.worker for action in actions if action.kind is Kind.ENABLE}
    before = [one for one in snapshot.workers if one.alive and one.enabled and not one.draining]
    after = [one for one in before if one.id not in ended] + [workers[name] for name in enabled]
    idle_ended = [action for action in actions if action.reason.startswith("it has idled")]
    assert not idle_ended or len(after) >= policy.min_active
    for demand in snapshot.demands:
        if demand.depth and any(Place.of_worker(place).serves(demand) for place in before):
            assert any(Place.of_worker(place).serves(demand) for place in after), "the last that served it was ended"
    cost = sum(one.cost_per_hour for one in snapshot.machines)
    for action in actions:
        if action.kind is Kind.LAUNCH:
            kind = next(one for one in policy.families if one.name == action.family)
            cost += kind.cost(spot=action.spot)
            assert policy.budget_per_hour is None or cost <= policy.budget_per_hour + 1e-6
    for kind in policy.families:
        starts = sum(action.family == kind.name for action in actions)
        draining = {one.id for one in snapshot.workers if one.draining}
        there = sum(
            one.family == kind.name and one.state != "ending" and one.id not in draining for one in snapshot.machines
        )
        assert not starts or there + starts <= kind.most


@settings(max_examples=300)
@given(snapshots())
def test_what_can_be_served_is_served_in_one_round(case: tuple[Snapshot, Policy]) -> None:
    snapshot, policy = case
    policy = replace(policy, budget_per_hour=None, families=tuple(replace(one, most=100) for one in policy.families))
    actions = decide(snapshot, policy)
    enabled = {action.worker for action in actions if action.kind is Kind.ENABLE}
    kinds = {one.name: one for one in policy.families}
    places = [
        Place.of_worker(one)
        for one in snapshot.workers
        if one.alive and not one.draining and (one.enabled or one.id in enabled)
    ]
    known = {one.id for one in snapshot.workers}
    places += [Place.of_family(kinds[a.family], "") for a in actions if a.kind is Kind.LAUNCH]
    places += [
        Place.of_family(kinds[one.family], "")
        for one in snapshot.machines
        if one.state == "launching" and one.family in kinds and one.id not in known
    ]
    spare = [Place.of_worker(one) for one in snapshot.workers if one.alive and not one.by_hand and not one.draining]
    able = [*spare, *(Place.of_family(one, "") for one in policy.families)]
    for one in snapshot.demands:
        if one.depth and any(place.serves(one) for place in able):
            assert any(place.serves(one) for place in places)


@settings(max_examples=300)
@given(snapshots())
def test_no_spare_is_left_off_while_something_waits_without_a_free_slot(case: tuple[Snapshot, Policy]) -> None:
    snapshot, policy = case
    actions = decide(snapshot, policy)
    enabled = {action.worker for action in actions if action.kind is Kind.ENABLE}
    ended = {action.worker for action in actions if action.worker} - enabled
    active = [
        one
        for one in snapshot.workers
        if one.alive and not one.draining and (one.enabled or one.id in enabled) and one.id not in ended
    ]
    off = [one for one in snapshot.workers if one not in active and one.alive and not one.draining and not one.by_hand]
    for one in snapshot.demands:
        if not one.depth or not any(Place.of_worker(spare).serves(one) for spare in off if not spare.enabled):
            continue
        free = sum(max(0, Place.of_worker(place).slots(one) - place.leases) for place in active)
        assert free > 0, f"a spare stays off while {one.queue} waits and nobody has a free slot"


# -- many rounds -----------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A simulated fleet: `step` lets a second pass, `tick` lets decide() act on it."""

    policy: Policy
    workers: dict[str, WorkerFacts] = field(default_factory=dict)
    machines: dict[str, tuple[str, float]] = field(default_factory=dict)
    running: dict[str, list[tuple[Requirement, float]]] = field(default_factory=dict)
    queues: dict[Requirement, list[float]] = field(default_factory=dict)
    now: float = 0.0
    count: int = 0
    toggles: list[tuple[float, str, str]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def add(self, asked: Requirement, count: int) -> None:
        self.queues.setdefault(asked, []).extend([self.now] * count)

    def step(self, task_seconds: float, startup_seconds: float = 3.0) -> None:
        self.now += 1
        for name, (kind, wanted) in list(self.machines.items()):
            if name not in self.workers and self.now - wanted >= startup_seconds:
                capability = next(one.capability for one in self.policy.families if one.name == kind)
                self.workers[name] = WorkerFacts(id=name, capability=capability, idle_seconds=0.0)
        for name, one in list(self.workers.items()):
            jobs = [job for job in self.running.get(name, []) if job[1] > self.now]
            for asked, waiting in self.queues.items():
                if one.draining or not one.enabled or not waiting or jobs:
                    continue
                if Place.of_worker(one).serves(Demand(queue=asked.queue_name(), requirement=asked)):
                    self.waits.append(self.now - waiting.pop(0))
                    jobs.append((asked, self.now + task_seconds))
            self.running[name] = jobs
            idle = None if jobs else (one.idle_seconds or 0.0) + 1
            toggled = None if one.toggled_seconds is None else one.toggled_seconds + 1
            self.workers[name] = replace(one, leases=len(jobs), idle_seconds=idle, toggled_seconds=toggled)
            if one.draining and not jobs:
                del self.workers[name], self.machines[name]

    def tick(self, task_seconds: float) -> None:
        asks = {*self.queues, *(job[0] for jobs in self.running.values() for job in jobs)}
        snapshot = Snapshot(
            workers=tuple(self.workers.values()),
            machines=tuple(
                MachineFacts(id=name, family=kind, state="running" if name in self.workers else "launching")
                for name, (kind, _) in self.machines.items()
            ),
            demands=tuple(
                Demand(
                    queue=asked.queue_name(),
                    requirement=asked,
                    waiting={5: len(self.queues.get(asked, []))},
                    running=sum(job[0] == asked for jobs in self.running.values() for job in jobs),
                    oldest_seconds=self.now - min(self.queues.get(asked) or [self.now]),
                    task_seconds=task_seconds,
                )
                for asked in sorted(asks, key=str)
            ),
        )
        for action in decide(snapshot, self.policy):
            self.toggles.append((self.now, str(action.kind), action.worker or action.family))
            if action.kind is Kind.LAUNCH:
                self.count += 1
                self.machines[f"{action.family}-{self.count}"] = (action.family, self.now)
                continue
            one = self.workers[action.worker]
            if action.kind in (Kind.ENABLE, Kind.DISABLE):
                new = replace(one, enabled=action.kind is Kind.ENABLE, toggled_seconds=0.0)
            else:
                new = replace(one, draining=True)
            self.workers[action.worker] = new


SIMULATED = Policy(
    idle_seconds=20,
    cooldown_seconds=20,
    target_backlog_seconds=30,
    min_active=1,
    families=(
        Family(name="small", capability=GPU24, most=5, cost_per_hour=1, target_backlog_seconds=30),
        Family(name="big", capability=GPU80, most=5, cost_per_hour=5, target_backlog_seconds=30),
    ),
)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from((ASK_CPU, ASK_GPU, ASK_80)), min_size=1, max_size=3, unique=True),
    st.integers(1, 3),
    st.sampled_from((2.0, 7.0, 25.0)),
    st.integers(0, 3),
)
def test_under_constant_demand_nothing_is_switched_to_and_fro(
    asks: list[Requirement], each: int, task_seconds: float, workers: int
) -> None:
    world = World(SIMULATED, {f"w{n}": worker(f"w{n}", idle_seconds=0.0) for n in range(workers)})
    for second in range(600):
        for asked in asks:  # so that this many of each wait or run, always
            held = sum(job[0] == asked for jobs in world.running.values() for job in jobs)
            world.add(asked, max(0, each - held - len(world.queues.get(asked, []))))
        if second % 5 == 0:
            world.tick(task_seconds)
        world.step(task_seconds)
    late = [one for one in world.toggles if one[0] > 300]
    assert not late, world.toggles


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.sampled_from((ASK_CPU, ASK_GPU, ASK_80)), st.integers(1, 20)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from((1.0, 5.0, 20.0)),
)
def test_every_task_that_some_kind_serves_ends_and_the_fleet_shrinks(
    bursts: list[tuple[int, Requirement, int]], task_seconds: float
) -> None:
    world = World(SIMULATED)
    total = sum(count for _, _, count in bursts)
    for second in range(2500):
        for at, asked, count in bursts:
            if at == second:
                world.add(asked, count)
        if second % 5 == 0:
            world.tick(task_seconds)
        world.step(task_seconds)
        if len(world.waits) == total and second > 100 and len(world.machines) <= 1 and not any(world.running.values()):
            break
    assert len(world.waits) == total
    assert len(world.machines) <= SIMULATED.min_active
