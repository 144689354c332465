"""A checked template: its stages in order, ready to be stored and dispatched.

Made by `parsing`; anyone above may hold one. Frozen: whoever needs another template parses another. The models of all
its fields are loaded when one is first checked: a command that only shows tasks starts without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpuflow.errors import InvalidTemplate
from gpuflow.spec.function_section import is_function
from gpuflow.spec.matrix import expand_matrix
from gpuflow.spec.plain import copied
from gpuflow.spec.references import Reference, find_references, resolve
from gpuflow.spec.report import Mistake
from gpuflow.spec.sharding import shard_count

#: Schema number of the stored form; 2 has conditions, 3 functions. One without them has a lower one, which older code
#: reads.
TEMPLATE_SCHEMA: Final = 3


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage. `spec` is merged over the base and canonical as far as its references allow; they are in place.

    `depends_on` holds what was written, the stage before it (in `stages:`), and every stage that it refers to.
    `matrix` maps paths of the spec to lists of values; each combination is one task. Without `condition` it runs once
    what it depends on has succeeded, else only if that holds (`conditions`).
    """

    name: str
    depends_on: tuple[str, ...] = ()
    spec: dict[str, Any]
    matrix: dict[str, list[Any]] | None = None
    condition: dict[str, Any] | None = None

    @property
    def is_split(self) -> bool:
        """Whether its data is split over several tasks, as far as that is known before it runs."""
        return shard_count(self.spec) > 1

    @property
    def references(self) -> list[Reference]:
        """The references to other stages, in order of appearance."""
        return [one for one in find_references([self.spec, self.matrix or {}]) if one.kind == "stage"]

    @property
    def reads(self) -> frozenset[str]:
        """The stages whose results its tasks are made of."""
        return frozenset(one.stage for one in self.references)

    @property
    def judges(self) -> frozenset[str]:
        """The stages over whose results its condition is."""
        return frozenset(one.stage for one in find_references(self.condition or {}))

    @property
    def task_type(self) -> str:
        """The task type of all its tasks."""
        return str(self.spec["taskType"])

    def tasks(self, lookup: Callable[[Reference], Any]) -> list[dict[str, Any]]:
        """Return the canonical spec of each of its tasks, one for each combination of the matrix, in order.

        `lookup` gives the value of a reference (see `references.pick`). Raises UnresolvedReference, and InvalidTemplate
        when a value does not fit where it was put. Splitting the data (`sharding`) is the caller's next step.
        """
        from gpuflow.spec.checking import canonical

        matrix = resolve(self.matrix, lookup) if self.matrix else None
        return [canonical(one) for one in expand_matrix(resolve(self.spec, lookup), matrix)]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        data: dict[str, Any] = {
            "name": self.name,
            "depends_on": list(self.depends_on),
            "spec": copied(self.spec),
        }
        if self.matrix:
            data["matrix"] = copied(self.matrix)
        if self.condition is not None:
            data["condition"] = copied(self.condition)
        return data


@dataclass(frozen=True, kw_only=True)
class Template:
    """A template without mistakes. `stages` are in topological order; `spec` is the base spec as it was written."""

    api_version: str
    kind: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    stages: tuple[Stage, ...]
    is_pipeline: bool
    warnings: tuple[Mistake, ...] = ()
    #: What a foreign template leaves out, and was filled in as its own project has it.
    filled: tuple[Mistake, ...] = ()
    source: str = "template"

    @property
    def name(self) -> str:
        """What people call it: metadata.name, else the name of its only stage, else `pipeline`."""
        return str(self.metadata.get("name") or ("pipeline" if self.is_pipeline else self.stages[0].name))

    @property
    def owner(self) -> str:
        """Whose it is; empty when not said."""
        return str(self.metadata.get("owner") or "")

    @property
    def labels(self) -> dict[str, str]:
        """What people find it by: metadata.labels."""
        found = self.metadata.get("labels")
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, Mapping) else {}

    def stage(self, name: str) -> Stage:
        """Return a stage by name. Raises KeyError."""
        return {stage.name: stage for stage in self.stages}[name]

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The names of the stages, in order."""
        return tuple(stage.name for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data, from which `from_dict` makes an equal template."""
        return {
            "schema": self._schema(),
            "api_version": self.api_version,
            "kind": self.kind,
            "metadata": copied(self.metadata),
            "spec": copied(self.spec),
            "stages": [stage.to_dict() for stage in self.stages],
            "is_pipeline": self.is_pipeline,
            "warnings": [warning.to_dict() for warning in self.warnings],
            **({"filled": [one.to_dict() for one in self.filled]} if self.filled else {}),
            "source": self.source,
        }

    def _schema(self) -> int:
        if any(is_function(stage.spec) for stage in self.stages):
            return 3
        return 2 if any(stage.condition is not None for stage in self.stages) else 1

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Template:
        """Read a stored template, which is not checked again. Raises InvalidTemplate for a newer or wrong shape."""
        schema = data.get("schema", TEMPLATE_SCHEMA)
        if not isinstance(schema, int) or schema > TEMPLATE_SCHEMA:
            raise InvalidTemplate(
                f"a stored template has schema {schema!r}, this gpuflow reads up to {TEMPLATE_SCHEMA}; update it"
            )
        try:
            return cls(
                api_version=data["api_version"],
                kind=data.get("kind"),
                metadata=copied(data.get("metadata") or {}),
                spec=copied(data.get("spec") or {}),
                stages=tuple(
                    Stage(
                        name=stage["name"],
                        depends_on=tuple(stage.get("depends_on") or ()),
                        spec=copied(stage["spec"]),
                        matrix=copied(stage.get("matrix")),
                        condition=copied(stage.get("condition")),
                    )
                    for stage in data["stages"]
                ),
                is_pipeline=bool(data["is_pipeline"]),
                warnings=tuple(Mistake(**warning) for warning in data.get("warnings") or ()),
                filled=tuple(Mistake(**one) for one in data.get("filled") or ()),
                source=data.get("source", "template"),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidTemplate(f"a stored template lacks or misspells {error}; submit it again") from error
