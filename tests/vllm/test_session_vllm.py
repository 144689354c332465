"""Warm sessions on vLLM: real processes, a tiny real model, exact float32; transformers says what is right."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fixtures.session_child import Caller, SessionChild, outputs, streamed
from tests.support.waiting import patient
from tests.vllm.conftest import IN_CORE

pytestmark = pytest.mark.vllm

ITEMS = [
    "Hello Ana",
    "Where is the red car?",
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Good morning"}],
    {"prompt": "Dear Bo, the green lamp is"},
]
LONG = {"max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.fixture
def caller(warm: SessionChild, tmp_path: Path) -> Caller:
    return Caller(warm, tmp_path / "vllm")


@pytest.fixture
def transformers(reference: SessionChild, tmp_path: Path) -> Caller:
    return Caller(reference, tmp_path / "transformers")


def test_ready_says_what_is_loaded(warm: SessionChild, tiny: Path) -> None:
    ready = warm.until("ready")

    assert (ready["engine"], ready["model"]) == ("vllm", str(tiny / "model"))
    assert (ready["max_requests"], ready["memory_bytes"], ready["revision"]) == (32, None, None)


@pytest.mark.parametrize(
    "inference",
    [
        {"max_tokens": 64},
        {"max_tokens": 64, "ignore_eos": True, "repetition_penalty": 1.3},
        {"max_tokens": 48, "ignore_eos": True, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"max_tokens": 48, "ignore_eos": True, "stop": ["e", "\x04"], "include_stop_str_in_output": True},
        {"max_tokens": 250, "ignore_eos": True},  # to the end of the context
        {"max_tokens": 16, "system_prompt": "You are a clerk."},
    ],
)
def test_greedy_answers_equal_those_of_transformers_token_by_token(
    caller: Caller, transformers: Caller, inference: dict[str, Any]
) -> None:
    caller.run("same", *ITEMS, **inference)

    expected = transformers.ask("same", *ITEMS, **inference, batch_size=1)

    assert _whole(caller.session.result("same")) == _whole({**expected, "engine": "vllm"})


def _whole(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what is left of a character that its last token began: vLLM leaves that out."""
    return {**result, "items": [{**item, "output": item["output"].rstrip("\ufffd")} for item in result["items"]]}


def test_later_requests_load_nothing(caller: Caller) -> None:
    first = caller.ask("first", "Hello")
    assert outputs(caller.ask("second", "Hello")) == outputs(first)
    caller.session.send("ping", n="loads")

    assert caller.session.until("pong", n="loads")["loads"] == 1
    assert json.loads((caller.out("first") / "responses.json").read_text()) == first


def test_streams_of_two_requests_keep_apart(caller: Caller) -> None:
    asked = {"left": ["Hello Ana", "Dear Bo"], "right": ["Where is the red car?"]}
    for id, items in asked.items():
        caller.run(id, *items, stream=True, max_tokens=40, ignore_eos=True)

    results = {id: caller.session.result(id) for id in asked}

    for id, items in asked.items():
        for number in range(len(items)):
            assert streamed(caller.session, id, number) == results[id]["items"][number]["output"]
        assert outputs(results[id]) == outputs(caller.ask(f"{id}-alone", *items, max_tokens=40, ignore_eos=True))


def test_an_abort_ends_one_request_alone(caller: Caller) -> None:
    def comes_before_the_end(number: int) -> bool:
        """Abort one of two requests; tell whether a third has text before the other one ends.

        Without the abort it has none: 31 answers of the first go on as long as that of the other, and 169 wait. With it
        there is time enough for it, but where this process is held up.
        """
        session, (stays, goes, comes) = caller.session, (f"{name}-{number}" for name in ("stays", "goes", "comes"))
        caller.run(stays, "Hello Ana", **LONG)
        caller.run(goes, *["Dear Bo"] * 200, **LONG)
        session.until("text_delta", goes)
        session.send("abort", id=goes)
        assert session.until("finish", goes)["status"] == "cancelled"
        caller.run(comes, *["Good morning"] * 31, **LONG)
        assert session.result(stays)["items"][0]["finish_reason"] == "length"
        assert len(outputs(session.result(comes))) == 31
        told = [(event.get("id"), event["event"]) for event in session.events]
        return told.index((comes, "text_delta")) < told.index((stays, "finish"))

    assert any(comes_before_the_end(number) for number in range(10))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"inference": {"top_p": 7}}, "top_p"),
        ({"inference": {"temprature": 1}}, "temperature"),
        ({"inference": {"structured_outputs": {"jsn": {}}}}, "json"),
        ({"inference": {"structured_outputs": {"grammar": "no grammar ::: ("}}}, "rammar"),
        ({"data": {"type": "list", "items": ["word " * 5000]}}, "256"),
        ({"model": {"adapters": [{"path": "/nowhere"}]}}, "/nowhere"),
    ],
)
def test_a_bad_request_fails_alone(caller: Caller, bad: dict[str, Any], says: str) -> None:
    caller.run("good", "Hello", max_tokens=32)
    caller.run("bad", "Hello", spec=bad)

    error = caller.session.error("bad")

    assert (error["type"], error["retryable"]) == ("BadInput", False)
    assert says in error["message"]
    assert outputs(caller.session.result("good"))


def test_several_samples_and_their_log_probabilities(caller: Caller) -> None:
    result = caller.ask("n", "Hello", n=3, temperature=1.0, seed=5, logprobs=2, max_tokens=4, ignore_eos=True)

    (item,) = result["items"]
    assert len(item["outputs"]) == len(item["finish_reasons"]) == 3
    assert [len(sample) for sample in item["logprobs"]] == [4, 4, 4]
    assert len(item["logprobs"][0][0]["top"]) >= 2
    assert item["usage"]["completion_tokens"] == 12
    again = caller.ask("m", "Hello", n=3, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)
    assert again["items"][0]["outputs"] == item["outputs"]


def test_structured_output(caller: Caller) -> None:
    schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    structured = {"json": schema, "disable_any_whitespace": True}
    caller.run("json", "Hello", structured_outputs=structured, max_tokens=40)
    caller.run("choice", "Hello", structured_outputs={"choice": ["red", "blue"]}, max_tokens=40)
    caller.run("regex", "Hello", structured_outputs={"regex": "[a-c]{3}"}, max_tokens=40)

    assert isinstance(json.loads(outputs(caller.session.result("json"))[0])["red"], bool)
    assert outputs(caller.session.result("choice"))[0] in ("red", "blue")
    assert re.fullmatch("[a-c]{3}", outputs(caller.session.result("regex"))[0])


def test_each_request_has_its_own_adapter(
    caller: Caller, transformers: Caller, tiny: Path, open_session: Callable[..., SessionChild], tmp_path: Path
) -> None:
    adapters = {
        f"with-{n}": {"model": {"adapters": [{"type": "lora", "path": str(tiny / f"adapter-{n}")}]}} for n in (1, 2)
    }
    options = {"max_tokens": 24, "ignore_eos": True}
    for _ in range(2):  # the second time they are loaded already
        for id, spec in adapters.items():
            caller.run(id, *ITEMS, spec={**spec, "inference": {"temperature": 0, **options}})
        caller.run("without", *ITEMS, **options)
        found = {id: outputs(_whole(caller.session.result(id))) for id in (*adapters, "without")}
        caller.session.forget()
        assert found["without"] == outputs(_whole(transformers.ask("without", *ITEMS, **options, batch_size=1)))
        transformers.session.forget()

    assert len({str(answers) for answers in found.values()}) == 3
    for n in (1, 2):
        with open_session(tiny / f"merged-{n}", "transformers") as merged:
            expected = Caller(merged, tmp_path / f"merged-{n}").ask("expected", *ITEMS, **options, batch_size=1)
        assert found[f"with-{n}"] == outputs(_whole(expected))


def test_an_adapter_of_too_high_a_rank_says_what_to_set(caller: Caller, tiny: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(tiny / "adapter-1", adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 100}))
    caller.run("high", "Hello", spec={"model": {"adapters": [{"path": str(adapter)}]}})

    error = caller.session.error("high")

    assert (error["type"], error["retryable"]) == ("BadInput", False)
    assert "rank 100" in error["message"] and "model.vllm.max_lora_rank" in error["message"]


@pytest.mark.parametrize("include", [False, True])
def test_stop_tokens_and_min_tokens_are_as_on_transformers(caller: Caller, transformers: Caller, include: bool) -> None:
    options = {
        "max_tokens": 60,
        "min_tokens": 12,
        "stop": ["e", "a"],
        "stop_token_ids": list(range(60, 90)),
        "include_stop_str_in_output": include,
    }

    result = _whole(caller.ask("stops", *ITEMS, **options))

    assert result == _whole({**transformers.ask("stops", *ITEMS, **options, batch_size=1), "engine": "vllm"})
    assert "stop" in {item["finish_reason"] for item in result["items"]}


def test_merged_calls_are_answered_each_in_its_own_folder(caller: Caller) -> None:
    def call(text: str, **inference: Any) -> dict[str, Any]:
        return {"data": {"type": "list", "items": [text]}, "inference": {"max_tokens": 4, **inference}}

    children = {"a": call("Hello", temperature=0), "b": call("Hello", top_p=9), "c": call("Dear Bo", temperature=0)}
    caller.send("merged", {"merge_children": [{"id": id, "spec": spec} for id, spec in children.items()]})

    done = caller.session.result("merged")["children"]

    assert outputs(done["a"]) == outputs(caller.ask("a-alone", "Hello", max_tokens=4))
    assert done["b"]["error"]["type"] == "BadInput"
    assert done["c"]["engine"] == "vllm"
    assert (caller.out("merged") / "children" / "c" / "responses.json").is_file()


def test_embeddings_equal_those_of_transformers(
    open_session: Callable[..., SessionChild], tiny: Path, tmp_path: Path
) -> None:
    texts = ["Hello Ana", "Where is the red car?", "Good morning " * 200]
    found: dict[str, Any] = {}
    for engine in ("vllm", "transformers"):
        with open_session(tiny / "model", engine, "embedding", **IN_CORE) as session:
            session.until("ready")
            found[engine] = Caller(session, tmp_path / engine, "embedding").ask("embed", *texts)

    assert found["vllm"]["usage"] == found["transformers"]["usage"]
    for one, other in zip(found["vllm"]["items"], found["transformers"]["items"], strict=True):
        assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-4)
        assert one.get("truncated") == other.get("truncated")


def test_a_killed_engine_fails_every_open_request_and_the_session(caller: Caller) -> None:
    session = caller.session
    tree = session.tree()
    for id in ("one", "two"):  # one in the middle of its text, one that waits for a place
        caller.run(id, *["Hello"] * 200, **LONG)
    session.until("text_delta", "one")
    (core,) = (process for process in tree if "EngineCore" in process.name())
    core.send_signal(signal.SIGKILL)

    for id in ("one", "two"):
        error = session.error(id)
        assert (error["type"], error["retryable"]) == ("EngineDied", True)
    assert session.until("finish")["error"]["type"] == "EngineDied"
    assert session.end() == 1
    assert psutil.wait_procs(tree, timeout=patient(10))[1] == []


def test_the_end_of_input_ends_it_and_leaves_no_process(caller: Caller) -> None:
    session = caller.session
    caller.run("open", *["Hello"] * 200, **LONG)
    session.until("text_delta", "open")
    tree = session.tree()
    session.end_input()

    assert session.until("finish", "open")["status"] == "cancelled"
    assert session.end() == 0
    assert psutil.wait_procs(tree, timeout=patient(10))[1] == []


def test_an_engine_that_cannot_start_says_why_and_may_start_elsewhere(
    open_session: Callable[..., SessionChild], tiny: Path
) -> None:
    with open_session(tiny / "model", "vllm", worker_cls="no_such_module.Worker") as session:
        error = session.until("finish")["error"]

        assert (error["type"], error["retryable"]) == ("EngineNotStarted", True)
        assert "no_such_module" in error["message"]
        assert session.end() == 1


@pytest.mark.parametrize(
    ("vllm", "says"), [({"max_modle_len": 8}, "max_model_len"), ({"max_model_len": 100_000}, "max_model_len")]
)
def test_engine_arguments_that_do_not_fit_fail_the_session(
    open_session: Callable[..., SessionChild], tiny: Path, vllm: dict[str, Any], says: str
) -> None:
    with open_session(tiny / "model", "vllm", **vllm) as session:
        error = session.until("finish")["error"]

        assert (error["type"], error["retryable"]) == ("BadInput", False)
        assert says in error["message"]
        assert session.end() == 1
