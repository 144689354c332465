"""Many calls of few prompts from several processes at once, with a killed worker and cancelled callers.

Each prompt that is still wanted is executed once, each caller gets the answer to its own prompt, and nothing is left.
MERGE_CALLS, MERGE_PROMPTS, MERGE_CLIENTS, MERGE_KILLS and MERGE_SEED choose the size; 10000, 1000, 8 is that of the
promise.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from tests.chaos.accounting import leftovers
from tests.chaos.conftest import LEASE
from tests.chaos.merge_callers import TRACE, answer_of
from tests.support.fleet import ROOT, TestFleet, WorkerProcess
from tests.support.waiting import eventually, patient, promised

#: Eight clients and two workers: nothing else should load the machine.
pytestmark = pytest.mark.alone

CALLS = int(os.environ.get("MERGE_CALLS", "800"))
PROMPTS = int(os.environ.get("MERGE_PROMPTS", str(CALLS // 10)))
CLIENTS = int(os.environ.get("MERGE_CLIENTS", "8"))
KILLS = int(os.environ.get("MERGE_KILLS", "1"))
SEED = int(os.environ.get("MERGE_SEED", "7"))
#: How many children a worker has at most. A run whose child has gone is not committed yet, and another may have begun.
JOBS = 2
UNDER_WAY = (TaskState.STARTING, TaskState.RUNNING)
#: Share of the callers that are cancelled, and of the prompts of which all are.
CANCELLED_SHARE = 0.1
ABANDONED_SHARE = 0.03
#: A call is cancelled at most so many submissions of its process after its own.
MAX_CANCEL_LAG = 20
#: How long the whole load may take, in seconds, on a quiet machine: most of it is 25 executions a second.
LOAD_SECONDS = 60 + CALLS / 10


@dataclass(frozen=True, kw_only=True)
class End:
    """How one call ended, as its caller saw it."""

    id: str
    prompt: int
    verdict: str | None
    state: str
    run: str
    output: str | None


class Callers:
    """The client processes."""

    def __init__(self, fleet: TestFleet, shares: Sequence[tuple[list[int], dict[int, int]]]) -> None:
        environment = {
            **os.environ,
            **fleet.env,
            "REDIS_URL": fleet.broker.url,
            "RESULTS_DIR": str(fleet.results),
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]),
        }
        self.processes = []
        for number, (calls, cancel) in enumerate(shares):
            with (fleet.folder / f"caller-{number}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.chaos.merge_callers"],
                    env=environment,
                    cwd=fleet.folder,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self.processes.append(process)
            self._write(process, {"calls": calls, "cancel": cancel, "wait_seconds": patient(LOAD_SECONDS)})

    def begin(self) -> None:
        """Let all of them begin once all are there."""
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in self.processes:
            self._write(process, "begin")

    def ends(self) -> list[End]:
        """Wait for all ends."""
        texts = [process.communicate(timeout=patient(2 * LOAD_SECONDS))[0] for process in self.processes]
        return [End(**end) for text in texts for end in json.loads(text)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            with process:
                process.wait(timeout=patient(30))

    @staticmethod
    def _write(process: subprocess.Popen[str], value: Any) -> None:
        assert process.stdin is not None
        print(json.dumps(value), file=process.stdin, flush=True)


@contextlib.contextmanager
def callers_of(fleet: TestFleet) -> Iterator[Callers]:
    callers = Callers(fleet, shares())
    try:
        yield callers
    finally:
        callers.close()


def shares() -> list[tuple[list[int], dict[int, int]]]:
    """Return for each client the prompts of its calls, and which it cancels: position -> position after which."""
    choice = random.Random(SEED)
    calls = [number % PROMPTS for number in range(CALLS)]
    choice.shuffle(calls)
    abandoned = set(choice.sample(range(PROMPTS), max(1, round(PROMPTS * ABANDONED_SHARE))))
    cancelled = {place for place, prompt in enumerate(calls) if prompt in abandoned}
    others = [place for place in range(CALLS) if place not in cancelled]
    cancelled |= set(choice.sample(others, max(0, round(CALLS * CANCELLED_SHARE) - len(cancelled))))
    size = -(-CALLS // CLIENTS)
    found = []
    for start in range(0, CALLS, size):
        own = calls[start : start + size]
        places = [place - start for place in sorted(cancelled) if start <= place < start + size]
        found.append((own, {place: min(len(own) - 1, place + choice.randrange(MAX_CANCEL_LAG)) for place in places}))
    return found


def kill_while_it_runs(fleet: TestFleet, worker: WorkerProcess) -> list[str]:
    """Kill a worker that has runs under way; return them. It is halted first, so that none of them ends meanwhile."""

    def held() -> list[str]:
        open_runs = [key.split(":")[1] for key in fleet.broker.client.scan_iter("merge:*:calls", count=1000)]
        return [
            record.id
            for record in fleet.app.ledger.find_many(open_runs)
            if record is not None and record.state in UNDER_WAY and record.worker == worker.name
        ]

    def caught() -> list[str]:
        if not held():
            return []
        worker.send(signal.SIGSTOP)
        found = held()
        if not found:
            worker.send(signal.SIGCONT)
        return found

    runs = eventually(caught, within=LOAD_SECONDS, what=f"{worker.name} with a run under way")
    worker.process.kill()
    worker.process.wait(timeout=patient(30))
    return runs


def executions(fleet: TestFleet, run: TaskRecord) -> int:
    """Return how many executions of a run came to their end, by what the executor wrote in each."""
    return sum(1 for _ in Path(fleet.results / run.id).glob(f"attempt-*/{TRACE}"))


@pytest.mark.timeout(patient(400 + CALLS / 5))
def test_every_wanted_prompt_is_executed_once_under_kills_and_cancels(fleet: TestFleet) -> None:
    # Given two workers, and clients whose calls are merged, none of them in batches
    fleet.env.update(LEASE, TASK_MERGE_MAX_BATCH_SIZE="1")
    options = ("--max-jobs", str(JOBS))
    workers = [fleet.spawn_worker(f"w{number}", *options) for number in (1, 2)]
    with callers_of(fleet) as callers:
        for worker in workers:
            worker.ready()

        # When all of them call at once, and workers are killed while they run
        callers.begin()
        killed = []
        for number in range(KILLS):
            wanted = PROMPTS * (number + 1) // (KILLS + 2)
            eventually(
                lambda wanted=wanted: fleet.broker.client.zcard(fleet.app.keys.merge_results) >= wanted,
                within=LOAD_SECONDS,
                what=f"{wanted} answered prompts",
            )
            victim = workers[number % len(workers)]
            killed += kill_while_it_runs(fleet, victim)
            workers[number % len(workers)] = fleet.spawn_worker(victim.name, *options)
        ends = callers.ends()

    # Then each caller has its own end
    assert len(ends) == CALLS
    for end in ends:
        if end.verdict == "cancelled":
            promised(end.state == "CANCELLED", f"{end} was cancelled")
        else:
            promised(end.state == "SUCCEEDED", f"{end} was not cancelled, or too late")
            promised(end.output == answer_of(end.prompt), f"{end} has the answer to another prompt")

    # and each prompt one committed run, which served all callers that had stayed
    check_runs(fleet, ends, killed)
    eventually(lambda: not leftovers(fleet) and not fleet.app.ledger.unfinished(), what="nothing unfinished")
    check_celery(fleet, ends)
    eventually(lambda: not left_of_runs(fleet), within=10, what="no key of a run")
    counts = fleet.app.merger.store.counts()
    assert counts["calls"] == CALLS == sum(counts.get(how, 0) for how in ("new", "coalesced", "hit")), counts


def check_runs(fleet: TestFleet, ends: Sequence[End], killed: Sequence[str]) -> None:
    """Check how often each prompt was executed and committed."""
    records = [record for record in fleet.app.ledger.recent(10 * CALLS) if record.is_run]
    of_prompt: dict[int, set[str]] = {}
    for end in ends:
        if end.state == "SUCCEEDED":
            of_prompt.setdefault(end.prompt, set()).add(end.run)
    promised(all(len(runs) == 1 for runs in of_prompt.values()), f"a prompt was answered by several runs: {of_prompt}")
    answering = {run for runs in of_prompt.values() for run in runs}
    callers = Counter(end.run for end in ends)
    states = {record.id: record.state for record in records}
    for record in records:
        promised(callers[record.id] > 0, f"{record} had no caller")
        expected = (TaskState.SUCCEEDED,) if record.id in answering else (TaskState.CANCELLED, TaskState.SUCCEEDED)
        promised(record.state in expected, f"{record} ended {record.state}; it answers calls: {record.id in answering}")
    promised(answering <= states.keys(), f"runs without a record: {answering - states.keys()}")

    lost = sum(record.losses for record in records)
    attempts = sum(record.attempt for record in records if record.id in answering)
    executed = sum(executions(fleet, record) for record in records if record.id in answering)
    in_vain = sum(executions(fleet, record) for record in records if record.id not in answering)
    promised(attempts <= len(answering) + lost, f"{attempts} attempts for {len(answering)} prompts, {lost} lost")
    promised(len(answering) <= executed <= attempts, f"{executed} executions of {attempts} attempts")
    promised(in_vain <= len(records) - len(answering), f"{in_vain} executions that nobody wanted any more")
    assert lost <= len(killed), f"{lost} attempts lost; under way were {killed}"
    spared = [record for record in records if record.id in answering.intersection(killed) and not record.losses]
    assert not spared, f"runs that were killed and lost no attempt: {spared}"
    print(
        f"{len(ends)} calls of {PROMPTS} prompts from {CLIENTS} processes: {len(answering)} runs answered, "
        f"{len(records) - len(answering)} were left by all, {executed} + {in_vain} executions, {lost} attempts lost by "
        f"{KILLS} kills; {fleet.app.merger.store.counts()}"
    )


def check_celery(fleet: TestFleet, ends: Sequence[End]) -> None:
    """Check that Celery has the same end of each call."""
    wanted = {"SUCCEEDED": "SUCCESS", "CANCELLED": "REVOKED"}
    metas = {end: fleet.app.backend.get_task_meta(end.id, cache=False) for end in ends}
    wrong = {end: meta["status"] for end, meta in metas.items() if meta["status"] != wanted[end.state]}
    promised(not wrong, f"Celery has other ends: {wrong}")
    others = [end for end, meta in metas.items() if end.output and meta["result"]["output"] != end.output]
    promised(not others, f"Celery has other results: {others}")


def left_of_runs(fleet: TestFleet) -> list[str]:
    """Return the keys of runs that should be gone; results that may be used again expire."""
    client = fleet.broker.client
    keys = [key for key in client.scan_iter("merge:*", count=1000) if not key.startswith("merge:call:")]
    return keys + [key for key in client.scan_iter("merge:call:*", count=1000) if client.ttl(key) < 0]
