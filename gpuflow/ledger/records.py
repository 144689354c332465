"""The task record as Python sees it: a frozen view of the Redis hash. Read-only; the Lua steps write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpuflow.ledger.states import TaskState
from gpuflow.protocol import whole_text

#: The newest schema of a record and its message that this version reads; it reads all before. 2: merged calls and their
#: runs. 3: functions that templates call.
RECORD_SCHEMA: Final = 3
#: The schema of all other tasks: workers of the version before run them.
COMMON_SCHEMA: Final = 2
#: Fields of a record that are small whatever its task is: what lists and filters look at.
HEAD_FIELDS: Final = (
    *("schema", "id", "state", "queue", "name", "owner", "labels", "task_type", "attempt", "worker", "pipeline"),
    *("stage", "created_at", "started_at", "finished_at", "updated_at", "error", "tag", "run", "call", "merge_tokens"),
    "owner_token",
)
#: Message header that carries the schema number of a supervised task's message.
SCHEMA_HEADER: Final = "gpuflow_schema"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What an attempt, or all attempts of a task, have used; docs/howto/usage-and-cost.md says how each is measured.

    `gpu_seconds`: GPUs times seconds, a share of a GPU by its part. `energy_joules`: of whole GPUs, 0 where the driver
    tells none. `cost` is in the unit of the worker's `--cost`.
    """

    seconds: float = 0.0
    gpu_seconds: float = 0.0
    energy_joules: float = 0.0
    cost: float = 0.0
    artifact_bytes: float = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in _USAGE_FIELDS})

    def times(self, share: float) -> Usage:
        """Return a share of it."""
        return Usage(**{name: getattr(self, name) * share for name in _USAGE_FIELDS})

    def public(self) -> dict[str, float]:
        """Return what was used, without what is 0."""
        values = {shown: round(getattr(self, name), 6) for name, shown in _USAGE_FIELDS.items()}
        return {shown: value for shown, value in values.items() if value and math.isfinite(value)}

    def to_json(self) -> str:
        """Return it for the Lua steps."""
        return json.dumps(self.public())

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any] | None) -> Usage:
        """Read what the Lua steps have written."""
        values: dict[str, Any] = {name: (raw or {}).get(shown, 0) for name, shown in _USAGE_FIELDS.items()}
        return cls(**{name: value for name, value in values.items() if isinstance(value, int | float)})


_USAGE_FIELDS: Final = {
    "seconds": "seconds",
    "gpu_seconds": "gpuSeconds",
    "energy_joules": "energyJoules",
    "cost": "cost",
    "artifact_bytes": "artifactBytes",
}


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """One task. Times are Unix seconds on the server's clock; `spec` is the task spec as submitted.

    `tag` and `owner_token` are of the delivery that runs, or ran last. `lost`: its worker has gone, and it waits for
    another one (`Ledger.as_seen`). `run`: the run of merged calls that answers it, `call` the key of its call there;
    `is_run`: it is such a run. `labels` are the `metadata.labels` of the template. `replacement` is the spec of the
    function that has taken the place of the submitted one, within its stage.
    """

    id: str
    state: TaskState
    queue: str = ""
    name: str = ""
    owner: str = ""
    task_type: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    requirement: Mapping[str, Any] | None = None
    attempt: int = 0
    worker: str | None = None
    pipeline: str | None = None
    stage: str | None = None
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    updated_at: float | None = None
    progress: Mapping[str, Any] | None = None
    result: Any = None
    error: Mapping[str, Any] | None = None
    manifest: str | None = None
    cancel_requested: bool = False
    failures: int = 0
    losses: int = 0
    preemptions: int = 0
    not_before: float | None = None
    tag: str | None = None
    owner_token: str | None = None
    lost: bool = False
    run: str | None = None
    call: str | None = None
    is_run: bool = False
    usage: Usage = Usage()
    labels: Mapping[str, str] = field(default_factory=dict)
    replacement: Mapping[str, Any] | None = None
    traceparent: str = ""
    schema: int = COMMON_SCHEMA

    @property
    def runs(self) -> Mapping[str, Any]:
        """The spec of what its next attempt runs: of what it was submitted with, or of what has replaced that."""
        return self.spec if self.replacement is None else self.replacement

    @classmethod
    def from_hash(cls, raw: Mapping[str, str]) -> TaskRecord:
        """Read a record from its Redis hash (decoded strings)."""

        def parsed(name: str) -> Any:
            return json.loads(raw[name]) if raw.get(name) else None

        def seconds(name: str) -> float | None:
            return float(raw[name]) if raw.get(name) else None

        return cls(
            id=raw["id"],
            state=TaskState(raw["state"]),
            queue=raw.get("queue", ""),
            name=raw.get("name", ""),
            owner=raw.get("owner", ""),
            task_type=raw.get("task_type", ""),
            spec=parsed("spec") or {},
            requirement=parsed("requirement"),
            attempt=int(raw.get("attempt", "0")),
            worker=raw.get("worker") or None,
            pipeline=raw.get("pipeline") or None,
            stage=raw.get("stage") or None,
            created_at=seconds("created_at") or 0.0,
            started_at=seconds("started_at"),
            finished_at=seconds("finished_at"),
            updated_at=seconds("updated_at"),
            progress=parsed("progress"),
            result=parsed("result"),
            error=parsed("error"),
            manifest=raw.get("manifest") or None,
            cancel_requested="cancel_requested" in raw,
            failures=int(raw.get("failures", "0")),
            losses=int(raw.get("losses", "0")),
            preemptions=int(raw.get("preemptions", "0")),
            not_before=seconds("not_before"),
            tag=raw.get("tag") or None,
            owner_token=raw.get("owner_token") or None,
            run=raw.get("run") or None,
            call=raw.get("call") or None,
            is_run="merge_tokens" in raw,
            usage=Usage.from_dict(parsed("usage")),
            labels=parsed("labels") or {},
            replacement=parsed("replacement"),
            traceparent=raw.get("traceparent", ""),
            schema=int(raw.get("schema", COMMON_SCHEMA)),
        )

    def public(self) -> dict[str, Any]:
        """Return what users see: everything but empty fields, JSON-able."""
        shown = {
            "id": self.id,
            "state": str(self.state),
            "queue": self.queue,
            "name": self.name,
            "owner": self.owner,
            "labels": dict(self.labels) or None,
            "taskType": self.task_type,
            "attempt": self.attempt,
            "worker": self.worker,
            "pipeline": self.pipeline,
            "stage": self.stage,
            "createdAt": self.created_at,
            "startedAt": self.started_at,
            "finishedAt": self.finished_at,
            "progress": self.progress,
            "error": self.error,
            "failures": self.failures or None,
            "losses": self.losses or None,
            "preemptions": self.preemptions or None,
            "notBefore": self.not_before,
            "lost": self.lost or None,
            "coalescedInto": self.run,
            "isRun": self.is_run or None,
            "usage": self.usage.public() or None,
        }
        return {key: value for key, value in shown.items() if value not in (None, "")}


@dataclass(frozen=True, kw_only=True)
class AttemptEntry:
    """How one attempt went. `outcome`: succeeded, failed, cancelled, dead, lost or preempted."""

    attempt: int
    worker: str
    started_at: float
    ended_at: float
    outcome: str
    error: Mapping[str, Any] | None = None
    log_tail: str = ""
    usage: Usage = Usage()

    @classmethod
    def from_json(cls, text: str) -> AttemptEntry:
        """Read an entry as the Lua steps write it."""
        raw = json.loads(text)
        return cls(
            attempt=int(raw["attempt"]),
            worker=raw["worker"],
            started_at=float(raw["startedAt"]),
            ended_at=float(raw["endedAt"]),
            outcome=raw["outcome"],
            error=raw.get("error"),
            log_tail=raw.get("logTail", ""),
            usage=Usage.from_dict(raw.get("usage")),
        )

    def public(self) -> dict[str, Any]:
        """Return the entry as plain data."""
        shown = {
            "attempt": self.attempt,
            "worker": self.worker,
            "startedAt": self.started_at,
            "endedAt": self.ended_at,
            "outcome": self.outcome,
            "error": self.error,
            "logTail": self.log_tail,
            "usage": self.usage.public() or None,
        }
        return {key: value for key, value in shown.items() if value not in (None, "")}


def new_record_fields(
    *,
    name: str,
    task_type: str,
    spec: Mapping[str, Any],
    requirement: Mapping[str, Any] | None,
    owner: str = "",
    pipeline: str | None = None,
    stage: str | None = None,
    labels: Mapping[str, str] | None = None,
    traceparent: str = "",
    schema: int | None = None,
) -> dict[str, str]:
    """Return the fields of a new record as strings, for the publish step."""
    fields = {
        "schema": str(COMMON_SCHEMA if schema is None else schema),
        "state": str(TaskState.QUEUED),
        "name": name,
        "owner": owner,
        "task_type": task_type,
        "spec": json.dumps(spec, ensure_ascii=False),
        "requirement": json.dumps(requirement) if requirement is not None else "",
        "attempt": "0",
        "pipeline": pipeline or "",
        "stage": stage or "",
        "labels": json.dumps(dict(labels), ensure_ascii=False) if labels else "",
        "traceparent": traceparent,
    }
    return {key: whole_text(value) for key, value in fields.items() if value != ""}
