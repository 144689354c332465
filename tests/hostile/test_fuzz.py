"""A bounded run of the fuzzing (`tox -e fuzz` is the long one), and what it has found so far."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from executors.retrieval.prompting import cited_numbers
from gpuflow.artifacts.http_store import fetch_http
from gpuflow.artifacts.links import point
from gpuflow.artifacts.store import fetch, open_store, shown_url
from gpuflow.artifacts.throttle import Throttle
from gpuflow.broker.merged_calls import arguments, read_message, request_of
from gpuflow.broker.wire import portable
from gpuflow.errors import ArtifactError, InvalidTemplate
from gpuflow.ledger.eventlog import LoggedEvent
from gpuflow.merge.completion import _stored
from gpuflow.merge.keys import merge_key
from gpuflow.progress_model import ProgressModel, progress_text
from gpuflow.protocol import is_safe_id, parse_line
from gpuflow.routing.queue_parsing import requirement_of
from gpuflow.routing.session_names import session_name
from gpuflow.settings import Settings
from gpuflow.spec import canonical, parse, pick, resolve, resolve_env
from gpuflow.spec.references import escape
from gpuflow.spec.units import duration_seconds
from gpuflow.spec.yaml_reader import scalar_value
from gpuflow.terminal import log_value
from tests.fuzz.campaign import Figures, run
from tests.fuzz.mutation import as_json
from tests.fuzz.reader import Reader
from tests.fuzz.readers import READERS
from tests.fuzz.wire_readers import Messages

SEED = "in CI"
INPUTS = 500
#: Inputs that are made in two sizes; a reader that is linear takes 8 times as long for the larger one.
GROWN, SMALL, LARGE = 20, 4 << 10, 32 << 10
MOST_TIMES, LEAST_SECONDS = 28, 0.001


@pytest.fixture(params=READERS, ids=lambda reader: reader.name.replace(" ", "-"))
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reader]:
    made: Reader = request.param(tmp_path)
    yield made
    made.close()


def test_a_reader_raises_what_it_declares_and_nothing_else(reader: Reader) -> None:
    figures = Figures(reader=reader.name)

    run(reader, SEED, range(INPUTS), figures, times=False)

    assert [finding.detail for finding in figures.findings] == []
    assert figures.inputs == INPUTS


def test_a_reader_takes_time_in_proportion_to_its_input(reader: Reader) -> None:
    assert [number for number in range(GROWN) if not is_linear(reader, number)] == []


def is_linear(reader: Reader, number: int) -> bool:
    def of(size: int) -> bytes:
        return reader.grown(random.Random(f"grown/{reader.name}/{number}"), size)

    small, large = of(SMALL), of(LARGE)
    for tries in (1, 3, 9):  # a machine that stumbles once is asked again
        least = max(seconds(reader, small, tries), LEAST_SECONDS)
        if seconds(reader, large, tries) < MOST_TIMES * least:
            return True
    return False


def seconds(reader: Reader, data: bytes, tries: int) -> float:
    found = []
    for _ in range(tries):
        before = time.process_time()
        with contextlib.suppress(*reader.declared):
            reader.read(data)
        found.append(time.process_time() - before)
    return min(found)


def test_an_input_is_made_again_from_its_seed(tmp_path: Path) -> None:
    first, second = Messages(tmp_path), Messages(tmp_path)

    assert [first.make(random.Random(f"x/{number}")) for number in range(50)] == [
        second.make(random.Random(f"x/{number}")) for number in range(50)
    ]


def test_a_crash_is_told(tmp_path: Path) -> None:
    class Broken(Messages):
        def read(self, data: bytes) -> None:
            raise KeyError("broken")

    figures = Figures(reader="broken")
    run(Broken(tmp_path), SEED, range(3), figures, times=False)

    assert (figures.crashes, figures.errors["KeyError"]) == (3, 3)
    assert "broken" in figures.findings[0].detail


# -- values of every form ----------------------------------------------------------------------------------------

_WORDS = st.sampled_from(["__type__", "__value__", "${a.x}", "${env:HOME}", "$${", "$artifact", "", "é", "\x00"])
_TEXTS = st.text(max_size=12) | _WORDS
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(_VALUES)
def test_a_value_arrives_as_it_was_sent(value: Any) -> None:
    assert loads(dumps(portable(value))) == json.loads(json.dumps(value))


@settings(max_examples=150, deadline=None)
@given(_VALUES)
def test_what_is_escaped_comes_back_as_it_was(value: Any) -> None:
    assert resolve_env(resolve(escape(value), lambda reference: pick({}, reference)), {}) == value


# -- what it has found -------------------------------------------------------------------------------------------

MESSAGE = Messages._message([[1], {"spec": {}}, {"chord": {"task": "x"}, "args": [2]}])


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "1",
        "{}",
        "[" * 100_000,
        json.dumps({**MESSAGE, "headers": []}),
        json.dumps({**MESSAGE, "properties": "x"}),
        json.dumps({**MESSAGE, "properties": {"delivery_info": "x"}}),
    ],
)
def test_a_message_that_is_none_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="message"):
        read_message(text)


@pytest.mark.parametrize(
    "body", [1, [], [1, {}, {}], [[], 1, {}], [[], {}, [1]], [[], {}], "x", None, {"a": 1, "b": 2, "c": 3}]
)
def test_a_body_that_is_none_is_a_value_error(body: Any) -> None:
    message = read_message(json.dumps({**MESSAGE, "body": base64.b64encode(json.dumps(body).encode()).decode()}))[0]

    with pytest.raises(ValueError, match="body"):
        arguments(message)


@pytest.mark.parametrize("body", [None, 7, "====", base64.b64encode(b"[" * 100_000).decode()])
def test_a_body_that_cannot_be_decoded_is_a_value_error(body: Any) -> None:
    with pytest.raises(ValueError, match=r"body|value"):
        arguments({**MESSAGE, "body": body})


def test_the_request_of_a_message_has_what_follows_on_it_and_nothing_else() -> None:
    request = request_of(read_message(json.dumps(MESSAGE))[0])

    assert (request.id, request.args, request.chord) == ("task-1", [1], {"task": "x"})


@pytest.mark.parametrize("options", ["text", [1], 7])
def test_options_of_a_graph_template_that_are_no_mapping(options: Any) -> None:
    columns = [{"label": "a", "value": ["x"]}]
    data = {"type": "graph_template", "template": {"columns": columns, "options": options}}

    with pytest.raises(InvalidTemplate, match="options"):
        canonical({**CALL, "data": data})


CALL: dict[str, Any] = {
    "taskType": "inference",
    "model": {"source": {"identifier": "tiny-chat"}},
    "data": {"type": "list", "items": ["a"]},
}


@pytest.mark.parametrize("merge", ["auto", "always"])
@pytest.mark.parametrize(
    "inference", ["${env:SAMPLING}", {"temperature": 0, "max_tokens": "${env:MOST}"}, {"seed": 1, "n": "${env:N}"}]
)
def test_a_call_has_a_key_though_its_sampling_is_still_to_be_replaced(merge: str, inference: Any) -> None:
    spec = canonical({**CALL, "inference": inference, "merge": merge})
    other = canonical({**CALL, "inference": {"temperature": 0}, "merge": merge})
    first, second = (merge_key(one, owner="o", asks=[], version="1") for one in (spec, other))

    assert second is not None
    assert first is None or first.call != second.call
    assert first is not None or (merge == "auto" and isinstance(inference, str))


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://user:secret@[x/y?token=secret#secret", "http://h:99999999/x", "http://h:x/"]
)
def test_an_address_that_is_none_is_refused_without_its_secrets(url: str, tmp_path: Path) -> None:
    ours = Settings(worker_token="token-of-the-fuzzing", gateway_url="http://127.0.0.1:9")

    assert "secret" not in shown_url(url)
    with pytest.raises(ArtifactError, match="is not a URL"):
        open_store(url, settings=ours)
    with pytest.raises(ArtifactError, match="is not a URL"):
        fetch(url, tmp_path / "f", settings=ours)


def test_a_token_that_is_no_header_is_not_printed() -> None:
    store = open_store("http://127.0.0.1:9/api/v1/results", settings=Settings(), token="hunter2-s\xe9cret")

    with pytest.raises(ArtifactError, match="no header may have") as caught:
        store.list("task-1")

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["a%0aERROR%20forged", "a%1b%5b2J", "a%e2%80%ae"])
def test_the_name_of_a_file_forges_no_line_of_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        fetch_http(
            f"http://127.0.0.1:9/{name}", tmp_path / "f", settings=Settings(), throttle=Throttle(None), max_attempts=1
        )

    assert log_value(caught.value) == str(caught.value)


@pytest.mark.parametrize("amount", [10**400, -(10**400), "9" * 400, float("nan"), float("inf")])
def test_a_duration_without_end_is_none(amount: Any) -> None:
    with pytest.raises(ValueError, match="duration"):
        duration_seconds(amount)


def test_a_task_type_of_a_matrix_that_is_no_text(tmp_path: Path) -> None:
    stage = {"name": "a", "spec": {"taskType": {"x": 1}}, "matrix": {"training.learning_rate": [1, 2]}}
    path = tmp_path / "t.json"
    path.write_bytes(as_json({"apiVersion": "gpuflow/v1", "spec": {"stages": [stage]}}))

    with pytest.raises(InvalidTemplate, match="taskType"):
        parse(path)


@pytest.mark.parametrize(
    "line",
    [
        {"event": "state", "state": "STARTING", "attempt": [1]},
        {"event": "state", "state": "STARTING", "attempt": "x"},
        {"event": "progress", "current": 10**400, "total": -(10**400), "metrics": {"loss": 10**400}},
        {"event": "progress", "current": 1e308, "total": 5e-324, "metrics": {"loss": 1e308}},
    ],
)
def test_whoever_watches_is_not_ended_by_an_event_of_a_child(line: dict[str, Any]) -> None:
    model = ProgressModel.of_task("task", "train")
    event = parse_line(json.dumps(line))

    model.update(LoggedEvent(id="1700000000000-0", source="task", name=event.name, data=event.data))

    assert isinstance(progress_text(model.stages["train"]), str)


def test_the_attempt_of_a_state_may_be_text() -> None:
    model = ProgressModel.of_task("task", "train")
    data = {"state": "STARTING", "attempt": "2"}

    change = model.update(LoggedEvent(id="1-0", source="task", name="state", data=data))

    assert change is not None and "attempt 2" in change.text


@pytest.mark.parametrize("value", ["", ".", "..", "a/b", "-a", "a" * 129, "a\n", "é", 7, None, "a\x00"])
def test_an_id_that_names_no_folder(value: Any) -> None:
    assert not is_safe_id(value)
    assert is_safe_id("task-1.a_b")


@pytest.mark.parametrize("size", [64 << 10])
def test_escaping_a_run_of_dollars_takes_no_time(size: int) -> None:
    assert escape("$" * size) == "$" * size
    assert escape("$" * size + "{x}") == "$" * (size + 1) + "{x}"
    assert cited_numbers(f"[1{' ' * size},2] and [3;4]", 4) == {1, 2, 3, 4}


def test_a_link_appears_by_rename_over_another(tmp_path: Path) -> None:
    for target in ("attempt-1/x", "attempt-2/x"):
        point(tmp_path / "x", Path(target))

    assert (tmp_path / "x").readlink() == Path("attempt-2/x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_link_that_cannot_take_its_name_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()

    with pytest.raises(IsADirectoryError):
        point(tmp_path / "x", Path("attempt-1/x"))

    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_stored_message_that_cannot_be_read_holds_up_nobody() -> None:
    assert _stored("[]", "task-1") == _stored("{", "task-1") == _stored(None, "task-1") == {}
    assert _stored(json.dumps(MESSAGE), "task-1")["headers"]["id"] == "task-1"


def test_a_key_with_half_of_a_character(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"apiVersion": "gpuflow/v1", "metadata": {"labels": {"a\\ud800": "x"}}, "spec": {"taskType": "echo"}}'
    )

    with pytest.raises(InvalidTemplate, match="half of a character"):
        parse(path)
    with pytest.raises(InvalidTemplate, match="half of a character"):
        parse({"taskType": "echo", "echo": {"a\ud800": 1}})


@pytest.mark.parametrize("text", ["+.e1", ".e5", "-._e1"])
def test_a_number_whose_only_digits_are_its_exponent_is_text(text: str) -> None:
    assert scalar_value(text) == text


def test_parameters_of_a_pipeline_that_no_stage_uses(tmp_path: Path) -> None:
    stages = [{"name": name, "spec": {"taskType": "echo"}} for name in ("a", "b")]

    template = parse({"apiVersion": "gpuflow/v1", "spec": {"parameters": {"x": 1}, "stages": stages}})

    assert any("owner.name" in str(warning) for warning in template.warnings)


@pytest.mark.parametrize("name", ["gpu-" + "9" * 5000 + "g", "gpu-x" + "1" * 5000])
def test_the_name_of_a_queue_that_is_none(name: str) -> None:
    assert requirement_of(name) is None


@pytest.mark.parametrize("checkpoint", ["${env:CHECKPOINT}", None, {"load": {"path": "/x"}}])
def test_the_session_of_a_call_whose_checkpoint_is_still_to_be_replaced(checkpoint: Any) -> None:
    plain = session_name(CALL)

    assert (session_name({**CALL, "checkpoint": checkpoint}) == plain) == (checkpoint is None)
