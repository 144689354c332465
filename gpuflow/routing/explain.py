"""Why does a task wait? From what is known of the task, its queue and the workers to an answer for people and programs.

Pure: the same views give the same answer. `gpuflow.explaining` gathers the views; the command line prints
`to_lines()`, the API and `--json` give `to_dict()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from gpuflow.protocol import is_user_type
from gpuflow.routing.describe import ago, describe
from gpuflow.routing.offers import is_function, task_type_of
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.resources import format_resources
from gpuflow.routing.situation import IN_WORDS, PASSING, Distance, Situation, judge
from gpuflow.routing.views import QueueView, TaskView, WorkerView

#: Schema number of `to_dict()`. Fields are added, never renamed, within one number.
EXPLANATION_SCHEMA: Final = 1
#: Workers of one heading that are listed for people; the others are counted.
MAX_LISTED: Final = 12

Outcome = Literal["starts", "waits", "cannot", "runs", "ended"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The answer for one task. `workers` begin with who can take it and end with the farthest miss (`Distance`)."""

    task: TaskView
    queue: QueueView
    requirement: Requirement
    outcome: Outcome
    verdict: str
    workers: tuple[Situation, ...]

    @property
    def capable(self) -> tuple[Situation, ...]:
        """The workers whose machine has what is asked for."""
        return tuple(worker for worker in self.workers if worker.fits)

    @property
    def others(self) -> tuple[Situation, ...]:
        """The workers that fail a requirement, the nearest miss first."""
        return tuple(worker for worker in self.workers if not worker.fits)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; documented in docs/reference/explain.md."""
        return {
            "schema": EXPLANATION_SCHEMA,
            "id": self.task.id or None,
            "name": self.task.name,
            "state": self.task.state,
            "priority": self.task.priority,
            "outcome": self.outcome,
            "verdict": self.verdict,
            "queue": self.queue.name,
            "depth": self.queue.depth,
            "place": self.queue.place,
            "oldestSeconds": self.queue.oldest_seconds,
            "requirement": self.requirement.to_dict(),
            "resources": format_resources(self.requirement),
            "workers": [worker.to_dict() for worker in self.workers],
        }

    def to_lines(self) -> list[str]:
        """Return the answer for people."""
        named = f"{self.task.name} ({self.task.id})" if self.task.id else self.task.name
        lines = [
            f"{named}: {self.verdict}",
            f"  asks for: {describe(self.requirement)}",
            f"  queue:    {self._queue()}",
        ]
        there = [one for one in self.capable if one.distance < Distance.GONE]
        lines.extend(f"  limits:   {text}" for text in _limits(there))
        sections: tuple[tuple[str, str, Sequence[Situation]], ...] = (
            ("that have what it asks for", "", there),
            ("with a GPU that cannot be used", "the task ", self._at(Distance.HINDERED, fits=False)),
            ("that could run it, were they started again", "", self._at(Distance.GONE, fits=True)),
            ("that cannot run it, the nearest miss first", "the task ", self._at(Distance.UNFIT, fits=False)),
        )
        for heading, subject, workers in sections:
            if workers:
                lines.append(f"  workers {heading}:")
                lines.extend(_listed(workers, subject))
        return [" ".join(line.splitlines()) for line in lines]

    def _at(self, distance: Distance, *, fits: bool) -> list[Situation]:
        return [one for one in self.workers if one.distance is distance and one.fits is fits]

    def _queue(self) -> str:
        queue = self.queue
        if queue.depth is None:
            return queue.name
        waiting = "nothing waits in it" if not queue.depth else "1 task waits in it" if queue.depth == 1 else ""
        told = [queue.name, waiting or f"{queue.depth} tasks wait in it"]
        if queue.place is not None:
            told.append("this one is next" if queue.place == 1 else f"this one is number {queue.place}")
        if queue.oldest_seconds is not None and queue.depth:
            told.append(f"the oldest has waited for {ago(queue.oldest_seconds)}")
        return ", ".join(told)


def explain(requirement: Requirement, task: TaskView, queue: QueueView, workers: Sequence[WorkerView]) -> Explanation:
    """Explain where a task stands.

    Workers that are gone are told only where they would take it if they were started again; those that have stopped by
    themselves, which nobody misses, only where no other will. Of equal ones the one that was last heard of is first:
    a container that is started again leaves the names behind that it had before.
    """
    judged = [judge(requirement, queue.name, task, worker) for worker in workers]
    gone = {worker.id for worker in workers if worker.state == "OFFLINE"}
    stopped = {worker.id for worker in workers if worker.stopped}
    told = [one for one in judged if one.would_take_it or one.worker not in gone]
    if any(one.kind in PASSING and one.worker not in stopped for one in told):
        told = [one for one in told if one.worker not in stopped]
    silent = {worker.id: worker.silent_seconds or 0.0 for worker in workers}
    told.sort(key=lambda one: (*one.order, silent[one.worker], one.worker))
    outcome, verdict = _verdict(requirement, task, queue, told)
    return Explanation(
        task=task, queue=queue, requirement=requirement, outcome=outcome, verdict=verdict, workers=tuple(told)
    )


def _verdict(ask: Requirement, task: TaskView, queue: QueueView, workers: Sequence[Situation]) -> tuple[Outcome, str]:
    state = task.state
    if state in ("SUCCEEDED", "FAILED", "CANCELLED", "DEAD"):
        return "ended", f"has ended: {state}"
    if state in ("STARTING", "RUNNING"):
        since = "" if task.running_seconds is None else f", started {ago(task.running_seconds)} ago"
        return "runs", f"runs on {task.worker or 'a worker'} (attempt {task.attempt}){since}"
    if state == "MERGED":
        return "waits", "waits for the result of an equal call, which it was merged with"
    if (task.wait_seconds or 0) > 0:
        return "waits", f"waits: attempt {task.attempt + 1} begins in {ago(task.wait_seconds or 0)} at the earliest"
    capable = [one for one in workers if one.fits]
    free = [one for one in capable if one.kind == "free"]
    if free:
        return _free_verdict(queue, free)
    passing = [one for one in capable if one.kind in PASSING]
    if passing:
        return "waits", ("waits: " if state else "would wait: ") + _who(capable)
    return "cannot", "cannot start: " + _cause(queue, task, workers)


def _free_verdict(queue: QueueView, free: Sequence[Situation]) -> tuple[Outcome, str]:
    first = free[0]
    stand = "have room" if any(one.tasks for one in free) else "are free"
    who = f"{len(free)} workers {stand}, such as {first.worker}" if free[1:] else f"{first.worker} {first.text}"
    if queue.place is not None and queue.place > 1:
        return "waits", f"waits its turn: number {queue.place} in its queue; {who}"
    return "starts", f"can start now: {who}"


def _cause(queue: QueueView, task: TaskView, workers: Sequence[Situation]) -> str:
    """Return why nobody will take it: what keeps the nearest away, and what to do; then who else could be started."""
    gone = [one for one in workers if one.distance is Distance.GONE]
    there = [one for one in workers if one.distance < Distance.GONE]
    if gone and not there:
        unable = next((one for one in workers if not one.fits), None)
        # Those that have gone may never come back: containers whose limits were lowered, say.
        beside = (
            f" (of those that are there {unable.worker} is the nearest, but the task {unable.text})" if unable else ""
        )
        return _kept(queue, task, gone) + beside
    capable = [one for one in there if one.fits]
    text = _kept(queue, task, capable, left=bool(gone)) if capable else _nobody(workers, left=bool(gone))
    if not gone:
        return text
    first = gone[0]
    which = f"one of {len(gone)} that have gone" if len(gone) > 1 else f"which {_went(first)}"
    joint = ", such as" if text.endswith("start another one") else "; or start"
    return f"{text}{joint} {first.worker}, {which}"


def _went(one: Situation) -> str:
    return "has stopped" if one.stopped else "is gone"


def _gone_or_stopped(several: Sequence[Situation]) -> str:
    stopped = {one.stopped for one in several}
    return "are gone or have stopped" if len(stopped) > 1 else "have stopped" if True in stopped else "are gone"


def _who(capable: Sequence[Situation], *, left: bool = False) -> str:
    """Return who could run it and why nobody does now. `left`: others that could have gone."""
    first = capable[0]
    if len(capable) == 1:
        who = f"left, {first.worker}," if left else first.worker
        return f"the only capable worker {who} {first.text}"
    counts = Counter(one.kind for one in capable)
    if len(counts) == 1:
        all_of = "both" if len(capable) == 2 else f"all {len(capable)}"
        stand = _gone_or_stopped(capable) if first.kind == "offline" else f"are {IN_WORDS[first.kind]}"
        return f"{all_of} capable workers{' left' if left else ''} {stand}; {first.worker} {first.text}"
    parts = ", ".join(f"{count} {IN_WORDS[kind]}" for kind, count in counts.items())
    return f"{len(capable)} workers can run it, none of them now: {parts}"


def _kept(queue: QueueView, task: TaskView, capable: Sequence[Situation], *, left: bool = False) -> str:
    """Return why the capable workers will not take it, and the mend if there is one for all."""
    task_type = task_type_of(task.executor)
    lacking = [one for one in capable if one.mend]
    mends = {
        "disk_full": "make room there",
        "outdated": "upgrade gpuflow there",
        "restricted": f"start one without -Q, or with -Q {queue.name}",
        "no_executor": (
            f"run {lacking[0].mend} on the machine of {lacking[0].worker}"
            if lacking
            else f"install the package of {task_type} there and start it again"
            if is_user_type(task_type)
            else "start one with --include and its module"
            if is_function(task_type)
            else f"start one without --executors, or with {task_type} among them"
        ),
        "draining": "start another one",
        "silent": "look after it, or start another one",
        "offline": "start it again",
    }
    kinds = {one.kind for one in capable}
    is_one = len(kinds) == 1 and not (capable[0].also and capable[0].distance < Distance.GONE)
    mend = mends.get(kinds.pop(), "") if is_one else "start another one"
    who = _who(capable, left=left)
    return f"{who}; {mend}" if mend else who


def _nobody(workers: Sequence[Situation], *, left: bool = False) -> str:
    """Return that no machine has what is asked for, and what the nearest has not."""
    unable = [one for one in workers if not one.fits]
    if not unable:
        return "no worker is there; start one with `celery -A gpuflow worker`"
    nearest = unable[0]
    who = (
        f"the only worker{' left' if left else ''}, {nearest.worker}, cannot run it"
        if len(unable) == 1
        else (f"none of {len(unable)} workers {'left ' if left else ''}can run it; the nearest is {nearest.worker}")
    )
    return f"{who}: the task {nearest.text}"


def _limits(workers: Sequence[Situation]) -> Iterator[str]:
    """Yield which workers hold the task to the memory and CPUs that it asks for, by what, and which do not."""
    by: dict[tuple[str, str], list[str]] = {}
    for one in workers:
        if one.limits is not None:
            by.setdefault(one.limits, []).append(one.worker)
    for (how, why), ids in sorted(by.items()):
        where = ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
        held = "memory and CPUs are declared, not enforced," if how == "none" else f"enforced by {how}"
        yield f"{held} on {where}" + (f" ({why})" if why else "")


def _listed(workers: Sequence[Situation], subject: str) -> Iterator[str]:
    width = max(len(one.worker) for one in workers[:MAX_LISTED])
    for one in workers[:MAX_LISTED]:
        yield f"    {one.worker.ljust(width)}  {subject}{one.text}"
    if len(workers) > MAX_LISTED:
        yield f"    and {len(workers) - MAX_LISTED} more"
