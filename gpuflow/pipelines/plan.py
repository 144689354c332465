"""Decides what a pipeline needs next. Pure: states in, decisions out; tested by table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpuflow.pipelines.records import PipelineState, StageRecord, StageState


class StageSpec(Protocol):
    """What the plan needs to know of a stage of the template."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def depends_on(self) -> Sequence[str]:
        """The stages that it needs."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do: stages to dispatch, stages that fail with their cause, and how the pipeline ends, if it does."""

    dispatch: tuple[str, ...] = ()
    fail: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    end: PipelineState | None = None
    error: Mapping[str, Any] | None = None


def plan(stages: Sequence[StageSpec], records: Mapping[str, StageRecord]) -> Plan:
    """Return the next decisions for `stages`, which are in topological order.

    A stage whose upstream has failed fails in the same plan, however deep, and carries the first cause: the error of
    the stage that failed by itself.
    """
    states = {stage.name: records[stage.name].state for stage in stages}
    causes = {
        stage.name: _root_cause(stage.name, records[stage.name])
        for stage in stages
        if states[stage.name] in (StageState.FAILED, StageState.CANCELLED)
    }
    dispatch: list[str] = []
    fail: dict[str, Mapping[str, Any]] = {}
    for stage in stages:
        if states[stage.name] is not StageState.PENDING:
            continue
        broken = next((name for name in stage.depends_on if name in causes), None)
        if broken is not None:
            cause = causes[broken]
            causes[stage.name] = cause
            states[stage.name] = StageState.FAILED
            fail[stage.name] = {
                "type": "UpstreamFailed",
                "message": f"stage {cause['stage']!r} failed: {cause['message']}",
                "retryable": False,
                "cause": cause,
            }
        elif all(states[name] is StageState.SUCCEEDED for name in stage.depends_on):
            dispatch.append(stage.name)
    if all(state.final for state in states.values()):
        bad = next((stage.name for stage in stages if states[stage.name] is not StageState.SUCCEEDED), None)
        if bad is None:
            return Plan(end=PipelineState.SUCCEEDED)
        cause = causes[bad]
        message = f"stage {cause['stage']!r} failed: {cause['message']}"
        return Plan(
            fail=fail,
            end=PipelineState.FAILED,
            error={"type": "StageFailed", "message": message, "cause": cause},
        )
    return Plan(dispatch=tuple(dispatch), fail=fail)


def _root_cause(name: str, record: StageRecord) -> Mapping[str, Any]:
    error = dict(record.error or {"type": "Cancelled", "message": "cancelled"})
    if isinstance(error.get("cause"), Mapping) and "stage" in error["cause"]:
        return dict(error["cause"])
    return {"stage": name, **{key: error[key] for key in ("type", "message", "task") if key in error}}
