"""Warm sessions on transformers: real processes that speak the protocol, a tiny real model."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fixtures.executor_child import Ended
from tests.fixtures.session_child import Caller, SessionChild, outputs, streamed
from tests.fixtures.tiny_adapter import make_tiny_adapter
from tests.support.waiting import patient

pytestmark = pytest.mark.ml

#: An answer that takes far longer than a test waits: one token after the other, to the end of the context.
LONG = {"max_tokens": 200, "ignore_eos": True, "stream": True}


def open_session(folder: Path, model: Path, **fields: Any) -> SessionChild:
    session = SessionChild(folder / "session.log")
    spec = {"taskType": "inference", "model": {"source": {"type": "local", "identifier": str(model)}}}
    session.send("open", **{"engine": "transformers", "spec": spec, "gpus": [], **fields})
    return session


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[SessionChild]:
    """One session for the tests that leave it as it is."""
    with open_session(tmp_path_factory.mktemp("warm"), tiny_model) as session:
        session.until("ready")
        yield session


@pytest.fixture
def fresh(tmp_path: Path, tiny_model: Path) -> Iterator[SessionChild]:
    """A session for a test that ends it."""
    with open_session(tmp_path, tiny_model) as session:
        session.until("ready")
        yield session


@pytest.fixture
def caller(warm: SessionChild, tmp_path: Path) -> Caller:
    """Calls to the warm session, which has nothing to do when a test begins."""
    warm.forget()
    return Caller(warm, tmp_path)


def test_ready_says_what_is_loaded(warm: SessionChild, tiny_model: Path) -> None:
    ready = warm.until("ready")

    assert ready["engine"] == "transformers"
    assert ready["model"] == str(tiny_model)
    assert ready["revision"] is None
    assert ready["memory_bytes"] is None
    assert ready["load_seconds"] > 0
    assert ready["max_requests"] == 8


def test_a_request_is_answered_as_by_a_task_of_its_own(caller: Caller, run: Callable[..., Ended]) -> None:
    items = ["Hello Ana", "Where is the red car?"]
    alone = run(
        "inference", {"data": {"type": "list", "items": items}, "inference": {"max_tokens": 8, "temperature": 0}}
    )

    result = caller.ask("one", *items)

    assert result == alone.result
    assert json.loads((caller.out("one") / "responses.json").read_text()) == result
    assert [event["path"] for event in caller.session.of("one", "artifact")] == ["responses.json"]


def test_later_requests_load_nothing(caller: Caller) -> None:
    caller.ask("first", "Hello")
    caller.ask("second", "Hello")
    caller.session.send("ping", n="loads")

    assert caller.session.until("pong", n="loads")["loads"] == 1
    assert len(caller.session.of(None, "ready")) == 1


def test_streams_of_two_requests_keep_apart(caller: Caller) -> None:
    session = caller.session
    asked = {"left": ["Hello Ana", "Dear Bo"], "right": ["Where is the red car?"]}
    for id, items in asked.items():
        caller.run(id, *items, stream=True, max_tokens=24, ignore_eos=True)

    results = {id: session.result(id) for id in asked}

    for id, items in asked.items():
        for number in range(len(items)):
            assert streamed(session, id, number) == results[id]["items"][number]["output"]
        assert outputs(results[id]) == outputs(caller.ask(f"{id}-alone", *items, max_tokens=24, ignore_eos=True))


def test_an_abort_ends_one_request_alone(caller: Caller) -> None:
    session = caller.session
    caller.run("stays", "Hello Ana", **LONG)
    caller.run("goes", *["Dear Bo"] * 500, **LONG)
    session.until("text_delta", "goes")
    session.send("abort", id="goes")

    assert session.until("finish", "goes")["status"] == "cancelled"
    assert session.result("stays")["items"][0]["finish_reason"] == "length"
    assert session.of("goes", "result") == []
    assert session.of("goes")[-1]["event"] == "finish"


@pytest.mark.parametrize(
    ("bad", "kind", "says"),
    [
        ({"inference": {"top_p": 7}}, "BadInput", "top_p"),
        ({"inference": {"logit_bias": {"5": 1.0}}}, "BadInput", "logit_bias"),
        ({"inference": {"structured_outputs": {"regex": "("}}}, "BadInput", "unclosed group"),
        ({"inference": {"structured_outputs": {"grammar": "start: x"}}}, "BadInput", "engine vllm"),
        ({"data": {"type": "jsonl", "path": "/there/is/none.jsonl"}}, "BadInput", "none.jsonl"),
        ({"model": {"source": {"identifier": "other/model"}}}, "BadRequest", "other/model"),
        ({"model": {"adapters": [{"path": "/nowhere"}]}}, "BadInput", "/nowhere"),
    ],
)
def test_a_bad_request_fails_alone(caller: Caller, bad: dict[str, Any], kind: str, says: str) -> None:
    caller.run("good", "Hello", max_tokens=16)
    caller.run("bad", "Hello", spec=bad)

    error = caller.session.error("bad")

    assert (error["type"], error["retryable"]) == (kind, kind == "BadRequest")
    assert says in error["message"]
    assert outputs(caller.session.result("good"))


def test_each_request_has_its_own_structure(caller: Caller) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
    closed = {"json": schema, "disable_any_whitespace": True, "disable_additional_properties": True}
    plain = outputs(caller.ask("plain", "Hello Ana", max_tokens=24))
    asked = {
        "json": {"structured_outputs": closed, "stream": True},
        "regex": {"structured_outputs": {"regex": "[ab]{3}"}},
        "choice": {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 1.0, "seed": 3},
        "free": {},
    }
    for id, options in asked.items():
        caller.run(id, "Hello Ana", "Dear Bo", **{"max_tokens": 24, **options})

    found = {id: caller.session.result(id) for id in asked}

    assert all(json.loads(text) in ({"n": 1}, {"n": 22}) for text in outputs(found["json"]))
    assert streamed(caller.session, "json", 1) == outputs(found["json"])[1]
    assert all(re.fullmatch("[ab]{3}", text) for text in outputs(found["regex"]))
    assert set(outputs(found["choice"])) <= {"yes", "no"}
    assert outputs(found["free"])[0] == plain[0]
    assert all("warnings" not in result for result in found.values())


def test_an_answer_whose_structure_is_cut_off_is_told(caller: Caller) -> None:
    result = caller.ask("cut", "Hello", structured_outputs={"regex": "[ab]{30}"}, max_tokens=5)

    assert result["items"][0]["finish_reason"] == "length"
    assert "1 of 1 answers ended at max_tokens" in result["warnings"][0]


def test_a_seeded_answer_does_not_depend_on_who_else_is_there(caller: Caller) -> None:
    seeded = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "batch_size": 1}
    items = ["Hello Ana", "Dear Bo", "Good morning"]
    alone = outputs(caller.ask("alone", *items, **seeded))
    for number in range(3):
        caller.run(f"other-{number}", "Hello", "Hello", temperature=1.0, max_tokens=12)

    assert outputs(caller.ask("again", *items, **seeded)) == alone


def test_an_answer_without_a_seed_does_not_repeat_after_a_seeded_one(caller: Caller) -> None:
    free, seeded = {"temperature": 1.0, "max_tokens": 12}, {"temperature": 1.0, "max_tokens": 12, "seed": 3}
    found = []
    for number in range(2):
        caller.ask(f"seeded-{number}", "Hello Ana", **seeded)
        found.append(outputs(caller.ask(f"free-{number}", "Hello Ana", **free)))

    assert found[0] != found[1]


def test_a_long_prompt_of_a_seeded_request_does_not_cut_its_other_answers(caller: Caller) -> None:
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True}

    result = caller.ask("long", "Hello", "Hello " * 110, "Dear Bo", **sampled)

    counts = [item["usage"]["completion_tokens"] for item in result["items"]]
    assert (counts[0], counts[2]) == (40, 40)
    assert 0 < counts[1] < 40


def test_sections_that_have_no_effect_are_told_of(caller: Caller, tiny_model: Path) -> None:
    source = {"source": {"type": "local", "identifier": str(tiny_model)}}
    caller.run("told", "Hello", spec={"model": {**source, "vllm": {"max_num_seqs": 1}, "transformers": {"dtype": "x"}}})

    caller.session.result("told")

    told = [event["message"].split(":")[0] for event in caller.session.of("told", "log")]
    assert told == ["model.vllm is not used", "model.transformers of this request is not used"]


def test_a_garbage_line_is_an_error_and_the_session_lives(caller: Caller) -> None:
    session = caller.session
    for number, line in enumerate(("no json", '["a list"]', '{"op": "dance"}', '{"op": "run", "id": 7}'), start=1):
        session.write(line)
        assert session.until("error", count=number)["error"]["type"] == "BadLine"
    session.write('{"op": "run", "id": "half"}')

    assert session.error("half")["type"] == "BadLine"
    assert outputs(caller.ask("after", "Hello"))


def test_merged_calls_are_answered_each_in_its_own_folder(caller: Caller) -> None:
    def call(text: str, **inference: Any) -> dict[str, Any]:
        return {"data": {"type": "list", "items": [text]}, "inference": {"max_tokens": 4, **inference}}

    children = {"a": call("Hello", temperature=0), "b": call("Hello", top_p=9), "c": call("Dear Bo", temperature=0)}
    caller.send("merged", {"merge_children": [{"id": id, "spec": spec} for id, spec in children.items()]})

    done = caller.session.result("merged")["children"]

    assert outputs(done["a"]) == outputs(caller.ask("a-alone", "Hello", max_tokens=4))
    assert outputs(done["c"])
    assert done["b"]["error"]["type"] == "BadInput"
    assert (caller.out("merged") / "children" / "a" / "responses.json").is_file()
    told = {event["path"] for event in caller.session.of("merged", "artifact")}
    assert told == {"children/a/responses.json", "children/c/responses.json", "responses.json"}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return make_tiny_adapter(tiny_model, folder / "adapter", folder / "merged")


def test_each_request_has_its_own_adapter(
    caller: Caller, adapter: Path, tmp_path: Path, run: Callable[..., Ended]
) -> None:
    items, greedy = ["Hello Ana", "Dear Bo"], {"inference": {"max_tokens": 12, "temperature": 0}}
    data = {"data": {"type": "list", "items": items}}
    tuned = {"model": {"adapters": [{"type": "lora", "path": str(adapter)}]}, **greedy}
    twice = {"model": {"adapters": [{"path": str(adapter), "weight": 0.5}] * 2}, **greedy}
    expected = outputs(run("inference", {**data, **greedy}, model=adapter.parent / "merged").result)
    for _ in range(2):  # the second time it is on the model already
        caller.run("tuned", *items, spec=tuned)
        caller.run("plain", *items, max_tokens=12)
        caller.run("twice", *items, spec=twice)
        found = {id: outputs(caller.session.result(id)) for id in ("tuned", "plain", "twice")}
        caller.session.forget()

    assert found["tuned"] == expected
    assert found["plain"] == outputs(run("inference", {**data, **greedy}).result)
    assert found["plain"] != expected
    assert found["twice"] == expected


def test_close_ends_it_when_the_open_requests_have_ended(fresh: SessionChild, tmp_path: Path) -> None:
    caller = Caller(fresh, tmp_path)
    caller.run("open", "Hello", **LONG)
    fresh.send("close")
    caller.run("late", "Hello")

    assert (fresh.error("late")["type"], fresh.error("late")["retryable"]) == ("SessionClosing", True)
    assert fresh.result("open")["items"][0]["finish_reason"] == "length"
    assert fresh.until("finish")["status"] == "completed"
    assert fresh.end() == 0


@pytest.mark.parametrize("how", ["end of input", "SIGTERM"])
def test_it_ends_at_once_and_leaves_no_process(fresh: SessionChild, tmp_path: Path, how: str) -> None:
    caller = Caller(fresh, tmp_path)
    caller.run("open", *["Hello"] * 500, **LONG)
    fresh.until("text_delta", "open")
    tree = fresh.tree()

    if how == "SIGTERM":
        fresh.process.send_signal(signal.SIGTERM)
    else:
        fresh.end_input()

    finish = fresh.until("finish", "open")
    if how == "SIGTERM":  # nobody has aborted the request
        assert (finish["error"]["type"], finish["error"]["retryable"]) == ("EngineDied", True)
    else:
        assert finish["status"] == "cancelled"
    assert fresh.end() == (143 if how == "SIGTERM" else 0)
    assert psutil.wait_procs(tree, timeout=patient(10))[1] == []


def test_the_end_of_input_while_loading_ends_it(tmp_path: Path, tiny_model: Path) -> None:
    with open_session(tmp_path, tiny_model) as session:
        Caller(session, tmp_path).run("early", "Hello")
        session.until("connection", "early")
        session.end_input()

        assert session.until("finish", "early")["status"] == "cancelled"
        assert session.end() == 0


def test_a_model_that_cannot_be_loaded_fails_the_session_and_its_requests(tmp_path: Path) -> None:
    with open_session(tmp_path, tmp_path / "nothing") as session:
        Caller(session, tmp_path).send("early", {"data": {"type": "list", "items": ["Hello"]}})

        assert session.error("early")["retryable"] is False
        assert session.until("finish")["status"] == "failed"
        assert session.end() == 1


def test_what_is_no_opening_is_refused(tmp_path: Path) -> None:
    with SessionChild(tmp_path / "session.log") as session:
        session.send("open", engine="llama.cpp", spec={})

        assert "llama.cpp" in session.until("finish")["error"]["message"]
        assert session.end() == 2
