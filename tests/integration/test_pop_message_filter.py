"""Which message of a queue the pop takes for whom: by the Lua step alone, on a real broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from gpuflow.broker.gate import MessageFilter, SelectedQueue
from gpuflow.broker.keys import Keys
from gpuflow.broker.look import Look
from gpuflow.broker.priorities import list_key, list_keys
from gpuflow.broker.scripts import broker_script
from tests.support.fleet import Broker

KEYS = Keys()
#: Messages of one queue that are looked at, at most.
DEPTH = 20


class Queues:
    """Demand queues of an own broker, filled with messages of a given age."""

    def __init__(self, broker: Broker) -> None:
        self.client = broker.client
        self.cold: list[str] = []
        self._numbers = count()

    def clear(self) -> Queues:
        self.client.flushall()
        return self

    def put(self, name: str, queue: str = "gpu", *, age: float = 0.0, priority: int = 5, **hints: Any) -> None:
        seconds, micros = self.client.time()
        content = {
            "at": seconds + micros / 1e6 - age,
            **hints,
            "body": "",
            "headers": {"id": name},
            "properties": {"delivery_tag": f"{name}-{next(self._numbers)}"},
        }
        text = json.dumps(content).replace('{"at": ', '{"at":', 1)
        self.client.lpush(list_key(queue, priority), text)
        self.client.zadd(KEYS.ready, {queue: 1})

    def pop(self, *choices: SelectedQueue | str, **message_filter: Any) -> str | None:
        """Return the name of the message that a consumer with this filter gets from these queues.

        `cold` are then the queues that the step told to have something for a consumer with more room.
        """
        chosen = [SelectedQueue(queue=one) if isinstance(one, str) else one for one in choices or ("gpu",)]
        queues = [choice.queue for choice in chosen]
        look = Look(queues=queues, chosen=chosen)
        keys = [KEYS.leases, KEYS.unacked, KEYS.owners, KEYS.ready, KEYS.returned, KEYS.sweep, KEYS.bell("me")]
        args = ["me", 60, look.to_json(["@mine"], MessageFilter(**message_filter), 0)]
        _, raw, _, self.cold, *_ = broker_script("pop")(self.client, [*keys, *list_keys(queues)], args)
        return json.loads(raw)["headers"]["id"] if raw else None


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("broker"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def queues(broker: Broker) -> Queues:
    return Queues(broker).clear()


def test_what_is_taken_may_differ_for_tasks_that_get_gpus(queues: Queues) -> None:
    message_filter = {"types": ("inference", "inference:vllm"), "gpu_types": ("inference",)}
    gpu = SelectedQueue(queue="gpu", with_gpus=True)
    queues.put("needs-vllm", x="inference:vllm")
    queues.put("needs-vllm-too", queue="cpu", x="inference:vllm")
    queues.put("any", x="inference")

    assert queues.pop(gpu, "cpu", **message_filter) == "needs-vllm-too"
    assert queues.pop(gpu, "cpu", **message_filter) == "any"
    assert queues.pop(gpu, "cpu", **message_filter) is None
    assert queues.pop("gpu", **{**message_filter, "gpu_types": None}) == "needs-vllm", "as for tasks without"


def test_other_task_types_are_passed_over_as_deep_as_one_looks(queues: Queues) -> None:
    for _ in range(DEPTH - 1):
        queues.put("echo", x="echo")
    queues.put("inference", x="inference")
    queues.put("no-type")

    assert queues.pop(types=("inference",)) == "inference"
    assert queues.pop(types=("inference",)) == "no-type", "a stock producer gives no hints"
    queues.put("echo", x="echo")
    queues.put("too-deep", x="inference")
    assert queues.pop(types=("inference",)) is None
    assert queues.pop() == "echo"
    assert queues.pop(types=("inference",)) == "too-deep"


def test_a_message_lies_for_a_worker_that_offers_all_its_secrets(queues: Queues) -> None:
    queues.put("two", x="echo", k="A,B")
    queues.put("one", x="echo", k="A")
    queues.put("none", x="echo")

    assert queues.pop(secrets=()) == "none"
    assert queues.pop(secrets=("B", "AB", "A,B")) is None
    assert queues.pop(secrets=("A",)) == "one"
    assert queues.pop(secrets=("A",)) is None
    assert queues.pop(secrets=("C", "B", "A")) == "two"
    queues.put("two", x="echo", k="A,B")
    assert queues.pop() == "two", "a consumer that is no worker takes what there is"


def test_without_types_all_is_taken_and_with_none_nothing_that_has_one(queues: Queues) -> None:
    queues.put("echo", x="echo")

    assert queues.pop(types=()) is None
    assert queues.pop() == "echo"


def test_a_model_that_nobody_has_is_anybodys(queues: Queues) -> None:
    queues.put("m", m="model")

    assert queues.pop(patience_seconds=60) == "m"


def test_a_model_that_another_has_is_left_to_it_for_the_patience(queues: Queues) -> None:
    queues.client.set(KEYS.warm("model"), "warm")
    queues.put("old", m="model", age=70)
    queues.put("m", m="model", age=50)
    queues.put("plain")

    assert queues.pop(patience_seconds=60) == "old"
    assert queues.pop(patience_seconds=60) == "plain"
    assert queues.pop(patience_seconds=60) is None
    assert queues.pop(patience_seconds=60, models=("other",)) is None
    assert queues.pop(patience_seconds=60, models=("model",)) == "m"


def test_a_worker_takes_its_models_first_unless_the_head_has_waited_long(queues: Queues) -> None:
    queues.put("first", age=20)
    queues.put("second", age=10)
    queues.put("mine", m="model")
    queues.put("mine-too", m="model")

    assert queues.pop(models=("model",), patience_seconds=2) == "mine"
    queues.client.flushall()
    queues.put("first", age=31)
    queues.put("mine", m="model")
    assert queues.pop(models=("model",), patience_seconds=2) == "first"
    assert queues.pop(models=("model",), patience_seconds=2) == "mine"
    queues.put("first", age=0.1)
    queues.put("mine", m="model")
    assert queues.pop(models=("model",), patience_seconds=0) == "first", "no patience: in order"


def test_priority_goes_before_taste_and_age_between_queues(queues: Queues) -> None:
    queues.put("mine", m="model")
    queues.put("urgent", priority=7)
    queues.put("older", "gpu-a100", age=5)

    found = [queues.pop("gpu", "gpu-a100", models=("model",), patience_seconds=60) for _ in range(3)]

    assert found == ["urgent", "older", "mine"]


def test_on_borrowed_gpus_a_task_must_say_how_long_it_takes(queues: Queues) -> None:
    queues.put("endless")
    queues.put("long", t=100.5)
    queues.put("short", t=10)

    assert queues.pop(SelectedQueue(queue="gpu", most_seconds=9.5)) is None
    assert queues.pop(SelectedQueue(queue="gpu", most_seconds=60)) == "short"
    assert queues.pop(SelectedQueue(queue="gpu", most_seconds=200)) == "long"
    assert queues.pop() == "endless"


def test_what_nobody_can_read_hides_nothing_and_is_kept(queues: Queues) -> None:
    queues.client.lpush("gpu", '{"at":1.5,no json', "nothing")
    queues.put("good")

    assert queues.pop() == "good"
    assert queues.client.llen(KEYS.unreadable) == 2


def test_a_hint_is_read_from_the_front_alone(queues: Queues) -> None:
    """What a user writes into a task cannot pass for a hint."""
    queues.put("plain", x="echo")
    raw = queues.client.rpop("gpu").replace('"body": ""', '"body": "\\"x\\": \\"inference\\""')
    queues.client.rpush("gpu", raw)

    assert queues.pop(types=("inference",)) is None
    assert queues.pop(types=("echo",)) == "plain"


WARM = SelectedQueue(queue="gpu", warm_only=True)
YIELDS = SelectedQueue(queue="gpu", warm_only=True, yields=True)


def test_without_room_only_what_a_warm_session_answers_is_taken(queues: Queues) -> None:
    queues.put("cold", s="other", age=1000)
    queues.put("warm", s="mine")

    assert queues.pop(WARM, patience_seconds=2) is None
    assert queues.cold == ["gpu"]
    assert queues.pop(WARM, sessions=("mine",), patience_seconds=2) == "warm"
    assert queues.pop(sessions=("mine",), patience_seconds=2) == "cold", "with room, all is taken"


def test_of_a_session_without_a_place_nothing_is_taken_that_would_open_one_more(queues: Queues) -> None:
    queues.put("full", s="mine")
    queues.put("other", s="other")

    assert queues.pop(full=("mine",)) == "other"
    assert queues.pop(full=("mine",)) is None
    assert queues.pop() == "full"


def test_a_warm_session_is_given_nothing_new_while_it_keeps_a_task_from_its_gpus_too_long(queues: Queues) -> None:
    message_filter = {"sessions": ("mine",), "patience_seconds": 2}
    queues.put("cold", s="other", age=31)
    queues.put("warm", s="mine")

    assert queues.pop(YIELDS, **message_filter) is None
    assert queues.cold == ["gpu"]
    assert queues.pop(WARM, **message_filter) == "warm", "it would not help the other"
    queues.put("warm", s="mine")
    queues.client.delete("gpu")
    queues.put("cold", s="other", age=29)
    queues.put("warm", s="mine")
    assert queues.pop(YIELDS, **message_filter) == "warm", "it has not waited long"


def test_a_task_that_waits_too_long_holds_back_what_is_younger_or_less_urgent(queues: Queues) -> None:
    message_filter = {"sessions": ("mine",), "patience_seconds": 2}
    both = (YIELDS, SelectedQueue(queue="gpu-a100", warm_only=True, yields=True))
    queues.put("cold", s="other", age=31)
    queues.put("younger", "gpu-a100", s="mine", age=30)
    queues.put("less-urgent", "gpu-a100", s="mine", priority=1, age=90)

    assert queues.pop(*both, **message_filter) is None
    queues.put("older", "gpu-a100", s="mine", age=32, priority=5)
    queues.client.lrem("gpu-a100", 1, queues.client.lindex("gpu-a100", -1))
    assert queues.pop(*both, **message_filter) == "older"
    queues.put("urgent", "gpu-a100", s="mine", priority=7)
    assert queues.pop(*both, **message_filter) == "urgent"
    assert queues.pop(*both, **message_filter) is None


def test_nothing_is_made_room_for_that_a_session_here_will_answer(queues: Queues) -> None:
    queues.put("next", s="mine", age=100)
    queues.put("warm", s="other")

    assert queues.pop(YIELDS, here=("mine", "other"), sessions=("other",), patience_seconds=2) == "warm"
    assert queues.cold == []


def test_what_waits_for_room_is_told_beside_what_is_taken(queues: Queues) -> None:
    queues.put("cold", s="other")
    queues.put("warm", "gpu-a100", s="mine")

    assert queues.pop(WARM, SelectedQueue(queue="gpu-a100", warm_only=True), sessions=("mine",)) == "warm"
    assert queues.cold == ["gpu"]


def test_less_urgent_requests_wait_behind_a_task_that_needs_the_gpus_of_their_session(queues: Queues) -> None:
    queues.put("cold", s="other", priority=9)
    queues.put("warm", s="mine", age=60)

    assert queues.pop(YIELDS, sessions=("mine",), patience_seconds=60) is None
    assert queues.pop(WARM, sessions=("mine",), patience_seconds=60) == "warm"
