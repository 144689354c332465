"""What is said of tasks that are steered: which, how far it came, and what of theirs cannot forge a line."""

from __future__ import annotations

import pytest

from gpuflow.cli import output
from gpuflow.cli.selecting import confirmed, told_if_cut
from gpuflow.cli.steer import note_pipelines
from gpuflow.errors import BrokerUnavailable
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState


def part_of(pipeline: str | None) -> TaskRecord:
    return TaskRecord(id="t", state=TaskState.DEAD, pipeline=pipeline)


def test_pipelines_of_what_is_tried_again_are_named_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    note_pipelines([part_of("b"), part_of(None), part_of("a"), part_of("b")])

    told = capsys.readouterr()
    assert told.out == ""
    assert "3 of them belong to 2 pipelines" in told.err and "a, b" in " ".join(told.err.split())


def test_many_pipelines_are_not_all_named(capsys: pytest.CaptureFixture[str]) -> None:
    note_pipelines([part_of(f"p{number}") for number in range(7)])

    assert "p4 ..." in " ".join(capsys.readouterr().err.split())


def test_of_single_tasks_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    note_pipelines([part_of(None)])

    assert capsys.readouterr().err == ""


FORGED = "nightly\nstate  SUCCEEDED\r\nt9  QUEUED\u2028x"


def test_a_name_of_several_lines_forges_no_line_of_what_is_about_to_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    record = TaskRecord(id="t", state=TaskState.QUEUED, name=FORGED, owner="ana\nt8  QUEUED")
    assert not confirmed([record], "cancel", dry_run=True, yes=False, as_json=False)
    (only,) = capsys.readouterr().out.splitlines()
    assert only.startswith("t QUEUED nightly state SUCCEEDED t9")


def test_a_value_of_several_lines_forges_no_field(capsys: pytest.CaptureFixture[str]) -> None:
    output.pairs({"state": "DEAD", "name": FORGED})
    first, second, *others = capsys.readouterr().out.splitlines()
    assert (first, second) == ("state  DEAD", "name   nightly")
    assert len(others) == 3 and all(line.startswith(" " * 7) for line in others)


@pytest.mark.parametrize("end", [BrokerUnavailable("away"), KeyboardInterrupt()])
def test_what_is_cut_says_how_far_it_came(capsys: pytest.CaptureFixture[str], end: BaseException) -> None:
    with pytest.raises(type(end)), told_if_cut(1000) as progress:  # noqa: PT012
        progress(400)
        raise end
    told = capsys.readouterr()
    assert "stopped after 400 of 1000 tasks" in told.err and "the same command does the rest" in told.err
    assert told.out == ""


def test_ages_are_by_the_clock_of_the_server() -> None:
    assert output.age(1000.0, 1125.0) == "2 min ago" and output.age(None, 1125.0) == ""
    assert output.span(1000.0, None, 1003.0) == "3.0 s" and output.span(1000.0, 1001.0, 9e9) == "1.0 s"
    assert output.when_ago(1000.0, 1125.0).endswith("(2 min ago)")
