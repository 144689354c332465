"""What warm sessions hold of a worker, and which make room for a task: against real lock files and real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.protocol import Request
from gpuflow.routing.capability import Capability, GpuCapability
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.admission import Admission
from gpuflow.worker.sessions.entry import SessionEntry
from gpuflow.worker.sessions.table import Sessions
from tests.support.admission import TOTAL_MIB, Client, machine, worker
from tests.support.engines import scripted
from tests.support.waiting import eventually

ANY = Requirement(gpu_count=1)
A100 = Requirement(gpu_count=1, gpu_names=("a100",))
H100 = Requirement(gpu_count=1, gpu_names=("h100",))
BIG = Requirement(memory_mib=10_000)
TASK = "inference"

Make = Callable[..., Admission]


def mixed() -> Capability:
    names = (("a100",), ("h100",))
    gpus = tuple(
        GpuCapability(uuid=f"GPU-{n}", index=n, names=names[n], vram_gb=80.0, total_mib=TOTAL_MIB) for n in range(2)
    )
    return Capability(gpus=gpus, cpu_count=8, memory_mib=16_000)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def make(client: Client, tmp_path: Path) -> Iterator[Make]:
    made: list[Admission] = []

    def one(capability: Capability | None = None, **limits: Any) -> Admission:
        made.append(worker(client, tmp_path / "locks", capability or machine(2), warm=True, **limits))
        return made[-1]

    yield one
    for admission in made:
        for entry in warm_of(admission):
            for tag in list(entry.places):
                admission.release(tag)
                pool_of(admission).leave(tag)
        pool_of(admission).stop(5)
        eventually(lambda: not warm_of(admission), what="all sessions end")  # noqa: B023  (it is waited for here)


def pool_of(admission: Admission) -> Sessions:
    assert admission.sessions is not None
    return admission.sessions


def warm_of(admission: Admission) -> list[SessionEntry]:
    return pool_of(admission)._look()


def take(admission: Admission, queue: str, tag: str, session: str = "") -> bool:
    """Take a message of `queue` as the transport does."""
    assert queue in [choice.queue for choice in admission.choose([queue])]
    return admission.on_leased(queue, tag, session, TASK)


def load(admission: Admission, queue: str, session: str, tag: str, tmp_path: Path) -> None:
    """Have a warm session that idles."""
    assert take(admission, queue, tag, session)
    spec = {"data": {"items": ["echo x"]}}
    request = Request(task_id=tag, task_type=TASK, spec=spec, output_dir=str(tmp_path))
    asked = pool_of(admission).ask(tag, request, scripted())
    assert list(asked.read(10))
    admission.on_lease_ended(tag)
    admission.release(tag)
    eventually(lambda: any(entry.name == session for entry in pool_of(admission).idle()), what="it idles")


def names(admission: Admission) -> set[str]:
    return {entry.name for entry in warm_of(admission) if entry.closed_at is None}


def test_only_what_helps_is_closed(client: Client, make: Make, tmp_path: Path) -> None:
    a100, h100 = client.register(A100, H100)
    admission = make(mixed())
    load(admission, a100, "older", "1", tmp_path)
    load(admission, h100, "newer", "2", tmp_path)

    admission.on_blocked_by_sessions(h100)

    assert names(admission) == {"older"}


def test_of_several_the_one_that_was_used_longest_ago_goes_and_no_second_one_after_it(
    client: Client, make: Make, tmp_path: Path
) -> None:
    (any_gpu,) = client.register(ANY)
    admission = make()
    load(admission, any_gpu, "older", "1", tmp_path)
    load(admission, any_gpu, "newer", "2", tmp_path)

    for _ in range(3):
        admission.on_blocked_by_sessions(any_gpu)
        assert names(admission) == {"newer"}

    eventually(lambda: len(warm_of(admission)) == 1, what="it has gone")
    assert take(admission, any_gpu, "3")


def test_memory_of_an_idle_session_is_given_back_where_a_gpu_is_free(
    client: Client, make: Make, tmp_path: Path
) -> None:
    big = Requirement(gpu_count=1, memory_mib=10_000)
    (queue,) = client.register(big)
    admission = make()
    load(admission, queue, "big", "1", tmp_path)
    assert [choice.warm_only for choice in admission.choose([queue])] == [True]

    admission.on_blocked_by_sessions(queue)
    eventually(lambda: not warm_of(admission), what="it has gone")

    assert take(admission, queue, "2")


def test_an_idle_session_makes_room_where_the_free_gpus_are_reserved_for_another_task(
    client: Client, make: Make, tmp_path: Path
) -> None:
    any_gpu, several = client.register(ANY, Requirement(gpu_count=2))
    admission = make()
    load(admission, any_gpu, "warm", "1", tmp_path)
    (held,) = {uuid for entry in warm_of(admission) for uuid in entry.gpus}
    free = "GPU-1" if held == "GPU-0" else "GPU-0"
    admission._gpus.reserve(task="t", queue=several, gpus=[free], worker="another", term_seconds=60)
    assert [choice.warm_only for choice in admission.choose([several, any_gpu], barren=[several])] == [True]

    admission.on_blocked_by_sessions(any_gpu)

    eventually(lambda: not warm_of(admission), what="it has gone")
    assert held in admission.free_gpus()


def test_nothing_is_closed_for_a_task_that_waits_for_something_else(client: Client, make: Make, tmp_path: Path) -> None:
    any_gpu, many_cpus = client.register(ANY, Requirement(gpu_count=1, cpu=8))
    admission = make()
    load(admission, any_gpu, "warm", "1", tmp_path)
    (cpus,) = client.register(Requirement(cpu=8))
    assert take(admission, cpus, "2")

    admission.on_blocked_by_sessions(many_cpus)

    assert names(admission) == {"warm"}


def test_a_message_whose_session_has_ended_meanwhile_goes_back(client: Client, make: Make, tmp_path: Path) -> None:
    (one,) = client.register(ANY)
    admission = make(machine(1))
    load(admission, one, "warm", "1", tmp_path)
    assert [choice.warm_only for choice in admission.choose([one])] == [True]
    pool_of(admission).close_all()

    assert not admission.on_leased(one, "2", "warm", TASK)

    assert admission.keep("2") is None
    assert admission.jobs() == 0
    eventually(lambda: admission.free_gpus() == ("GPU-0",), what="the GPU is free")


def test_a_task_that_needs_a_gpu_never_begins_without_one(client: Client, make: Make) -> None:
    gpu, cpu = client.register(ANY, Requirement(cpu=1))
    admission = make()
    assert admission.fitting([gpu, cpu]) == [gpu, cpu]
    assert [choice.queue for choice in admission.choose([cpu])] == [cpu]

    assert not admission.on_leased(gpu, "1", "warm", TASK)
    assert admission.keep("1") is None


def test_a_plain_queue_knows_no_sessions(make: Make) -> None:
    admission = make()

    assert admission.on_leased("team.inference", "1", "warm", TASK)

    held = admission.keep("1")
    assert held is not None
    assert (held.slot, held.session) == ("plain", "")


def test_sessions_at_work_count_as_jobs_with_their_cpus(client: Client, make: Make, tmp_path: Path) -> None:
    some, rest = client.register(Requirement(cpu=6), Requirement(cpu=4))
    admission = make(max_jobs=2)
    load(admission, some, "warm", "1", tmp_path)
    assert admission.fitting([rest]) == [rest], "it idles"
    assert admission.jobs() == 0

    assert take(admission, some, "2", "warm")

    assert admission.fitting([rest]) == []
    assert (admission.jobs(), admission.free_jobs()) == (1, 1)
    admission.release("2")


def test_a_full_worker_starts_no_idle_session_again(client: Client, make: Make, tmp_path: Path) -> None:
    (some,) = client.register(Requirement(cpu=1))
    admission = make(max_jobs=1)
    load(admission, some, "warm", "1", tmp_path)
    assert admission.message_filter.sessions == ("warm",)

    assert take(admission, some, "2")

    assert admission.message_filter.sessions == ()
    assert admission.message_filter.here == ("warm",)


def test_threads_bound_requests_and_jobs_together(client: Client, make: Make, tmp_path: Path) -> None:
    (some,) = client.register(Requirement(cpu=1))
    admission = make(threads=2)
    load(admission, some, "warm", "1", tmp_path)

    assert take(admission, some, "2", "warm")
    assert take(admission, some, "3", "warm")

    assert admission.message_filter.sessions == ()
    assert admission.fitting([some]) == []
