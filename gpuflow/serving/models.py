"""What a served model is, and the specs that are made of it. Pure.

A replica and a call of `/v1` are specs of the same parts, made here alone: so both have the same session
(`routing.session_names`), and a call is answered by what a replica keeps loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpuflow.errors import InvalidTemplate
from gpuflow.routing.resources import requirement_from_resources
from gpuflow.spec import canonical
from gpuflow.spec.presets import list_presets

#: Most replicas of one model.
MOST_REPLICAS: Final = 1000
#: Task types that can be served.
TASK_TYPES: Final = ("inference", "embedding")
#: Priority of replicas: that of interactive calls.
PRIORITY: Final = 7
#: Variable that parts the sessions of a model that is served for one owner from those of others.
OWNER_VARIABLE: Final = "SERVED_FOR"
#: Parts of a spec that say what is loaded, and where.
_PARTS: Final = frozenset({"taskType", "model", "resources", "engine", "environment", "env", "secrets", "checkpoint"})
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")
_OWNER: Final = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
#: What the spec of a replica has in place of prompts; no engine sees it.
_DATA: Final[Mapping[str, Any]] = {"type": "list", "items": ["replica"]}


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model and how many workers are to keep it loaded. `spec` is the part of a task's spec that says what is loaded.

    `owner` "" serves all owners. `uid` is new each time that the model is served; `created_at` is in Unix seconds.
    """

    name: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1
    owner: str = ""
    uid: str = ""
    created_by: str = ""
    created_at: float = 0.0

    @property
    def task_type(self) -> str:
        """Return `inference` or `embedding`."""
        return str(self.spec.get("taskType"))

    @property
    def source(self) -> Mapping[str, Any]:
        """Return where the model comes from."""
        return dict((self.spec.get("model") or {}).get("source") or {})

    def digest(self) -> str:
        """Return a digest of what is loaded and for whom."""
        text = json.dumps([self.spec, self.owner], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def call_spec(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the spec of a call, given what it says itself (data, inference); another model there is replaced."""
        return {**call, **self.spec}

    def replica_spec(self) -> dict[str, Any]:
        """Return the spec of a replica."""
        return self.call_spec(
            {"data": _DATA, "priority": PRIORITY, "merge": "never", "retry": {"max_attempts": 3, "backoff_seconds": 2}}
        )

    def to_json(self, signature: str = "") -> str:
        """Return the record, which is without the number of replicas: that changes."""
        return json.dumps({**self._record(), "signature": signature} if signature else self._record())

    def signed_part(self) -> dict[str, Any]:
        """Return what its signature covers: its name and its record, as JSON holds them."""
        return {"name": self.name, "record": json.loads(json.dumps(self._record()))}

    def _record(self) -> dict[str, Any]:
        return {
            "spec": self.spec,
            "owner": self.owner,
            "uid": self.uid,
            "digest": self.digest(),
            "createdBy": self.created_by,
            "createdAt": self.created_at,
        }

    @classmethod
    def from_json(cls, name: str, text: str, replicas: str | None) -> ServedModel:
        """Read a record. Raises ValueError, KeyError, TypeError, AttributeError."""
        data = json.loads(text)
        spec = data["spec"]
        if spec["taskType"] not in TASK_TYPES or not isinstance(spec["model"]["source"], dict):
            raise ValueError("it is no model that can be served")
        return cls(
            name=name,
            spec=spec,
            replicas=min(max(1, int(replicas or 1)), MOST_REPLICAS),
            owner=str(data["owner"]),
            uid=str(data["uid"]),
            created_by=str(data["createdBy"]),
            created_at=float(data["createdAt"]),
        )


def is_name(name: str) -> bool:
    """Say whether a served model can have this name."""
    return _NAME.fullmatch(name) is not None


def source_of(identifier: str) -> dict[str, str]:
    """Return `model.source` for what a user names: a path, a shipped preset, or an id of the hub.

    Raises InvalidTemplate for what is none of these.
    """
    if identifier.startswith("/"):
        return {"type": "local", "identifier": identifier}
    if identifier in list_presets("models"):
        return {"type": "preset", "identifier": identifier}
    if not _HUB_ID.fullmatch(identifier) or ".." in identifier:
        raise InvalidTemplate(
            f"model {identifier[:100]!r}: it is no id of the hub, no shipped preset and no absolute path; give one "
            "such as Qwen/Qwen3-0.6B, a name of `gpuflow presets models`, or /models/mine"
        )
    return {"type": "huggingface", "identifier": identifier}


def parts_of(
    identifier: str, *, embedding: bool = False, engine: str | None = None, accelerators: str | None = None
) -> dict[str, Any]:
    """Return the parts of a spec that a user names, as they are written. Raises InvalidTemplate for a bad model."""
    parts: dict[str, Any] = {
        "taskType": "embedding" if embedding else "inference",
        "model": {"source": source_of(identifier)},
    }
    if engine is not None:
        parts["engine"] = engine
    if accelerators is not None:
        is_cpu = accelerators.strip().lower() == "cpu"
        parts["resources"] = {"hardware": {"gpu": {"count": 0}}} if is_cpu else {"accelerators": accelerators}
    return parts


def served_spec(spec: Mapping[str, Any], *, owner: str = "") -> dict[str, Any]:
    """Return the spec of a served model in canonical form. Raises InvalidTemplate, also for a bad ask."""
    others = sorted(set(spec).difference(_PARTS))
    if others:
        raise InvalidTemplate(
            f"{others[0]} is of each call, and cannot be set for a served model; there are: {', '.join(sorted(_PARTS))}"
        )
    if spec.get("taskType") not in TASK_TYPES:
        raise InvalidTemplate(f"taskType {spec.get('taskType')!r} cannot be served; use {' or '.join(TASK_TYPES)}")
    if owner:
        spec = {**spec, "env": {**(spec.get("env") or {}), OWNER_VARIABLE: owner}}
    done = canonical({**spec, "data": _DATA})
    requirement_from_resources(done.get("resources") or {}, gpu_available=True)
    return {name: value for name, value in done.items() if name in _PARTS}


def check(model: ServedModel) -> None:
    """Raise InvalidTemplate for a name, an owner or a number that a served model cannot have."""
    if not is_name(model.name):
        raise InvalidTemplate(
            f"name {model.name[:100]!r}: a served model is named by up to 200 letters, digits, '.', '_', ':', '/' and "
            "'-'; give another with --name"
        )
    if model.owner and not _OWNER.fullmatch(model.owner):
        raise InvalidTemplate(f"owner {model.owner[:100]!r}: an owner has up to 200 visible characters; give another")
    if not 1 <= model.replicas <= MOST_REPLICAS:
        raise InvalidTemplate(
            f"replicas {model.replicas}: give 1 to {MOST_REPLICAS}; `gpuflow serve {model.name} --stop` ends all"
        )
