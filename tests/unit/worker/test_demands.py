"""Which demand queues a worker serves, and what it tells the fleet of that: against queues in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuflow.routing.requirement import Requirement
from gpuflow.worker.demands import Demands
from tests.support.demands import KEYS, Client, machine

ONE = Requirement(gpu_count=1)
TWO = Requirement(gpu_count=2)
DISK = Requirement(disk_gib=10)


def demands(client: Client, capability: Any = None, **options: Any) -> Demands:
    return Demands(client, KEYS, capability or machine(), **options)  # type: ignore[arg-type]


def test_a_queue_is_decided_once_and_told_to_the_fleet() -> None:
    client = Client()
    one, three = client.register(ONE, Requirement(gpu_count=3))
    mine = demands(client)

    assert list(mine.served([three, one, "gpu-unknown"])) == [one]
    assert list(mine.served([one])) == [one]

    assert client.asked.count(KEYS.queue(one)) == 1
    assert client.scores[KEYS.queue_classes(three)] == {mine.name: -1}
    assert client.scores[KEYS.queue_classes(one)][mine.name] > 0
    assert mine.names() == (one,)


def test_cost_counts_before_size_and_size_before_what_is_left_over() -> None:
    client = Client()
    (one,) = client.register(ONE)
    order = [
        demands(client, machine(1)),
        demands(client, machine(4)),
        demands(client, machine(1), cost=0.1),
        demands(client, machine(1), cost=2),
    ]
    for each in reversed(order):
        each.served([one])

    scores = client.scores[KEYS.queue_classes(one)]
    assert sorted(scores, key=lambda name: scores[name]) == [each.name for each in order]


def test_machines_that_serve_alike_are_of_one_class_whatever_their_gpus_are_called() -> None:
    client = Client()
    there, here = machine(), machine()
    renamed = replace(there, gpus=tuple(replace(gpu, uuid=f"other-{gpu.uuid}") for gpu in there.gpus))

    assert demands(client, here).name == demands(client, renamed).name
    assert demands(client, here).name != demands(client, machine(1)).name
    assert demands(client, here).name != demands(client, here, families=("gpu",)).name
    assert demands(client, here).name != demands(client, here, cost=1).name


def test_families_keep_queues_away_and_plain_names_serve_none() -> None:
    client = Client()
    one, cpu = client.register(ONE, Requirement(cpu=1))

    assert list(demands(client, families=("gpu", "mine")).served([one, cpu])) == [one]
    assert list(demands(client, families=("mine",)).served([one, cpu])) == []


def test_another_capability_decides_anew_under_another_class() -> None:
    client = Client()
    one, two = client.register(ONE, TWO)
    mine = demands(client)
    before = mine.name
    assert list(mine.served([one, two])) == [one, two]

    mine.change(machine(1))

    assert mine.requirement(two) == TWO, "a message that was chosen before still finds what it asks for"
    assert list(mine.served([one, two])) == [one]
    assert mine.requirement(two) is None
    assert client.scores[KEYS.queue_classes(two)] == {before: 2 * 80 + 0.16, mine.name: -1}
    assert mine.name in client.classes


def test_what_is_decided_while_the_capability_changes_does_not_count() -> None:
    client = Client()
    (two,) = client.register(TWO)
    mine = demands(client)
    before = mine.name

    def once() -> None:
        client.before_answer = None
        mine.change(machine(1))

    client.before_answer = once
    mine.served([two])

    assert list(mine.served([two])) == []
    assert client.scores[KEYS.queue_classes(two)][before] > 0
    assert client.scores[KEYS.queue_classes(two)][mine.name] == -1


def test_an_ask_for_disk_is_refused_when_the_disk_is_full() -> None:
    client = Client()
    disk, one = client.register(DISK, ONE)
    mine = demands(client, machine(disk_free_mib=16_000))
    before = mine.name
    assert list(mine.served([disk, one])) == [disk, one]

    mine.has_free_disk(9_000)
    assert mine.name == before, "no other class for a little less"
    assert list(mine.served([disk, one])) == [one]

    mine.has_free_disk(200_000)
    assert mine.name != before
    assert list(mine.served([disk, one])) == [disk, one]


def test_a_forgotten_queue_that_is_made_again_is_found_again() -> None:
    client = Client()
    (one,) = client.register(ONE)
    mine = demands(client)
    kept = dict(client.hashes)
    client.hashes.clear()
    assert list(mine.served([one])) == []

    client.hashes.update(kept)

    assert list(mine.served([one])) == [one], "one that is not there is asked for again each time"
