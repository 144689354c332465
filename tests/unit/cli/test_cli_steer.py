"""What is said of tasks that are tried again, and belong to pipelines that have ended."""

from __future__ import annotations

import pytest

from gpuflow.cli.steer import note_pipelines
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
