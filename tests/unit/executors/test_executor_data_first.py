"""Data is read and checked before anything of the model is looked at; files of their own for the evaluation."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from executors.base import ExecutorError
from executors.data.columns import training_rows
from executors.data.hub import _known
from executors.data.sources import as_rows, eval_entries, read_entries
from executors.generation.prompts import read_prompts
from gpuflow.protocol import Emitter
from tests.fixtures.executor_here import run_here

MODEL = {"source": {"type": "huggingface", "identifier": "nobody/there-is-no-such-model"}}


@pytest.fixture
def emitter() -> Emitter:
    return Emitter(io.StringIO())


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "tickets.csv"
    path.write_text("subject,reply\nHelp,Here\nBye,Bye\n")
    return path


@pytest.mark.parametrize(
    ("task_type", "data", "says"),
    [
        ("sft", {}, "the columns found are: subject, reply"),
        (
            "lora_sft",
            {"columns": {"prompt": "question", "completion": "reply"}},
            "names question, but the columns found",
        ),
        ("lora_sft", {"columns": {"chosen": "subject"}}, "has the roles chosen"),
        (
            "sft",
            {"columns": {"prompt": "subject", "completion": "reply"}, "eval_split": "test"},
            "only hub data sets have",
        ),
        ("inference", {}, "has no messages or prompt; its columns are: subject, reply"),
        ("inference", {"columns": {"prompt": "question"}}, "has no 'question'; its columns are: subject, reply"),
        ("inference", {"columns": {"chosen": "subject"}}, "(the columns found are: subject, reply)"),
    ],
)
def test_wrong_columns_are_told_though_there_is_no_model(
    table: Path, tmp_path: Path, task_type: str, data: dict[str, Any], says: str
) -> None:
    spec = {"taskType": task_type, "model": MODEL, "data": {"type": "csv", "path": str(table), **data}}

    ended = run_here(task_type, spec, tmp_path / "out")

    error = ended.named("finish")[0]["error"]
    assert (error["type"], error["retryable"]) == ("BadInput", False)
    assert says in error["message"]


def test_wrong_columns_of_the_evaluation_are_told_too(table: Path, tmp_path: Path) -> None:
    other = tmp_path / "eval.csv"
    other.write_text("a,b\n1,2\n")
    columns = {"prompt": "subject", "completion": "reply"}
    data = {"type": "csv", "path": str(table), "columns": columns, "eval_split": {"path": str(other)}}

    ended = run_here("sft", {"taskType": "sft", "model": MODEL, "data": data}, tmp_path / "out")

    assert "the columns found are: a, b" in ended.named("finish")[0]["error"]["message"]


def test_an_evaluation_file_has_the_type_and_the_columns_of_the_data(table: Path) -> None:
    data = {
        "type": "csv",
        "columns": {"prompt": "subject", "completion": "reply"},
        "eval_split": {"path": str(table)},
    }

    assert training_rows(as_rows(eval_entries(data), bare="text"), data)[0] == {"prompt": "Help", "completion": "Here"}
    with pytest.raises(ExecutorError, match="give a share"):
        eval_entries({**data, "type": "list"})


def test_inference_takes_the_named_column(table: Path, emitter: Emitter) -> None:
    data = {"type": "csv", "path": str(table), "columns": {"prompt": "subject"}}

    assert [prompt.messages[0]["content"] for prompt in read_prompts(read_entries(data, None, emitter), data)] == [
        "Help",
        "Bye",
    ]


@pytest.mark.parametrize(
    "text", ['[{"q": 1}, {"q": 2}]', '{"q": 1}\n{"q": 2}\n', '\ufeff[\n {"q": 1},\n {"q": 2}\n]\n']
)
def test_a_json_file_is_a_list_or_an_object_a_line(tmp_path: Path, emitter: Emitter, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)

    assert read_entries({"type": "jsonl", "path": str(path)}, None, emitter) == [{"q": 1}, {"q": 2}]


def test_a_line_of_jsonl_may_be_a_list(tmp_path: Path, emitter: Emitter) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(chat)}\n")

    assert read_entries({"type": "jsonl", "path": str(path)}, None, emitter) == [chat]


def test_tsv_is_separated_by_tabs(tmp_path: Path, emitter: Emitter) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("q\ta\n1,5\t2\n")

    assert read_entries({"type": "csv", "path": str(path)}, None, emitter) == [{"q": "1,5", "a": "2"}]


def test_echo_gives_the_rows_of_a_file_by_their_roles(table: Path, tmp_path: Path) -> None:
    data = {"type": "csv", "path": str(table), "columns": {"prompt": "subject", "completion": "reply"}}

    ended = run_here("echo", {"taskType": "echo", "data": data}, tmp_path / "out")

    assert [item["output"] for item in ended.result["items"]] == [
        {"prompt": "Help", "completion": "Here"},
        {"prompt": "Bye", "completion": "Bye"},
    ]


# -- what the hub answers ---------------------------------------------------------------------------------------


class _Answer:
    def __init__(self, status: int) -> None:
        self.status_code = status


def hub_error(status: int | None, name: str = "HfHubHTTPError", message: str = "", outer: str = "OSError") -> OSError:
    """Return what `datasets` raises: an error whose cause is hidden."""
    cause = type(name, (OSError,), {})(message)
    if status is not None:
        cause.response = _Answer(status)
    error = type(outer, (OSError,), {})(message)
    error.__context__, error.__suppress_context__ = cause, True
    return error


@pytest.mark.parametrize(
    ("error", "kind", "retryable", "says"),
    [
        (hub_error(401), "NotAuthorized", False, "secrets: [HF_TOKEN]"),
        (hub_error(403), "NotAuthorized", False, "secrets: [HF_TOKEN]"),
        (hub_error(401, "RepositoryNotFoundError"), "NotFound", False, "check the name"),
        (hub_error(404), "NotFound", False, "check the name"),
        (
            hub_error(None, "X", "d is a gated dataset on", "DatasetNotFoundError"),
            "NotAuthorized",
            False,
            "ask for access",
        ),
        (hub_error(403, "GatedRepoError"), "NotAuthorized", False, "ask for access"),
        (hub_error(503), "Network", True, "HTTP 503"),
        (hub_error(429), "Network", True, "HTTP 429"),
        (hub_error(None, "ConnectError"), "Network", True, "cannot be reached"),
    ],
)
def test_a_refusal_of_the_hub_is_found_behind_other_errors(
    error: OSError, kind: str, retryable: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GPUFLOW_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    known = _known(error, "org/private")

    assert known is not None
    assert (known.type, known.retryable) == (kind, retryable)
    assert says in known.message
    assert "org/private" in known.message


def test_offline_is_said_and_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLOW_OFFLINE", "1")

    known = _known(hub_error(None, "OfflineModeIsEnabled"), "org/data")

    assert known is not None
    assert (known.type, known.retryable) == ("Offline", False)
    assert _known(OSError("disk"), "org/data") is None
