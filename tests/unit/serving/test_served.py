"""Served models: what replicas and calls are made of, what a replica asks for, and when it is spread."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.routing.capability import Capability
from gpuflow.routing.offers import (
    REPLICA_OF,
    Offers,
    asked_name,
    code_asked,
    in_words,
    is_replica,
    task_type_of,
    with_replicas,
    without_code,
)
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.situation import judge
from gpuflow.routing.views import TaskView, WorkerView
from gpuflow.serving.models import ServedModel, check, parts_of, served_spec
from gpuflow.serving.replicas import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Failure
from gpuflow.worker.sessions.entry import LOADING_PLACES, SessionEntry

CAPABILITY = Capability(cpu_count=8, memory_mib=32_000)


def served(**fields: object) -> ServedModel:
    parts = {**parts_of("Qwen/Qwen3-0.6B", accelerators="cpu"), **fields}
    return ServedModel(name="one", spec=served_spec(parts), uid="u", created_by="x", created_at=1.0)


def test_a_record_is_read_as_it_was_written() -> None:
    model = served(secrets=["HF_TOKEN"])

    assert ServedModel.from_json("one", model.to_json(), "3") == replace(model, replicas=3)
    assert json.loads(model.to_json())["digest"] == model.digest()
    assert model.digest() != served().digest()
    assert model.digest() == replace(model, replicas=9, uid="other").digest()
    with pytest.raises(ValueError, match="no model that can be served"):
        ServedModel.from_json("one", json.dumps({"spec": {"taskType": "command", "model": {"source": {}}}}), "1")


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (replace(served(), name="a b"), "a served model is named by"),
        (replace(served(), owner="a\nb"), "visible characters"),
        (replace(served(), replicas=0), "give 1 to"),
        (replace(served(), replicas=1001), "give 1 to"),
    ],
)
def test_what_a_served_model_cannot_be(model: ServedModel, cause: str) -> None:
    with pytest.raises(InvalidTemplate, match=cause):
        check(model)


def test_what_a_replica_asks_for_has_a_name_of_its_own() -> None:
    spec = {"taskType": "inference", "engine": "vllm", "model": {"vllm": {"trust_remote_code": True}}}
    name = asked_name({**spec, REPLICA_OF: "one"})

    assert name == "inference:vllm+remote-code~warm"
    assert is_replica(name)
    assert not is_replica(asked_name(spec))
    assert (task_type_of(name), without_code(name)) == ("inference", "inference:vllm")
    assert code_asked(name) == ("remote-code",)
    assert in_words(name) == "inference by engine vllm"


def test_only_what_is_kept_loaded_is_offered_to_replicas() -> None:
    offers = Offers(names=frozenset({"inference", "embedding:vllm", "echo", "sft"}))

    found = with_replicas(offers, lambda name: name != "embedding:vllm")

    assert found.names - offers.names == {"inference~warm"}


def test_a_second_replica_is_left_to_others() -> None:
    ask = Requirement()
    task = TaskView(name="replica of one", id="r", state="QUEUED", executor="inference~warm", session="s")
    offers = Offers(names=frozenset({"inference", "inference~warm"}))
    free = WorkerView(id="w1", capability=CAPABILITY, offers=offers)

    def kind(worker: WorkerView, of: TaskView = task) -> str:
        return judge(ask, "cpu", of, worker).kind

    assert kind(free) == "free"
    assert kind(replace(free, kept={"other": False})) == "free"
    assert kind(replace(free, kept={"s": False})) == "spread"
    assert kind(replace(free, kept={"s": True})) == "spread"
    assert kind(replace(free, kept={"s": False}, state="BUSY")) == "spread"
    assert kind(replace(free, kept={"s": True}, state="BUSY")) == "busy"
    assert kind(replace(free, kept={"s": False}), replace(task, executor="inference")) == "free"
    assert kind(replace(free, kept={"s": False}, state="DRAINING")) == "draining"
    without = judge(ask, "cpu", task, replace(free, offers=Offers(names=frozenset({"inference"}))))
    assert without.kind == "no_executor"
    assert "it keeps no model loaded (--ephemeral, or GPUFLOW_SESSION_IDLE_SEC=0)" in without.text


def test_a_replica_takes_no_place_of_the_engine() -> None:
    entry = SessionEntry(name="s", hold=None, requirement=None, places={"replica", "a"})
    assert entry.may_keep(0.0)
    entry.replica = "replica"

    assert entry.requests == 1
    assert not entry.may_keep(0.0)
    entry.places |= {str(number) for number in range(LOADING_PLACES - 2)}
    assert entry.has_place(0.0)
    entry.places.add("one more")
    assert not entry.has_place(0.0)
    assert not SessionEntry(name="s", hold=None, requirement=None, in_turn=True).may_keep(0.0)


def test_failures_pause_longer_each_time_up_to_a_limit() -> None:
    pauses = [Failure(count=count, at=100.0).due - 100.0 for count in range(1, 60)]

    assert Failure().due == 0.0
    assert pauses[0] == FIRST_PAUSE_SECONDS
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
