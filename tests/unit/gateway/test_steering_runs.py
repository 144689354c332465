"""Who may cancel or retry a run of merged calls by its id."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuflow.gateway.problems import Problem
from gpuflow.gateway.tasks import handle
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.tokens.rights import FLEET, Grant, Role


@pytest.mark.parametrize(
    ("caller", "to_steer", "is_there"),
    [
        (Grant(role=Role.SUBMITTER, owner="ana", token_id="1", digest="d"), True, False),
        (Grant(role=Role.SUBMITTER, owner="ana", token_id="1", digest="d"), False, True),
        (Grant(role=Role.OPERATOR, owner="ana", token_id="1", digest="d"), True, True),
        (FLEET, True, True),
    ],
)
def test_a_run_of_merged_calls_is_steered_by_whoever_sees_all_owners(
    caller: Grant, to_steer: bool, is_there: bool
) -> None:
    record = TaskRecord(id="run-1", state=TaskState.QUEUED, owner="ana", is_run=True)
    app = cast("Any", SimpleNamespace(ledger=SimpleNamespace(find=lambda _: record)))
    if is_there:
        assert handle(app, "run-1", caller, to_steer=to_steer).id == "run-1"
    else:
        with pytest.raises(Problem) as told:
            handle(app, "run-1", caller, to_steer=to_steer)
        assert told.value.status == 404
