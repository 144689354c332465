"""Decides what a pipeline needs next. Pure: states in, decisions out; tested by table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from gpuflow.pipelines.records import PipelineState, StageRecord, StageState


class StageSpec(Protocol):
    """What the plan needs to know of a stage of the template."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def depends_on(self) -> Sequence[str]:
        """The stages that it needs."""

    @property
    def reads(self) -> Collection[str]:
        """Those of them whose results its tasks are made of."""

    @property
    def judges(self) -> Collection[str]:
        """Those of them over whose results its condition is."""


_PASSED: Final = (StageState.SUCCEEDED, StageState.SKIPPED)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do: stages to dispatch, to skip (why) and to fail (cause), and how the pipeline ends, if it does."""

    dispatch: tuple[str, ...] = ()
    skip: Mapping[str, str] = field(default_factory=dict)
    fail: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    end: PipelineState | None = None
    error: Mapping[str, Any] | None = None


def plan(stages: Sequence[StageSpec], records: Mapping[str, StageRecord]) -> Plan:
    """Return the next decisions for `stages`, which are in topological order.

    A stage whose upstream has failed fails in the same plan, however deep, and carries the first cause: the error of
    the stage that failed by itself. A stage is skipped when all that it depends on were, or one whose result it reads;
    what its condition is over, the condition decides.
    """
    states = {stage.name: records[stage.name].state for stage in stages}
    causes = {
        stage.name: _root_cause(stage.name, records[stage.name])
        for stage in stages
        if states[stage.name] in (StageState.FAILED, StageState.CANCELLED)
    }
    dispatch: list[str] = []
    fail: dict[str, Mapping[str, Any]] = {}
    skip: dict[str, str] = {}
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
        elif all(states[name] in _PASSED for name in stage.depends_on):
            lacking = _lacking(stage, states)
            if lacking is None:
                dispatch.append(stage.name)
            else:
                skip[stage.name] = lacking
                states[stage.name] = StageState.SKIPPED
    if all(state.final for state in states.values()):
        bad = next((stage.name for stage in stages if states[stage.name] not in _PASSED), None)
        if bad is None:
            return Plan(skip=skip, end=PipelineState.SUCCEEDED)
        cause = causes[bad]
        message = f"stage {cause['stage']!r} failed: {cause['message']}"
        return Plan(
            skip=skip,
            fail=fail,
            end=PipelineState.FAILED,
            error={"type": "StageFailed", "message": message, "cause": cause},
        )
    return Plan(dispatch=tuple(dispatch), skip=skip, fail=fail)


def _lacking(stage: StageSpec, states: Mapping[str, StageState]) -> str | None:
    """Return why a stage has nothing to work on, since stages before it were skipped; None where it has."""
    skipped = [name for name in stage.depends_on if states[name] is StageState.SKIPPED]
    read = next((name for name in skipped if name in stage.reads), None)
    if read is not None:
        return f"it reads the result of stage {read!r}, which was skipped"
    feeding = [name for name in stage.depends_on if name not in stage.judges]
    skipped = [name for name in skipped if name in feeding]
    if skipped and len(skipped) == len(feeding):
        return (
            f"stage {skipped[0]!r} was skipped" if len(skipped) == 1 else "all stages that it depends on were skipped"
        )
    return None


def _root_cause(name: str, record: StageRecord) -> Mapping[str, Any]:
    error = dict(record.error or {"type": "Cancelled", "message": "cancelled"})
    if isinstance(error.get("cause"), Mapping) and "stage" in error["cause"]:
        return dict(error["cause"])
    return {"stage": name, **{key: error[key] for key in ("type", "message", "task") if key in error}}
