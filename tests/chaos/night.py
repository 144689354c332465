"""What every view of a fleet says, compared with the truth of its processes.

`Night` knows what a test has done to the workers and tasks, and asks everybody: `gpuflow workers`, `queues`, `status`,
`explain` and `doctor`, the monitor, the metrics, and what scales. `contradictions()` names who says something else.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from click.testing import CliRunner

from gpuflow.cli import cli
from gpuflow.client import Task, submit
from gpuflow.explaining import explain_queues
from gpuflow.fleet.standing import KINDS
from gpuflow.metrics.families import families
from gpuflow.metrics.reading import read as read_metrics
from gpuflow.monitor.reading import read_fleet
from gpuflow.routing.situation import PASSING
from gpuflow.scaling.snapshot import read as read_scaling
from tests.chaos.accounting import orphans
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient, promised

#: What keeps a worker from new work.
TAKES_NOTHING: Final = frozenset({"offline", "silent", "draining", "disabled", "connecting", "disk-full"})
#: What `gpuflow doctor` warns of.
WARNED: Final = frozenset(KINDS) - {"offline", "draining", "disabled", "connecting"}
#: Views that disagree in so many looks, one after the other, do not merely see one moment after another.
LOOKS: Final = 4
#: A new worker starts, and one that is silent is found to be, within so many seconds.
SETTLE_SECONDS: Final = 45.0


@dataclass(kw_only=True)
class Views:
    """One round of all views: workers -> kinds of how they stand; who takes new work; tasks of the queue; states."""

    standing: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)
    takers: dict[str, frozenset[str]] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    #: Who runs each task that runs.
    holders: dict[str, dict[str, str]] = field(default_factory=dict)
    warned: dict[str, frozenset[str]] = field(default_factory=dict)
    #: Tasks that workers which have gone are said to run.
    ghosts: dict[str, dict[str, int]] = field(default_factory=dict)


class Night:
    """A fleet whose tasks wait in one queue, `cpu`, and what is true of it."""

    def __init__(self, fleet: TestFleet) -> None:
        self.fleet = fleet
        self.workers: dict[str, WorkerProcess] = {}
        #: What each worker is expected to be, beside IDLE and BUSY.
        self.stands: dict[str, frozenset[str]] = {}
        self.tasks: dict[str, Task] = {}
        #: What each task is expected to be.
        self.states: dict[str, str] = {}
        #: How often all views were asked.
        self.looks = 0
        self._gates: dict[str, Path] = {}
        self._template = fleet.folder / "probe.yaml"
        self._template.write_text("taskType: echo\necho: {output: 1}\n")
        self._env = {
            **fleet.env,
            "REDIS_URL": fleet.broker.url,
            "HOME": str(fleet.folder),
            "GPUFLOW_STATE_DIR": str(fleet.settings.state_dir),
        }

    # -- what is done ------------------------------------------------------------------------------------------------

    def start(self, name: str, **env: str) -> WorkerProcess:
        """Start a worker, or start it again."""
        self.workers[name] = self.fleet.spawn_worker(name, "--max-jobs", "16", env=env)
        self.stands[name] = frozenset()
        return self.workers[name]

    def stop(self, name: str) -> None:
        """Stop a worker and forget it."""
        self.workers.pop(name).stop()
        self.stands.pop(name)
        self.fleet.registry.forget(name)

    def submit(self, spec: Mapping[str, Any], state: str) -> Task:
        """Submit a task of which `state` is expected."""
        task = submit(spec, app=self.fleet.app)
        self.tasks[task.id], self.states[task.id] = task, state
        return task

    def hold(self) -> Task:
        """Submit a task that runs until `end` is called for it."""
        gate = self.fleet.folder / f"gate-{len(self.tasks)}"
        task = self.submit(self.fleet.echo(output=len(self.tasks), until_exists=str(gate)), "RUNNING")
        self._gates[task.id] = gate
        return task

    def running(self) -> list[Task]:
        """Return the tasks that are expected to run."""
        return [task for task_id, task in self.tasks.items() if self.states[task_id] == "RUNNING"]

    def end(self, task: Task) -> None:
        """Let a task end."""
        self._gates[task.id].touch()
        self.states[task.id] = "SUCCEEDED"

    def order(self, *words: str) -> None:
        """Give a command of `gpuflow workers`."""
        done = CliRunner().invoke(cli, ["workers", *words], env=self._env)
        assert done.exit_code == 0, (words, done.output, done.exception)

    def worker_of(self, task: Task) -> str:
        """Return where a task runs, as its record says."""
        return str(eventually(lambda: task.state == "RUNNING" and task.record().worker, what=f"{task.id} running"))

    # -- what is said ------------------------------------------------------------------------------------------------

    def settled(self, after: str) -> None:
        """Wait until all views say what is true; fail with who does not. They agree with each other all the time."""
        deadline = time.monotonic() + patient(SETTLE_SECONDS)
        disagreed = 0
        while True:
            views = self.look()
            torn = list(disagreements(views))
            disagreed = disagreed + 1 if torn else 0
            promised(disagreed < LOOKS, f"after {after} the views contradict each other: {torn}")
            wrong = list(self.contradictions(views)) + list(self.strangers())
            if not wrong and not torn:
                return
            promised(time.monotonic() < deadline, f"after {after}: {wrong + torn}")

    def contradictions(self, views: Views) -> Iterable[str]:
        """Yield what views say that is not true."""
        for view, said in views.standing.items():
            for name, kinds in self.stands.items():
                if said.get(name, frozenset({"offline"})) != kinds:
                    yield f"{view} says of {name} {sorted(said.get(name, ['nothing']))}, it is {sorted(kinds)}"
        takers = frozenset(name for name, kinds in self.stands.items() if not kinds & TAKES_NOTHING)
        for view, said_takers in views.takers.items():
            if said_takers != takers:
                yield f"{view} says that {sorted(said_takers)} take work, {sorted(takers)} do"
        counted = Counter(self.states[task_id] for task_id, task in self.tasks.items() if task.record().queue == "cpu")
        for view, counts in views.counts.items():
            if counts != (counted["QUEUED"], counted["RUNNING"]):
                yield f"{view} counts {counts}, there are {counted}"
        for view, states in views.states.items():
            for task_id, state in self.states.items():
                if states.get(task_id) != state:
                    yield f"{view} says {states.get(task_id)} of {task_id}, it is {state}"
        if views.holders["status"] != views.holders["workers"]:  # a worker tells of an end a moment later
            yield f"who runs what: {views.holders}"
        for view, ghosts in views.ghosts.items():
            if ghosts:
                yield f"{view} says that workers which have gone run tasks: {ghosts}"
        for kind in WARNED:
            whom = frozenset(name for name, kinds in self.stands.items() if kind in kinds)
            if views.warned.get(kind, frozenset()) != whom:
                yield f"doctor warns of {kind}: {sorted(views.warned.get(kind, []))}, it is {sorted(whom)}"

    def strangers(self) -> Iterable[str]:
        """Yield tasks whose processes do not say what their states say."""
        frozen = {
            child.pid
            for worker in self.workers.values()
            if psutil.pid_exists(worker.pid) and psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
            for child in worker.children()
        }
        alive = {task_id for pid, task_id in orphans(self.fleet, self.tasks).items() if pid not in frozen}
        for task_id, state in self.states.items():
            if (state == "RUNNING") is not (task_id in alive):
                yield f"{task_id} is {state}, and {'a' if task_id in alive else 'no'} process of it runs"

    def look(self) -> Views:
        """Ask everybody."""
        fleet, found = self.fleet, Views()
        self.looks += 1
        workers = {one["id"]: one for one in self.said("workers", "list", "--all")}
        found.standing["workers"] = {name: _kinds(one["standing"]) for name, one in workers.items()}
        rows = {row.entry.id: row for row in read_fleet(fleet.app).workers}
        found.standing["the monitor"] = {
            name: frozenset(one.kind for one in row.standings) for name, row in rows.items()
        }
        found.ghosts = {
            "workers": {name: len(one["tasks"]) for name, one in workers.items() if one["state"] == "OFFLINE"},
            "the monitor": {name: len(row.tasks) + row.more_tasks for name, row in rows.items() if row.entry.is_gone},
        }
        found.ghosts = {view: {name: n for name, n in said.items() if n} for view, said in found.ghosts.items()}
        told = {row["name"]: row for row in self.said("queues")}.get("cpu", _EMPTY)
        shown = {row["name"]: row for row in explain_queues(fleet.app)}.get("cpu", _EMPTY)
        (explained,) = self.said("explain", str(self._template))
        found.takers = {
            "queues": frozenset(told["workers"]),
            "the monitor": frozenset(shown["workers"]),
            "explain": frozenset(
                one["id"] for one in explained["workers"] if one["situation"] in PASSING - {"connecting"}
            ),
        }
        readings = read_metrics(fleet.app.redis, fleet.app.keys, fleet.settings.task_topic)
        measured = _samples(families(readings))
        scaled = read_scaling(fleet.app.redis, fleet.app.keys, fleet.settings.task_topic).snapshot
        demand = next((one for one in scaled.demands if one.queue == "cpu"), None)
        found.counts = {
            "queues": (told["waiting"], told["running"]),
            "the monitor": (shown["waiting"], shown["running"]),
            "metrics": (
                int(measured.get(("gpuflow_queue_tasks", "cpu", "waiting"), 0)),
                int(measured.get(("gpuflow_queue_tasks", "cpu", "running"), 0)),
            ),
        }
        if demand is not None:
            found.counts["scaling"] = (sum(demand.waiting.values()), demand.running)
        tasks = self.said("status", "--limit", "100000")["tasks"]
        found.states["status"] = {one["id"]: one["state"] for one in tasks}
        found.holders = {
            "status": {one["id"]: one["worker"] for one in tasks if one["state"] == "RUNNING"},
            "workers": {task: name for name, one in workers.items() for task in one["tasks"]},
        }
        found.states["status of one"] = {task_id: str(task.state) for task_id, task in self.tasks.items()}
        checks = {one["name"]: one for one in self.said("doctor")["checks"]}
        for kind in WARNED:
            check = checks.get(f"{kind.replace('-', ' ')} workers", {"detail": ""})
            found.warned[kind] = frozenset(part.split(" ", 1)[0] for part in check["detail"].split("; ") if part)
        return found

    def warning(self, check: str) -> str:
        """Return what `gpuflow doctor` warns of."""
        checks = [one for one in self.said("doctor")["checks"] if (one["name"], one["status"]) == (check, "warn")]
        return "; ".join(one["detail"] for one in checks)

    def said(self, *command: str) -> Any:
        """Return what a command prints as JSON."""
        done = CliRunner().invoke(cli, [*command, "--json"], env=self._env)
        assert done.exit_code in (0, 1), (command, done.output, done.exception)
        return json.loads(done.stdout)


_EMPTY: Final[dict[str, Any]] = {"workers": [], "waiting": 0, "running": 0}


def disagreements(views: Views) -> Iterable[str]:
    """Yield where two views say different things of the same."""
    for what, said in (("who stands how", views.standing), ("who takes work", views.takers),
                       ("how many wait and run", views.counts), ("states", views.states)):  # fmt: skip
        (first, reference), *others = said.items()
        for other, claim in others:
            if claim != reference:
                yield f"{what}: {first} {reference}, {other} {claim}"


def _kinds(told: Iterable[Any]) -> frozenset[str]:
    return frozenset(one["kind"] for one in told)


def _samples(metrics: Iterable[Any]) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for metric in metrics for sample in metric.samples}
