"""The example examples/from-celery: before, on stock Celery's worker; after, with five lines changed, on ours."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

import gpuflow
from gpuflow.cli.logs import stored
from gpuflow.client import Task
from gpuflow.worker.cgroups import NoCgroups, find_cgroups
from tests.support.boxes import Box
from tests.support.examples import ROOT
from tests.support.fleet import Broker, TestFleet, WorkerProcess, gone
from tests.support.waiting import eventually, patient

BEFORE, AFTER = (ROOT / "examples" / "from-celery" / when / "jobs.py" for when in ("before", "after"))
#: Lines that may be changed.
FEW: Final = 5
#: The grace of the workers of tests (GPUFLOW_GRACE_SEC), in seconds.
GRACE_SECONDS: Final = 1
#: What the end of a call takes beside its limit or its grace, on a machine that does other work too, in seconds.
BESIDE_SECONDS: Final = 5
#: What a call asks for that is held to half a GiB.
HALF_A_GIB: Final = {"hardware": {"gpu": {"count": 1, "memory": "24GB"}, "memory": "512MiB"}}

#: Options of a stock worker's command line, which may stay.
OF_STOCK: Final = ("-c", "8", "--max-tasks-per-child", "1", "-O", "fair")
#: Two trainings at once, and a chain, by plain Celery.
_ON_STOCK: Final = """
import json, jobs
seen = [one.get(timeout=300) for one in [jobs.train.delay(1), jobs.train.delay(1)]]
print(json.dumps({"seen": seen, "vectors": jobs.index("one\\nfour").delay().get(timeout=300)["vectors"]}))
"""


def test_few_lines_are_changed() -> None:
    before, after = (path.read_text("utf-8").splitlines() for path in (BEFORE, AFTER))
    steps = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()

    changed = sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in steps if tag != "equal")

    assert 0 < changed <= FEW


def test_before_runs_on_a_stock_worker_where_each_task_sees_every_gpu(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "broker")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CELERY_")},
        "REDIS_URL": broker.url,
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONPATH": str(BEFORE.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    python = [sys.executable]
    try:
        with (tmp_path / "worker.log").open("wb") as log:
            worker = subprocess.Popen(
                [*python, "-m", "celery", "-A", "jobs", "worker", "-P", "prefork", "-c", "2", "-l", "INFO"],
                cwd=tmp_path, env=env, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            done = subprocess.run(
                [*python, "-c", _ON_STOCK], cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
                timeout=patient(60),
            )  # fmt: skip
            assert done.returncode == 0, done.stderr + (tmp_path / "worker.log").read_text()
            assert json.loads(done.stdout) == {"seen": ["0,1", "0,1"], "vectors": [[3], [4]]}
            assert "gpuflow" not in (tmp_path / "worker.log").read_text()
        finally:
            worker.terminate()
            try:
                worker.wait(timeout=patient(20))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait(timeout=patient(20))
    finally:
        broker.close()


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One broker for all tests of this file."""
    return long_fleet


@pytest.fixture(scope="module")
def jobs(fleet: TestFleet) -> Iterator[Any]:
    """The module of the example, with its tasks on the app of this fleet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpuflow, "app", fleet.app)
        patch.setattr(sys, "dont_write_bytecode", True)
        spec = importlib.util.spec_from_file_location("jobs", AFTER)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def worker(fleet: TestFleet) -> Iterator[WorkerProcess]:
    """A worker with two GPUs that holds calls to the memory that they ask for, as this machine can."""
    path = os.pathsep.join([str(AFTER.parent), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "GPUFLOW_TASK_LIMITS": "address-space"}
    if "GPUFLOW_TEST_CGROUP" in os.environ:
        env["GPUFLOW_CGROUP"] = os.environ["GPUFLOW_TEST_CGROUP"]
    with Box(fleet, "two", "2xA100-80GB") as box:
        yield box.start("two", "--include", "jobs", *OF_STOCK, **env)


@pytest.fixture
def kept(fleet: TestFleet, jobs: Any, worker: WorkerProcess) -> Iterator[None]:
    """No process is left of what a test has called: those of the worker are those that it had before."""
    jobs.train.delay(0).get(timeout=patient(60))  # what calls are forked from is there
    eventually(lambda: not functions(worker), what="the end of the first call")
    before = {one.pid for one in worker.children()}
    yield
    gone([one.pid for one in worker.children() if one.pid not in before], what="no process of a call")


def functions(worker: WorkerProcess) -> list[int]:
    """Return the processes of calls that run on a worker."""
    return [one.pid for one in worker.children() if one.cmdline()[-2:] == ["-m", "gpuflow.functions"]]


def printed(fleet: TestFleet, sent: Any) -> str:
    return "\n".join(str(event.data.get("message")) for event in stored(fleet.app, Task(sent.id, fleet.app)))


def test_two_at_once_see_their_own_gpu_alone(fleet: TestFleet, jobs: Any, worker: WorkerProcess, kept: None) -> None:
    sent = [jobs.train.delay(600), jobs.train.delay(600)]
    eventually(lambda: all("train on GPU-" in printed(fleet, one) for one in sent), what="what both print")

    assert [fleet.state(one.id) for one in sent] == ["RUNNING", "RUNNING"]
    assert [one.state for one in sent] == ["STARTED", "STARTED"]
    (one, other) = (printed(fleet, one).partition("train on ")[2].split()[0] for one in sent)
    assert one != other and "," not in one + other
    for one in sent:
        one.revoke(terminate=True)
    eventually(lambda: all(one.state == "REVOKED" for one in sent), what="their end")


@pytest.mark.parametrize(
    ("how", "options", "error", "state"),
    [
        ("soft limit", {"soft_time_limit": 1}, SoftTimeLimitExceeded, "FAILED"),
        ("hard limit", {"time_limit": 1}, TimeLimitExceeded, "FAILED"),
        ("revoke", {}, TaskRevokedError, "CANCELLED"),
    ],
)
def test_one_that_sleeps_ends_when_it_is_told(
    fleet: TestFleet, jobs: Any, worker: WorkerProcess, kept: None, how: str, options: Any, error: Any, state: str
) -> None:
    sent = jobs.train.apply_async((600,), **options)
    if how == "revoke":
        eventually(lambda: "train on" in printed(fleet, sent), what="a call that sleeps")
        pids = functions(worker)
        assert pids
        sent.revoke(terminate=True)
    began = time.monotonic()

    with pytest.raises(error):
        sent.get(timeout=patient(60))

    took = time.monotonic() - began
    assert took < 1 + patient(GRACE_SECONDS + BESIDE_SECONDS), f"{how}: {took:.1f} s"
    eventually(lambda: fleet.state(sent.id) == state, what="its record")
    if how == "revoke":
        gone(pids)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "exit code 3"),
        ("segfault", "SIGSEGV"),
        ("killed", r"SIGKILL \(was the machine out of memory\?"),
        ("memory", ""),  # memory_words()
    ],
)
def test_one_that_dies_is_a_failure_at_once_with_its_cause(
    fleet: TestFleet, jobs: Any, worker: WorkerProcess, kept: None, how: str, words: str
) -> None:
    began = time.monotonic()
    sent = jobs.fail.apply_async((how,), resources=HALF_A_GIB)

    with pytest.raises(Exception, match=words or memory_words()):
        sent.get(timeout=patient(60))

    took = time.monotonic() - began
    assert took < patient(BESIDE_SECONDS), f"{how}: {took:.1f} s"
    record = fleet.app.ledger.get(sent.id)
    assert (sent.state, record.state, record.attempt) == ("FAILURE", "FAILED", 1)
    eventually(lambda: not fleet.broker.client.hlen(fleet.app.keys.unacked), within=5, what="its acknowledgement")
    assert "end_not_told" not in worker.log()


def memory_words() -> str:
    """Return what is told of too much memory: by the kernel's group, or, where there are none, by the address space."""
    try:
        find_cgroups(Path(os.environ["GPUFLOW_TEST_CGROUP"]) if "GPUFLOW_TEST_CGROUP" in os.environ else None)
    except (NoCgroups, OSError):
        return r"^each of its processes is held to the 512 MiB"
    return "used more than the 512 MiB of memory"


def test_a_chain_whose_model_stays_loaded(fleet: TestFleet, jobs: Any, worker: WorkerProcess) -> None:
    seen = [jobs.index("one\nfour").delay().get(timeout=patient(60)) for _ in range(3)]

    assert [one["vectors"] for one in seen] == 3 * [[[3], [4]]]
    assert len({one["pid"] for one in seen}) == 1


def test_options_of_a_stock_worker_may_stay(fleet: TestFleet, worker: WorkerProcess) -> None:
    (told,) = fleet.app.control.inspect(timeout=patient(5), limit=1).stats().values()

    assert told["pool"]["implementation"] == "gpuflow.worker.pool:SupervisorPool"
    assert told["pool"]["max-concurrency"] == 8


def test_what_is_no_json_is_refused(fleet: TestFleet, jobs: Any, worker: WorkerProcess) -> None:
    with pytest.raises(Exception, match="ContentDisallowed"):
        jobs.parse.apply_async(("a text",), serializer="pickle").get(timeout=patient(30))
