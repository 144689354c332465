"""The records of a pipeline and its stages, as Python sees them. Read-only; the Lua steps write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

PIPELINE_SCHEMA: Final = 1
#: The round that a submit begins; each resume begins the next one.
FIRST_EPOCH: Final = 1


class StageState(StrEnum):
    """State of one stage."""

    PENDING = "PENDING"
    DISPATCHED = "DISPATCHED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    SKIPPED = "SKIPPED"

    @property
    def final(self) -> bool:
        """Whether the stage has ended."""
        return self not in (StageState.PENDING, StageState.DISPATCHED)


class PipelineState(StrEnum):
    """State of a pipeline."""

    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        """Whether the pipeline has ended; `resume` may bring it back unless it has succeeded."""
        return self is not PipelineState.RUNNING


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """One stage: its state, the tasks of its current round, and why it failed (`error`) or was skipped (`reason`).

    `epoch` counts rounds: a resume begins a new one, with new task ids.
    """

    name: str
    state: StageState = StageState.PENDING
    epoch: int = FIRST_EPOCH
    tasks: tuple[str, ...] = ()
    error: Mapping[str, Any] | None = None
    reason: str | None = None
    started_at: float | None = None
    finished_at: float | None = None

    def to_json(self) -> str:
        """Return the record as it is stored."""
        return json.dumps(asdict(self), default=list)

    @classmethod
    def from_json(cls, text: str) -> StageRecord:
        """Read a stored record."""
        raw = json.loads(text)
        known = {key: raw[key] for key in cls.__dataclass_fields__ if key in raw}
        return cls(**{**known, "state": StageState(raw["state"]), "tasks": tuple(raw.get("tasks") or ())})


@dataclass(frozen=True, kw_only=True)
class PipelineRecord:
    """One pipeline with its stages. `template` is what `Template.from_dict` reads; times are Unix seconds."""

    id: str
    state: PipelineState
    name: str = ""
    owner: str = ""
    template: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = FIRST_EPOCH
    created_at: float = 0.0
    finished_at: float | None = None
    error: Mapping[str, Any] | None = None
    stages: Mapping[str, StageRecord] = field(default_factory=dict)
    traceparent: str = ""
    signature: str = ""
    schema: int = PIPELINE_SCHEMA

    def signed_part(self) -> dict[str, Any]:
        """Return what its signature covers: what its stages are made of, for whom, and in which round."""
        return signed_part(self.id, name=self.name, owner=self.owner, template=self.template, epoch=self.epoch)

    @classmethod
    def from_hashes(cls, raw: Mapping[str, str], stages: Mapping[str, str]) -> PipelineRecord:
        """Read a pipeline from its two Redis hashes (decoded strings)."""
        return cls(
            id=raw["id"],
            state=PipelineState(raw["state"]),
            name=raw.get("name", ""),
            owner=raw.get("owner", ""),
            template=json.loads(raw.get("template") or "{}"),
            epoch=int(raw.get("epoch", "1")),
            created_at=float(raw.get("created_at") or 0),
            finished_at=float(raw["finished_at"]) if raw.get("finished_at") else None,
            error=json.loads(raw["error"]) if raw.get("error") else None,
            stages={name: StageRecord.from_json(text) for name, text in stages.items()},
            traceparent=raw.get("traceparent", ""),
            signature=raw.get("signature", ""),
            schema=int(raw.get("schema", PIPELINE_SCHEMA)),
        )

    def public(self) -> dict[str, Any]:
        """Return the record without its stages, as plain data for `--json` and HTTP."""
        return {
            "id": self.id,
            "name": self.name,
            "state": str(self.state),
            "owner": self.owner,
            "createdAt": self.created_at,
            "finishedAt": self.finished_at,
            "error": self.error,
        }

    def stage(self, name: str) -> StageRecord:
        """Return the record of a stage, PENDING if nothing happened to it yet."""
        return self.stages.get(name) or StageRecord(name=name, epoch=self.epoch)


def signed_part(
    id: str, *, name: str, owner: str, template: Mapping[str, Any], epoch: int = FIRST_EPOCH
) -> dict[str, Any]:
    """Return what the signature of a pipeline covers; `template` as JSON holds it."""
    return {"id": id, "name": name, "owner": owner, "template": template, "epoch": epoch}


def new_pipeline_fields(*, name: str, owner: str, template: Mapping[str, Any], traceparent: str = "") -> dict[str, str]:
    """Return the fields of a new record as strings, for the publish step."""
    return {
        **({"traceparent": traceparent} if traceparent else {}),
        "schema": str(PIPELINE_SCHEMA),
        "state": str(PipelineState.RUNNING),
        "name": name,
        "owner": owner,
        "template": json.dumps(template, ensure_ascii=False),
        "epoch": str(FIRST_EPOCH),
    }
