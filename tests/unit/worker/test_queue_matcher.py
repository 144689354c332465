"""Which demand queues a worker serves, and what it tells the fleet of that: against queues in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuflow.routing.requirement import Requirement
from gpuflow.worker.queue_matcher import QueueMatcher
from tests.support.admission import KEYS, Client, machine

ONE = Requirement(gpu_count=1)
TWO = Requirement(gpu_count=2)
DISK = Requirement(disk_gib=10)
#: Its queue's name is cut, so that what it asks for stands beside the queue alone.
LONG = Requirement(gpu_count=1, labels=tuple((f"label-{number}", "x" * 20) for number in range(6)))
LABELS = LONG.labels


def matcher(client: Client, capability: Any = None, **options: Any) -> QueueMatcher:
    return QueueMatcher(client, KEYS, capability or machine(), **options)  # type: ignore[arg-type]


def test_what_a_queue_asks_for_is_read_from_its_name_or_asked_for_once() -> None:
    client = Client()
    one, three, cut = client.register(ONE, Requirement(gpu_count=3), LONG)
    mine = matcher(client, machine(labels=LABELS))

    assert list(mine.served([three, one, cut, "gpu-unknown"])) == [one, cut]
    assert list(mine.served([one, cut])) == [one, cut]

    assert client.asked == [KEYS.queue(cut)]
    assert client.scores == {}, "what is merely seen is not told"
    assert mine.names() == tuple(sorted([one, cut]))


def test_what_a_worker_was_woken_for_or_took_is_told_to_the_fleet_once() -> None:
    client = Client()
    one, three = client.register(ONE, Requirement(gpu_count=3))
    mine = matcher(client)

    for name in (one, three, "gpu-unheard-of-by-anybody-x0to0"):
        mine.tell(name)

    assert client.scores[KEYS.queue_classes(three)] == {mine.name: -1}
    assert client.scores[KEYS.queue_classes(one)][mine.name] > 0
    assert len(client.scores) == 2
    client.scores.clear()
    mine.tell(one)
    assert client.scores == {}
    mine.forget()
    mine.tell(one)
    assert list(client.scores) == [KEYS.queue_classes(one)]


def test_cost_counts_before_size_and_size_before_what_is_left_over() -> None:
    client = Client()
    (one,) = client.register(ONE)
    order = [
        matcher(client, machine(1)),
        matcher(client, machine(4)),
        matcher(client, machine(1), cost=0.1),
        matcher(client, machine(1), cost=2),
    ]
    for each in reversed(order):
        each.tell(one)

    scores = client.scores[KEYS.queue_classes(one)]
    assert sorted(scores, key=lambda name: scores[name]) == [each.name for each in order]


def test_machines_that_serve_alike_are_of_one_class_whatever_their_gpus_are_called() -> None:
    client = Client()
    there, here = machine(), machine()
    renamed = replace(there, gpus=tuple(replace(gpu, uuid=f"other-{gpu.uuid}") for gpu in there.gpus))

    assert matcher(client, here).name == matcher(client, renamed).name
    assert matcher(client, here).name != matcher(client, machine(1)).name
    assert matcher(client, here).name != matcher(client, here, families=("gpu",)).name
    assert matcher(client, here).name != matcher(client, here, cost=1).name


def test_families_keep_queues_away_and_plain_names_serve_none() -> None:
    client = Client()
    one, cpu = client.register(ONE, Requirement(cpu=1))

    assert list(matcher(client, families=("gpu", "mine")).served([one, cpu])) == [one]
    assert list(matcher(client, families=("mine",)).served([one, cpu])) == []


def test_another_capability_decides_anew_under_another_class() -> None:
    client = Client()
    one, two = client.register(ONE, TWO)
    mine = matcher(client)
    before = mine.name
    assert list(mine.served([one, two])) == [one, two]
    mine.tell(two)

    mine.change(machine(1))

    assert mine.requirement(two) == TWO, "a message that was chosen before still finds what it asks for"
    assert list(mine.served([one, two])) == [one]
    assert mine.requirement(two) is None
    mine.tell(two)
    assert client.scores[KEYS.queue_classes(two)] == {before: 2 * 80 + 0.16, mine.name: -1}
    assert mine.name in client.classes


def test_what_is_decided_while_the_capability_changes_does_not_count() -> None:
    client = Client()
    (two,) = client.register(Requirement(gpu_count=2, labels=LABELS))
    mine = matcher(client, machine(labels=LABELS))

    def once() -> None:
        client.before_answer = None
        mine.change(machine(1, labels=LABELS))

    client.before_answer = once
    mine.served([two])

    assert list(mine.served([two])) == []
    mine.tell(two)
    assert client.scores[KEYS.queue_classes(two)] == {mine.name: -1}


def test_an_ask_for_disk_is_refused_when_the_disk_is_full() -> None:
    client = Client()
    disk, one = client.register(DISK, ONE)
    mine = matcher(client, machine(disk_free_mib=16_000))
    before = mine.name
    assert list(mine.served([disk, one])) == [disk, one]
    mine.tell(disk)

    mine.has_free_disk(9_000)
    assert mine.name == before, "no other class for a little less"
    assert list(mine.served([disk, one])) == [one]
    mine.tell(disk)
    assert client.scores[KEYS.queue_classes(disk)] == {before: -1}, "what was told before counts no longer"

    mine.has_free_disk(200_000)
    assert mine.name != before
    assert list(mine.served([disk, one])) == [disk, one]


def test_a_forgotten_queue_that_is_made_again_is_found_again() -> None:
    client = Client()
    (one,) = client.register(LONG)
    mine = matcher(client, machine(labels=LABELS))
    kept = dict(client.hashes)
    client.hashes.clear()
    assert list(mine.served([one])) == []

    client.hashes.update(kept)

    assert list(mine.served([one])) == [one], "one that is not there is asked for again each time"
