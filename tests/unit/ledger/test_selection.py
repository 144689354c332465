"""Which tasks filters select."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.selection import Selection
from gpuflow.ledger.states import TaskState

NOW = 1_000_000.0
RECORD = TaskRecord(
    id="t1",
    state=TaskState.FAILED,
    owner="ana",
    name="nightly/tune",
    queue="gpu-24g",
    worker="box-3",
    pipeline="p1",
    labels={"team": "nlp"},
    created_at=NOW - 3600,
)


@pytest.mark.parametrize(
    ("filters", "taken"),
    [
        ({}, True),
        ({"states": frozenset({TaskState.FAILED, TaskState.DEAD})}, True),
        ({"states": frozenset({TaskState.DEAD})}, False),
        ({"owner": "ana"}, True),
        ({"owner": "an*"}, False),
        ({"owner": ""}, False),
        ({"name": "nightly/*"}, True),
        ({"name": "tune"}, False),
        ({"queue": "gpu-*"}, True),
        ({"queue": "cpu"}, False),
        ({"worker": "box-[0-9]"}, True),
        ({"worker": "other"}, False),
        ({"pipeline": "p1"}, True),
        ({"pipeline": "p"}, False),
        ({"labels": {"team": "n*"}}, True),
        ({"labels": {"team": "*", "region": "*"}}, False),
        ({"older_seconds": 3600}, True),
        ({"older_seconds": 3601}, False),
        ({"newer_seconds": 3600}, True),
        ({"newer_seconds": 3599}, False),
        ({"owner": "ana", "name": "other"}, False),
    ],
)
def test_a_task_is_selected_where_all_filters_hold(filters: dict[str, Any], taken: bool) -> None:
    assert Selection(**filters).takes(RECORD, NOW) is taken


def test_a_selection_without_filters_is_empty() -> None:
    assert Selection().is_empty
    assert not Selection(owner="").is_empty
