"""The result of a child: by a line, or by a file in its output folder, of which nothing is believed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuflow.ledger.ledger import Holder
from gpuflow.protocol import MAX_LINE_BYTES, MAX_RESULT_BYTES, RESULT_FILE, Event, Request
from gpuflow.secrets import Redactor
from gpuflow.worker.attempt import Attempt
from gpuflow.worker.child import ChildEnd, LineKind, RunningWork
from gpuflow.worker.given_result import GivenResult, ResultLost
from gpuflow.worker.outcome import Outcome
from gpuflow.worker.sessions.request import SessionRequest
from gpuflow.worker.standalone import Ended, Standalone

DONE = {"event": "finish", "status": "completed"}


def program(folder: Path, code: str) -> tuple[Ended, list[Event]]:
    """Run a program of a user's own, which knows no code of gpuflow's."""
    events: list[Event] = []
    request = Request(task_id="t", task_type="command", spec={}, output_dir=str(folder / "out"))
    argv = (sys.executable, "-S", "-c", f"import json, os\n{code}\nprint(json.dumps({DONE}))")
    runner = Standalone(request, argv=argv, environment=dict(os.environ), on_event=events.append)
    return runner.run(), events


@pytest.mark.parametrize("name", ["answer.json", "deep/er/answer.json", RESULT_FILE])
def test_a_program_names_the_file_with_its_result(tmp_path: Path, name: str) -> None:
    code = f"""
os.makedirs(os.path.dirname({name!r}) or ".", exist_ok=True)
with open({name!r}, "w") as file:
    json.dump({{"items": ["x" * 1000] * 12_000}}, file)
print(json.dumps({{"event": "result", "file": {name!r}}}))"""

    ended, _ = program(tmp_path, code)

    assert ended.completed, ended.error
    assert ended.result == {"items": ["x" * 1000] * 12_000}


@pytest.mark.parametrize(
    "event", ['{"event": "result", "value": {"text": "%s"}}', '{"value": {"text": "%s"}, "type": "result"}']
)
def test_a_result_in_a_line_that_is_too_long_is_no_success(tmp_path: Path, event: str) -> None:
    ended, events = program(tmp_path, f"print({event!r} % ('x' * {MAX_LINE_BYTES + 100}))")

    assert not ended.completed
    assert ended.error is not None
    assert ended.error["type"] == "ResultTooLarge"
    assert '"file"' in ended.error["message"]
    assert max(len(str(one.data)) for one in events) < 2000  # what was cut does not flood the events


def test_a_long_line_that_is_no_result_harms_nothing(tmp_path: Path) -> None:
    code = f"""
print('{{"rows": [{{"type": "result", "x": "' + "x" * {MAX_LINE_BYTES} + '"}}]}}')
print(json.dumps({{"event": "result", "value": {{"answer": 42}}}}))"""

    ended, _ = program(tmp_path, code)

    assert (ended.completed, ended.result) == (True, {"answer": 42})


def test_a_later_result_stands_in_for_one_that_was_too_long(tmp_path: Path) -> None:
    given = GivenResult(tmp_path)
    given.passed_over(b'{"event": "result", "value": "' + b"x" * 10_000)
    given.told({"value": 3})

    assert given.read() == {"value": 3}


def _torn(folder: Path) -> None:
    (folder / "r.json").write_text('{"items": [1, 2')


def _linked(folder: Path) -> None:
    (folder.parent / "outside.json").write_text('{"secret": 1}')
    (folder / "r.json").symlink_to(folder.parent / "outside.json")


def _folder(folder: Path) -> None:
    (folder / "r.json").mkdir()


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "r.json")


def _huge(folder: Path) -> None:
    with (folder / "r.json").open("wb") as file:
        file.truncate(MAX_RESULT_BYTES + 1)


def _deep(folder: Path) -> None:
    (folder / "r.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("left", "kind", "said"),
    [
        (lambda _: None, "BadResult", "is not in OUTPUT_DIR"),
        (_torn, "BadResult", "no whole JSON"),
        (_deep, "BadResult", "no whole JSON"),
        (_linked, "BadResult", "link"),
        (_folder, "BadResult", "no plain file"),
        (_pipe, "BadResult", "no plain file"),
        (_huge, "ResultTooLarge", "over the limit of 256 MiB"),
    ],
)
def test_a_file_that_is_no_result_is_a_failure(tmp_path: Path, left: Any, kind: str, said: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    left(folder)
    given = GivenResult(folder)
    given.told({"file": "r.json"})

    with pytest.raises(ResultLost, match=said) as lost:
        given.read()

    assert lost.value.record()["type"] == kind
    assert lost.value.record()["retryable"] is False


@pytest.mark.parametrize(
    "name", ["../outside.json", "/etc/hostname", "", ".", "a/../../outside.json", "link/outside.json"]
)
def test_a_result_lies_in_the_output_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "out"
    (folder / "a").mkdir(parents=True)
    (tmp_path / "outside.json").write_text("{}")
    (folder / "link").symlink_to(tmp_path)
    given = GivenResult(folder)
    given.told({"file": name})

    with pytest.raises(ResultLost) as lost:
        given.read()

    assert lost.value.kind == "BadResult"


class Ledger:
    """Takes the events of an attempt."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def report(self, _: str, __: Holder, events: list[str], *___: str) -> str:
        self.events += events
        return "ok"


class Lines:
    """A child that has said these lines, and ended well."""

    shim_pid = None
    held_up_seconds = 0.0

    def __init__(self, *lines: tuple[LineKind, bytes]) -> None:
        self.lines = lines

    def notice(self) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def read(self, _: float) -> Iterator[tuple[LineKind, bytes]]:
        yield from self.lines

    def wait(self) -> ChildEnd:
        return ChildEnd(exit_code=0, signal=None)


def line(event: Mapping[str, Any]) -> tuple[LineKind, bytes]:
    return "event", json.dumps(event).encode()


def attempt(folder: Path, work: RunningWork) -> tuple[Outcome, Ledger]:
    ledger: Any = Ledger()
    made = Attempt(
        Request(task_id="t", task_type="inference", spec={}, output_dir=str(folder)),
        ledger,
        Holder(attempt=1, token="x"),
        launch=lambda: work,
        log_path=folder / "executor.log",
        log_max_bytes=1 << 20,
        grace_seconds=1,
        notice_seconds=1,
        redactor=Redactor(["swordfish"]),
    )
    return made.run(), ledger


def test_an_attempt_reads_the_file_of_its_session_once_and_hides_secrets(tmp_path: Path) -> None:
    (tmp_path / RESULT_FILE).write_text('{"items": ["the word is swordfish"]}')
    work = SessionRequest("r1")
    work.put(*line({"event": "result", "file": RESULT_FILE}))
    work.end(DONE)

    outcome, ledger = attempt(tmp_path, work)

    assert outcome.completed, outcome.error
    assert outcome.result == {"items": ["the word is ***"]}
    assert not (tmp_path / RESULT_FILE).exists()
    assert not any("result" in event for event in ledger.events)


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([line({"event": "result", "file": "gone.json"}), line(DONE)], "BadResult"),
        ([("cut", b'{"event": "result", "value": "x'), ("cut", b'x"}'), line(DONE)], "ResultTooLarge"),
        ([line({"event": "result", "file": RESULT_FILE})], "NoFinish"),
    ],
)
def test_an_attempt_without_its_result_fails(tmp_path: Path, lines: Any, kind: str) -> None:
    (tmp_path / RESULT_FILE).write_text("{}")

    outcome, _ = attempt(tmp_path, Lines(*lines))

    assert not outcome.completed
    assert outcome.error is not None
    assert outcome.error["type"] == kind
    assert not (tmp_path / RESULT_FILE).exists()


def test_a_file_that_a_program_has_named_stays(tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text("[1]")

    outcome, _ = attempt(tmp_path, Lines(line({"event": "result", "file": "answer.json"}), line(DONE)))

    assert outcome.result == {"value": [1]}
    assert (tmp_path / "answer.json").exists()
