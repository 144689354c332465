"""Brings a pipeline to where its records say it can be: collects, fails, dispatches, ends. Idempotent.

`reconcile` is called by the join of every stage, by the error callback of every task, at submit and at resume, and by
the reconciler. It may run twice at once: every move of a stage is a compare-and-set, and the ids of tasks, groups and
joins are made from pipeline, stage and epoch, so that what is sent twice is written once.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from celery import chord, group

from gpuflow.artifacts.references import References
from gpuflow.artifacts.task_access import task_hosts
from gpuflow.errors import GPUFlowError
from gpuflow.ledger.ledger import Ledger
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.pipelines.collect import all_found, result_of_tasks, shard_problem
from gpuflow.pipelines.plan import plan
from gpuflow.pipelines.records import PipelineRecord, PipelineState, StageRecord, StageState
from gpuflow.pipelines.resolve import Load, StageResult, lookup_of, task_specs
from gpuflow.pipelines.store import PipelineStore
from gpuflow.routing.families import CONTROL_QUEUE, call_of
from gpuflow.signatures import SignatureRefused
from gpuflow.spec import Stage, Template
from gpuflow.spec.conditions import StageSkipped, condition_holds
from gpuflow.spec.function_section import is_function
from gpuflow.traces.context import TRACEPARENT
from gpuflow.traces.recording import traceparent_of_tasks

log = get_logger("gpuflow.pipelines")

RECONCILE_TASK: Final = "gpuflow.pipelines.settle"
JOIN_TASK: Final = "gpuflow.pipelines.join"
_IDS: Final = uuid.UUID("1f0a7a34-93f2-5f0b-9f3b-6f7f0d7f2a55")
#: Rounds of one reconcile; a pipeline that still moves after that is reconciled again by its next trigger.
_MAX_ROUNDS: Final = 1000


def stage_task_id(pipeline_id: str, stage: str, epoch: int, part: int | str) -> str:
    """Return the id of a task (part = its number), of the group or of the join of one round of a stage."""
    return str(uuid.uuid5(_IDS, f"{pipeline_id}/{stage}/{epoch}/{part}"))


class PipelineController:
    """Reconciles pipelines with the app's ledger and broker."""

    def __init__(self, app: Any, store: PipelineStore, ledger: Ledger) -> None:
        self.app = app
        self.store = store
        self.ledger = ledger

    def reconcile(self, pipeline_id: str) -> PipelineState | None:
        """Do all that can be done for a pipeline now; return its state, None if there is no such pipeline."""
        for _ in range(_MAX_ROUNDS):
            record = self.store.find(pipeline_id)
            if record is None:
                return None
            if record.state.final:
                self._stop_leftovers(record)
                return record.state
            refused = self.store.refusal(record)
            if refused is not None:
                self._refuse(record, refused)
            elif not self._round(record):
                return record.state
        return PipelineState.RUNNING

    def fail(self, pipeline_id: str, error: Exception) -> None:
        """End a pipeline that cannot be reconciled, with the cause; `resume` tries again."""
        record = self.store.find(pipeline_id)
        if record is None:
            return
        log.error("pipeline_not_settled", pipeline=pipeline_id, cause=repr(error))
        names = [stage.name for stage in Template.from_dict(record.template).stages]
        cause = {"type": type(error).__name__, "message": f"gpuflow could not go on with it: {error}"}
        self.store.end(pipeline_id, PipelineState.FAILED, names, cause, epoch=record.epoch)

    def refuse_unsigned(self, pipeline_id: str) -> None:
        """End a pipeline whose record is not signed as it must be, when what begins it is not: else it would wait."""
        record = self.store.find(pipeline_id)
        if record is None or record.state.final:
            return
        refused = self.store.refusal(record)
        if refused is not None:
            self._refuse(record, refused)

    def _refuse(self, record: PipelineRecord, refused: SignatureRefused) -> None:
        """End a pipeline whose template is not what a holder of the key has submitted: no stage of it is published."""
        log.error("pipeline_refused", pipeline=record.id, reason=refused.reason, cause=str(refused))
        cause = {"type": type(refused).__name__, "message": str(refused), "retryable": False}
        self.store.end(record.id, PipelineState.FAILED, [], cause, epoch=record.epoch)

    def _round(self, record: PipelineRecord) -> bool:
        """Do one round; True if something moved."""
        template = Template.from_dict(record.template)
        stages = {stage.name: record.stage(stage.name) for stage in template.stages}
        moved = False
        for name, stage in stages.items():
            if stage.state is StageState.DISPATCHED:
                collected = self._collect(record, stage)
                if collected is not None:
                    moved |= self.store.move_stage(record.id, stage, collected)
                    stages[name] = collected
        decisions = plan(template.stages, stages)
        for name, error in decisions.fail.items():
            failed = replace(stages[name], state=StageState.FAILED, error=error, finished_at=time.time())
            moved |= self.store.move_stage(record.id, stages[name], failed)
        for name, reason in decisions.skip.items():
            moved |= self._skip(record, stages[name], reason)
        if decisions.end is not None:
            names = [stage.name for stage in template.stages]
            self.store.end(record.id, decisions.end, names, decisions.error, epoch=record.epoch)
            log.info("pipeline_ended", pipeline=record.id, state=str(decisions.end))
            return True
        for spec_stage in template.stages:
            if spec_stage.name in decisions.dispatch:
                moved |= self._dispatch(record, spec_stage, stages[spec_stage.name])
        return moved

    def _collect(self, record: PipelineRecord, stage: StageRecord) -> StageRecord | None:
        """Return the stage as ended if its tasks say so; send again what was never sent."""
        tasks = self.ledger.find_many(stage.tasks)
        if any(task is None for task in tasks):
            self._send(record, stage)
            return None
        found = [task for task in tasks if task is not None]
        bad = next((task for task in found if task.state.final and task.state is not TaskState.SUCCEEDED), None)
        if bad is not None:
            for task in found:
                if not task.state.final:
                    self.app.cancel_task(task.id, f"stage {stage.name!r} failed")
            return replace(stage, state=StageState.FAILED, error=_task_error(bad), finished_at=time.time())
        if all(task.state is TaskState.SUCCEEDED for task in found):
            problem = shard_problem(found)
            if problem is not None:
                failure = {"type": "ShardMismatch", "message": problem, "retryable": False}
                return replace(stage, state=StageState.FAILED, error=failure, finished_at=time.time())
            return replace(stage, state=StageState.SUCCEEDED, finished_at=time.time())
        return None

    def _skip(self, record: PipelineRecord, stage: StageRecord, reason: str) -> bool:
        log.info("stage_skipped", pipeline=record.id, stage=stage.name, reason=reason)
        skipped = replace(stage, state=StageState.SKIPPED, reason=reason, finished_at=time.time())
        return self.store.move_stage(record.id, stage, skipped)

    def _dispatch(self, record: PipelineRecord, spec_stage: Stage, stage: StageRecord) -> bool:
        try:
            if spec_stage.condition is not None:
                functions = _functions_of(record)
                verdict = condition_holds(spec_stage.condition, lookup_of(*self._results(record), functions))
                if not verdict.holds:
                    return self._skip(record, stage, f"its condition does not hold: {verdict.reason}")
            count = len(self._specs_of(record, spec_stage))
        except GPUFlowError as error:
            failure = {"type": type(error).__name__, "message": str(error), "retryable": False}
            failed = replace(stage, state=StageState.FAILED, error=failure, finished_at=time.time())
            return self.store.move_stage(record.id, stage, failed)
        ids = tuple(stage_task_id(record.id, stage.name, stage.epoch, part) for part in range(count))
        sent = replace(stage, state=StageState.DISPATCHED, tasks=ids, started_at=time.time())
        if not self.store.move_stage(record.id, stage, sent):
            return False
        log.info("stage_dispatched", pipeline=record.id, stage=stage.name, tasks=count)
        self._send(record, sent)
        return True

    def _send(self, record: PipelineRecord, stage: StageRecord) -> None:
        """Publish the chord of a dispatched stage: header = its tasks, body = its join."""
        template = Template.from_dict(record.template)
        spec_stage = next(item for item in template.stages if item.name == stage.name)
        specs = self._specs_of(record, spec_stage)
        traceparent = traceparent_of_tasks(record.id, record.traceparent, record.epoch, self.app.traces)
        nudge = self.app.signature(RECONCILE_TASK, args=(record.id,), immutable=True, options={"queue": CONTROL_QUEUE})
        header = [
            self.app.signature(
                name,
                args=args,
                kwargs=kwargs,
                options={
                    **options,
                    "task_id": task_id,
                    "title": f"{record.name}/{stage.name}",
                    "owner": record.owner,
                    "labels": template.labels,
                    "pipeline": record.id,
                    "stage": stage.name,
                    "link_error": [nudge],
                    **({TRACEPARENT: traceparent} if traceparent else {}),
                },
            )
            for task_id, (name, args, kwargs, options) in zip(stage.tasks, map(call_of, specs), strict=True)
        ]
        body = self.app.signature(
            JOIN_TASK,
            args=(record.id, stage.name, stage.epoch),
            immutable=True,
            options={
                "queue": CONTROL_QUEUE,
                "task_id": stage_task_id(record.id, stage.name, stage.epoch, "join"),
                "link_error": [nudge],
            },
        )
        group_id = stage_task_id(record.id, stage.name, stage.epoch, "group")
        header_group = group(header, app=self.app).set(task_id=group_id)
        with self.app.backend.nobody_waits():
            chord(header_group, body=body, app=self.app).apply_async()

    def _specs_of(self, record: PipelineRecord, spec_stage: Stage) -> list[dict[str, Any]]:
        """Return the specs of a stage's tasks, from the results of the stages before it. Raises GPUFlowError."""
        return task_specs(spec_stage, *self._results(record), _functions_of(record))

    def _results(self, record: PipelineRecord) -> tuple[StageResult, Load]:
        """Return what gives the result of a stage, and what loads what a result only refers to."""
        references = References(self.app.settings, hosts=task_hosts(self.app.settings))
        cache: dict[str, Mapping[str, Any]] = {}

        def result_of(name: str) -> Mapping[str, Any]:
            if record.stage(name).state is StageState.SKIPPED:
                raise StageSkipped(f"stage {name!r} was skipped")
            if name not in cache:
                tasks = all_found(name, self.ledger.find_many(record.stage(name).tasks))
                cache[name] = result_of_tasks(tasks, [task.result or {} for task in tasks], references.load)
            return cache[name]

        return result_of, references.load

    def _stop_leftovers(self, record: PipelineRecord) -> None:
        """Cancel what still waits or runs for a pipeline that has been cancelled."""
        if record.state is not PipelineState.CANCELLED:
            return
        ids = [task_id for stage in record.stages.values() for task_id in stage.tasks]
        for task in self.ledger.find_many(ids):
            if task is not None and not task.state.final:
                self.app.cancel_task(task.id, "its pipeline was cancelled")


def _functions_of(record: PipelineRecord) -> set[str]:
    """Return the stages that call functions."""
    return {stage.name for stage in Template.from_dict(record.template).stages if is_function(stage.spec)}


def _task_error(task: TaskRecord) -> dict[str, Any]:
    error = dict(task.error or {})
    error.setdefault("type", str(task.state))
    error.setdefault("message", f"the task ended {task.state}")
    return {**error, "task": task.id, "retryable": False}
