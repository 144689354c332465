"""What a pipeline needs next, by table: skipped stages among those that run, fail and wait."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gpuflow.pipelines.plan import plan
from gpuflow.pipelines.records import PipelineState, StageRecord, StageState

P, D, S, F, K = (
    StageState.PENDING, StageState.DISPATCHED, StageState.SUCCEEDED, StageState.FAILED, StageState.SKIPPED,
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    name: str
    depends_on: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    judges: tuple[str, ...] = ()


def decided(stages, *states):
    records = {
        stage.name: StageRecord(
            name=stage.name, state=state, error={"type": "Boom", "message": "no"} if state is F else None
        )
        for stage, state in zip(stages, states, strict=True)
    }
    return plan(stages, records)


CHAIN = (Stage("a"), Stage("b", ("a",)), Stage("c", ("b",)), Stage("d", ("c",)))
JOIN = (Stage("a"), Stage("b"), Stage("c", ("a", "b")))
JUDGES = (Stage("a"), Stage("b"), Stage("c", ("a", "b"), judges=("b",)))
READS = (Stage("a"), Stage("b"), Stage("c", ("a", "b"), ("b",)))


@pytest.mark.parametrize(
    ("stages", "states", "dispatch", "skip", "end"),
    [
        (CHAIN, (P, P, P, P), ("a",), (), None),
        (CHAIN, (S, P, P, P), ("b",), (), None),
        (CHAIN, (S, K, P, P), (), ("c", "d"), PipelineState.SUCCEEDED),
        (CHAIN, (S, K, K, P), (), ("d",), PipelineState.SUCCEEDED),
        (CHAIN, (S, K, K, K), (), (), PipelineState.SUCCEEDED),
        (JOIN, (S, K, P), ("c",), (), None),
        (JOIN, (D, K, P), (), (), None),
        (JOIN, (K, K, P), (), ("c",), PipelineState.SUCCEEDED),
        (JUDGES, (S, K, P), ("c",), (), None),
        (JUDGES, (K, S, P), (), ("c",), PipelineState.SUCCEEDED),
        ((Stage("a"), Stage("b", ("a",), judges=("a",))), (K, P), ("b",), (), None),
        (READS, (S, K, P), (), ("c",), PipelineState.SUCCEEDED),
        (READS, (K, S, P), ("c",), (), None),
        (READS, (F, K, P), (), (), PipelineState.FAILED),
    ],
)
def test_a_stage_without_anything_to_work_on_is_skipped(stages, states, dispatch, skip, end):
    found = decided(stages, *states)

    assert (found.dispatch, tuple(found.skip), found.end) == (dispatch, skip, end)


def test_the_reason_names_what_was_skipped():
    assert decided(CHAIN, S, K, P, P).skip == {"c": "stage 'b' was skipped", "d": "stage 'c' was skipped"}
    assert decided(READS, S, K, P).skip == {"c": "it reads the result of stage 'b', which was skipped"}
    assert decided(JOIN, K, K, P).skip == {"c": "all stages that it depends on were skipped"}


def test_a_failure_wins_over_a_skip():
    found = decided(JOIN, F, K, P)

    assert found.fail["c"]["type"] == "UpstreamFailed"
    assert found.error["cause"]["stage"] == "a"
