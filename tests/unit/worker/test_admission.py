"""What a worker may take and holds: against real lock files, and queues in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuflow.broker.gate import SelectedQueue
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.routing.requirement import Requirement
from gpuflow.worker.admission import MOST_CHOSEN, Admission
from gpuflow.worker.slots import CONTROL_SLOTS
from tests.support.admission import Client, locks_open, machine, worker

ONE = Requirement(gpu_count=1)
A100 = Requirement(gpu_count=1, gpu_names=("a100",))
TWO = Requirement(gpu_count=2)
H100 = Requirement(gpu_count=1, gpu_names=("h100",))
HALF = Requirement(gpu_count=1, gpu_share=0.5)
CPU = Requirement(cpu=1)

Make = Callable[..., Admission]


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def make(client: Client, tmp_path: Path) -> Make:
    """Return a function that makes one more worker of the same machine."""

    def made(gpus: int = 2, name: str = "w1", capability: Any = None, **limits: Any) -> Admission:
        return worker(client, tmp_path / "locks", capability or machine(gpus), name, **limits)

    return made


def take(admission: Admission, queue: str, tag: str) -> tuple[str, ...]:
    """Take a message of `queue` as the transport does, and return its GPUs."""
    assert queue in [choice.queue for choice in admission.choose([queue])]
    admission.on_leased(queue, tag)
    held = admission.keep(tag)
    assert held is not None
    return held.gpus


# -- choosing -----------------------------------------------------------------------------------------------------


def test_what_is_chosen_is_held_until_the_pop_has_answered(client: Client, make: Make) -> None:
    (one,) = client.register(ONE)
    mine, other = make(gpus=1), make(gpus=1, name="w2")

    assert mine.choose([one]) == [SelectedQueue(queue=one, with_gpus=True)]
    assert other.fitting([one]) == []
    assert other.choose([one]) == []
    mine.chosen_none()

    assert other.fitting([one]) == [one]
    assert mine.free_gpus() == ("GPU-0",)


def test_a_second_look_does_not_keep_what_the_first_has_held(client: Client, make: Make, tmp_path: Path) -> None:
    one, two = client.register(ONE, TWO)
    admission = make()

    admission.choose([one])
    admission.choose([two])
    admission.choose([one])

    assert len(locks_open(tmp_path / "locks")) == 1
    admission.chosen_none()
    assert locks_open(tmp_path / "locks") == []


def test_queues_are_named_together_when_one_hold_serves_any_of_them(client: Client, make: Make) -> None:
    one, a100, two, half, cpu = client.register(ONE, A100, TWO, HALF, CPU)

    chosen = [choice.queue for choice in make().choose([one, half, a100, two, cpu])]

    assert chosen == [one, a100, cpu]


def test_no_more_queues_are_named_than_one_pop_takes(client: Client, make: Make) -> None:
    names = client.register(*(Requirement(cpu=part / 1000) for part in range(1, 3 * MOST_CHOSEN)))

    assert [choice.queue for choice in make().choose(names)] == names[:MOST_CHOSEN]
    assert [choice.queue for choice in make().choose(names, names[:MOST_CHOSEN])] == names[
        MOST_CHOSEN : 2 * MOST_CHOSEN
    ]


def test_what_warm_sessions_have_no_place_for_is_named_when_a_job_has_room(client: Client, make: Make) -> None:
    (one,) = client.register(ONE)

    assert [choice.queue for choice in make().choose([one], full=[one])] == [one]


def test_unserved_unregistered_and_unreadable_queues_do_not_fit(client: Client, make: Make) -> None:
    one, h100, two = client.register(ONE, H100, TWO)
    client.hashes["queue:gpu-broken"] = '{"gpu_count": "many"}'
    admission = make(gpus=1)

    assert admission.fitting(["gpu-unknown", h100, two, "gpu-broken", one]) == [one]


def test_what_was_taken_by_an_older_hold_is_passed_over(client: Client, make: Make, tmp_path: Path) -> None:
    one, cpu = client.register(ONE, CPU)
    admission = make(gpus=1)
    admission.choose([one, cpu])

    admission.on_leased(cpu, "tag")

    assert locks_open(tmp_path / "locks") == [], "the GPU that the other queue would have used is free again"
    assert admission.jobs() == 1


# -- holding ------------------------------------------------------------------------------------------------------


def test_gpus_are_free_when_the_child_has_gone_and_the_slot_with_them(client: Client, make: Make) -> None:
    (one,) = client.register(ONE)
    admission = make(gpus=1, max_jobs=1)
    assert take(admission, one, "a") == ("GPU-0",)
    assert (admission.free_gpus(), admission.free_jobs(), admission.waits_as) == ((), 0, "")

    admission.child_gone("a")

    assert (admission.free_gpus(), admission.free_jobs()) == (("GPU-0",), 1)
    assert not admission.idle(), "its result is being committed"
    assert admission.on_lease_ended("a") is False, "the supervisor has told of it"
    admission.release("a")
    assert admission.idle()


def test_a_message_that_is_put_back_unclaimed_opens_its_queue(client: Client, make: Make) -> None:
    (one,) = client.register(ONE)
    admission = make(gpus=1)
    admission.choose([one])
    admission.on_leased(one, "a")

    assert admission.on_lease_ended("a") is True
    assert admission.free_gpus() == ("GPU-0",)
    assert admission.on_lease_ended("a") is False


def test_a_claimed_message_that_is_lost_keeps_its_gpus_until_the_child_is_gone(client: Client, make: Make) -> None:
    (one,) = client.register(ONE)
    admission = make(gpus=1)
    take(admission, one, "a")

    assert admission.on_lease_ended("a") is False
    assert admission.free_gpus() == ()
    assert admission.tags_on("GPU-0") == ["a"]
    admission.child_gone("a")
    assert admission.free_gpus() == ("GPU-0",)
    admission.release("a")
    assert admission.keep("a") is None


def test_unknown_tags_are_no_error(make: Make) -> None:
    admission = make()

    admission.child_gone("x")
    admission.release("x")

    assert admission.on_lease_ended("x") is False
    assert admission.keep("x") is None


def test_two_shares_fit_a_third_does_not_and_the_whole_gpu_waits(client: Client, make: Make) -> None:
    half, one = client.register(HALF, ONE)
    admission = make(gpus=1)
    assert take(admission, half, "a") == take(admission, half, "b") == ("GPU-0",)

    assert admission.fitting([half, one]) == []
    admission.child_gone("a")
    assert admission.fitting([half, one]) == [half]
    admission.child_gone("b")
    assert admission.fitting([half, one]) == [half, one]


def test_a_task_for_all_of_a_shared_gpu_has_it_reserved(client: Client, make: Make) -> None:
    half, one = client.register(HALF, ONE)
    admission, other = make(gpus=1), make(gpus=1, name="w2")
    take(admission, half, "a")

    assert admission.fitting([one, half]) == []
    assert other.fitting([one, half]) == [], "every worker of the machine honours it"
    assert other.fitting([half, one]) == [half], "what was queued before goes on"
    admission.child_gone("a")
    assert [choice.queue for choice in admission.choose([one, half])] == [one]
    admission.on_leased(one, "b")
    assert admission.reserving.current is None


def test_several_gpus_are_taken_all_or_none(client: Client, make: Make, tmp_path: Path) -> None:
    one, two = client.register(ONE, TWO)
    admission, other = make(), make(name="w2")
    take(admission, one, "a")

    assert other.choose([two]) == []
    assert len(locks_open(tmp_path / "locks")) == 1
    admission.child_gone("a")
    assert take(other, two, "b") == ("GPU-0", "GPU-1")


# -- the host, slots, draining ------------------------------------------------------------------------------------


def test_cpus_and_memory_are_summed(client: Client, make: Make) -> None:
    six, three, much = client.register(
        Requirement(cpu=6), Requirement(cpu=3), Requirement(gpu_count=1, memory_mib=10_000)
    )
    admission = make(cpu_jobs=10)
    take(admission, six, "a")
    take(admission, much, "b")

    assert admission.fitting([six, three, much]) == []
    admission.child_gone("a")
    assert admission.fitting([six, three, much]) == [six, three]


def test_jobs_that_do_not_say_what_they_need_have_slots_of_their_own(client: Client, make: Make) -> None:
    light, cpu, one = client.register(Requirement(), CPU, ONE)
    admission = make(cpu_jobs=1)
    take(admission, light, "a")
    for number in range(7):
        take(admission, cpu, f"cpu-{number}")

    assert admission.fitting([light, cpu, one]) == [cpu, one], "those that do are limited by the CPUs"
    take(admission, cpu, "cpu-7")
    assert admission.fitting([light, cpu, one]) == [one]


def test_control_and_plain_tasks_have_slots_of_their_own(make: Make) -> None:
    admission = make(threads=1)
    for number in range(CONTROL_SLOTS):
        assert admission.open_queues([CONTROL_QUEUE]) == [CONTROL_QUEUE]
        admission.on_leased(CONTROL_QUEUE, f"c{number}")
    admission.on_leased("mine", "p")

    assert admission.open_queues([CONTROL_QUEUE, "mine"]) == []
    assert admission.on_lease_ended("c0") is True
    assert admission.open_queues([CONTROL_QUEUE, "mine"]) == [CONTROL_QUEUE]
    assert admission.jobs() == 0


def test_a_draining_worker_serves_control_alone(client: Client, make: Make) -> None:
    (one,) = client.register(ONE)
    admission = make()
    admission.draining = True

    assert (admission.waits_as, admission.fitting([one]), admission.choose([one])) == ("", [], [])
    assert admission.open_queues([CONTROL_QUEUE, "mine"]) == [CONTROL_QUEUE]


def test_a_worker_for_one_job_takes_one(client: Client, make: Make) -> None:
    (one,) = client.register(ONE)
    admission = make(one_job_only=True)
    take(admission, one, "a")

    assert admission.fitting([one]) == []
    assert not admission.has_had_its_job()
    admission.child_gone("a")
    assert not admission.has_had_its_job()
    admission.on_lease_ended("a")
    admission.release("a")
    assert admission.has_had_its_job()


def test_a_lost_gpu_between_the_choice_and_the_answer_leaves_the_message_its_hold(client: Client, make: Make) -> None:
    (one,) = client.register(ONE)
    admission = make(gpus=2)
    admission.choose([one])

    admission.matcher.change(machine(1))
    admission.on_leased(one, "a")

    held = admission.keep("a")
    assert held is not None
    assert len(held.gpus) == 1, "a task for a GPU never begins without one"
