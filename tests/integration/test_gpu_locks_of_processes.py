"""The GPU locks under several processes that use one directory, and under kills at every step."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpuflow.fleet.gpu_locks import GpuLocks
from gpuflow.fleet.gpu_usage import alive
from tests.fixtures import gpu_locks_driver as driver
from tests.support.waiting import eventually, patient, promised

SCRIPT = str(Path(driver.__file__))
PROCESSES = 5
VICTIMS = 3
ROUNDS = 150
FOR_EVER = 1_000_000


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts the driver; what still runs at the end of the test is killed."""
    with ExitStack() as stack:

        def run(*arguments: object) -> subprocess.Popen[str]:
            argv = [sys.executable, "-W", "error", SCRIPT, *map(str, arguments)]
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


def intervals(lines: list[dict[str, Any]], killed_at: int) -> list[tuple[int, int, dict[str, Any]]]:
    """Return (begin, end, ask) of all that one process has held."""
    begun: dict[int, dict[str, Any]] = {}
    found = []
    for line in lines:
        if "begin" in line:
            begun[line["n"]] = line
        elif "end" in line:
            what = begun.pop(line["n"])
            found.append((what["begin"], line["end"], what))
    return found + [(what["begin"], max(what["begin"], killed_at), what) for what in begun.values()]


def conflicts(held: list[tuple[int, int, dict[str, Any]]]) -> list[str]:
    """Go through all beginnings and ends in the order of time; return every moment at which a GPU is held twice."""
    events: list[tuple[int, int, dict[str, Any]]] = []
    for begin, end, what in held:
        events += [(begin, 1, what), (end, 0, what)]  # what ends at the same time as another begins comes first
    whole: dict[str, int] = defaultdict(int)
    slices: dict[str, int] = defaultdict(int)
    shares: dict[str, int] = defaultdict(int)
    wrong = []
    for at, begins, what in sorted(events, key=lambda event: event[:2]):
        for uuid in what["uuids"]:
            step = 1 if begins else -1
            if "share_mib" in what:
                shares[uuid] += step * what["share_mib"]
            else:
                whole[uuid] += step
                if uuid in driver.PARENTS:
                    slices[driver.PARENTS[uuid]] += step
        for uuid in [*driver.GPUS, *driver.PARENTS]:
            used = [bool(whole[uuid]), bool(slices[uuid]), bool(shares[uuid])]
            if whole[uuid] > 1 or sum(used) > 1 or shares[uuid] > driver.CAPACITY_MIB:
                wrong.append(
                    f"{uuid} at {at}: {whole[uuid]} whole, {slices[uuid]} slices, {shares[uuid]} MiB of shares"
                )
    return wrong


@pytest.mark.parametrize("seed", [1, 2])
def test_no_gpu_is_ever_held_twice(tmp_path: Path, start: Start, seed: int) -> None:
    locks, dice = tmp_path / "locks", random.Random(seed)
    started: list[tuple[Path, subprocess.Popen[str]]] = []
    for number in range(PROCESSES):
        log = tmp_path / f"{number}.log"
        rounds = FOR_EVER if number < VICTIMS else ROUNDS
        started.append((log, start("random", locks, log, seed * 100 + number, rounds)))
    killed_at: dict[Path, int] = {}
    for log, process in started[:VICTIMS]:  # killed somewhere in the middle, and new ones take their place
        least = dice.randint(10, 80)
        eventually(lambda log=log, least=least: _lines(log) > least, within=60, what="some work of the process")
        killed_at[log] = time.monotonic_ns()
        process.kill()
        assert process.wait(patient(30)) == -signal.SIGKILL
        again = log.with_suffix(".again")
        started.append((again, start("random", locks, again, seed * 100 + 50 + len(started), ROUNDS)))

    ended = [process.wait(patient(100)) for log, process in started if log not in killed_at]

    assert ended == [0] * PROCESSES, "every process comes to its end"
    held, taken, refused = [], 0, 0
    for log, _ in started:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        held += intervals(lines, killed_at.get(log, 0))
        taken += sum(line.get("taken", 0) for line in lines)
        refused += sum(line.get("refused", 0) for line in lines)
    promised(not (twice := conflicts(held)), f"GPUs were held twice: {twice}")
    assert taken > ROUNDS / 5, "somebody gets what it wants"
    assert refused > ROUNDS / 10, "they do get in each other's way"
    print(f"{len(held)} holds, {refused} refusals, {len(killed_at)} processes killed")
    driver.check_takeable(locks)


def _lines(log: Path) -> int:
    return log.read_text().count("\n") if log.exists() else 0


def test_the_check_itself_sees_a_gpu_that_is_held_twice() -> None:
    share, whole = {"uuids": ["GPU-0"], "share_mib": 9000}, {"uuids": ["GPU-4"]}
    assert conflicts([(0, 10, share), (5, 15, share)])
    assert conflicts([(0, 10, whole), (5, 15, {"uuids": ["MIG-1"]})])
    assert conflicts([(0, 10, whole), (9, 15, whole)])
    assert conflicts([(0, 10, share), (10, 15, share), (0, 99, whole)]) == []


def test_a_process_killed_at_any_step_leaves_nothing_taken(tmp_path: Path, start: Start) -> None:
    told, _ = (process := start("steps", tmp_path, *driver.ACTIONS)).communicate(timeout=patient(110))
    assert process.returncode == 0
    steps = {line["action"]: line["steps"] for line in map(json.loads, told.splitlines())}
    assert set(steps) == set(driver.ACTIONS)
    assert min(steps.values()) > 20
    print(f"killed at {sum(steps.values())} steps: {steps}")


def test_a_killed_worker_leaves_the_gpu_with_the_shim_until_its_child_is_gone(tmp_path: Path, start: Start) -> None:
    ledger = GpuLocks(tmp_path)
    worker = start("child", tmp_path, "GPU-0")
    assert worker.stdout is not None
    shim, child = map(int, worker.stdout.readline().split())
    os.kill(shim, signal.SIGSTOP)
    worker.kill()
    worker.wait()
    assert ledger.free(["GPU-0", "GPU-1"]) == ("GPU-1",)
    assert ledger.claim(["GPU-0"]) is None
    os.kill(shim, signal.SIGCONT)
    eventually(lambda: ledger.free(["GPU-0"]) == ("GPU-0",), within=20, what="the end of the shim")
    assert not alive(child)


def test_two_processes_share_a_gpu_as_far_as_its_memory_goes(tmp_path: Path, start: Start) -> None:
    ledger = GpuLocks(tmp_path)
    other = start("hold", tmp_path, json.dumps({"uuids": ["GPU-0"], "share_mib": 9000}))
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    capacity = {"GPU-0": driver.CAPACITY_MIB, "GPU-1": driver.CAPACITY_MIB}
    assert ledger.room(capacity) == {"GPU-0": 7000, "GPU-1": 16_000}
    assert ledger.claim(["GPU-0"], share_mib=7001, capacity_mib=capacity) is None
    with ledger.claim(["GPU-0"], share_mib=7000, capacity_mib=capacity) or pytest.fail("there is room"):
        assert ledger.room(capacity)["GPU-0"] == 0
    assert ledger.free(["GPU-0"]) == ()
    other.kill()
    other.communicate()
    assert ledger.free(["GPU-0"]) == ("GPU-0",)
    assert [path.name for path in tmp_path.glob("share-*")] == []


def test_a_fork_that_goes_on_keeps_no_gpu(tmp_path: Path, start: Start) -> None:
    process = start("fork", tmp_path, "GPU-0")
    assert process.stdout is not None
    assert process.stdout.readline() == "given back\n"
    ledger = GpuLocks(tmp_path)
    eventually(lambda: ledger.free(["GPU-0"]) == ("GPU-0",), within=20, what="the fork's closing of what it inherited")
    process.communicate()


def test_a_frozen_worker_with_the_mutex_stops_others_from_taking_but_not_for_ever(tmp_path: Path) -> None:
    ledger = GpuLocks(tmp_path, mutex_wait_seconds=0.05)
    frozen = GpuLocks(tmp_path)
    with frozen.locked() as had:
        assert had is not None
        assert ledger.claim(["GPU-0"]) is None
        assert ledger.free(["GPU-0"]) == ()
    assert ledger.claim(["GPU-0"]) is not None
