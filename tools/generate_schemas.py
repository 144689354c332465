"""Writes gpuflow/spec/schemas/*.json from the pinned libraries, so that a client can check templates without them.

A developer runs it where the libraries are installed; one environment holds only some of them (vLLM needs its own, PPO
needs trl 1.12), so name the schemas to write: `python tools/generate_schemas.py sft dpo reward grpo lora`. Nothing of
the library imports this file.
"""

from __future__ import annotations

import argparse
import collections.abc
import dataclasses
import enum
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import types
import typing
from pathlib import Path
from typing import Any

SCHEMAS_DIR = Path(__file__).parent.parent / "gpuflow" / "spec" / "schemas"

#: schema -> (distributions that may hold it, module, class)
SOURCES = {
    "sft": ("trl", "trl", "SFTConfig"),
    "dpo": ("trl", "trl", "DPOConfig"),
    "reward": ("trl", "trl", "RewardConfig"),
    "grpo": ("trl", "trl", "GRPOConfig"),
    "ppo": ("trl", "trl.experimental.ppo.ppo_config", "PPOConfig"),
    "lora": ("peft", "peft", "LoraConfig"),
    "sampling": ("vllm", "vllm", "SamplingParams"),
    "engine": ("vllm", "vllm", "EngineArgs"),
}

SIMPLE = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null", Any: "any"}


class Shape:
    """The JSON types and the enumerated values that one annotation admits."""

    def __init__(self) -> None:
        self.types: set[str] = set()
        self.values: list[Any] = []

    def add(self, annotation: Any) -> None:
        """Take in one annotation, unions and containers included; what JSON cannot hold is left out."""
        origin = typing.get_origin(annotation)
        if annotation in SIMPLE:
            self.types.add(SIMPLE[annotation])
        elif origin is typing.Literal:
            values = typing.get_args(annotation)
            if any(isinstance(value, str) and "[" in value for value in values):
                self.types.add("str")  # peft documents a pattern there: pissa_niter_[number of iters]
            self.values += [value for value in values if value not in self.values]
        elif origin in (typing.Union, types.UnionType):
            for part in typing.get_args(annotation):
                self.add(part)
        elif origin is typing.Annotated:
            self.add(typing.get_args(annotation)[0])
        elif inspect.isclass(origin or annotation):
            self.add_class(origin or annotation, typing.get_args(annotation))

    def add_class(self, kind: type, arguments: tuple[Any, ...]) -> None:
        """Take in a class: containers, enumerations of text, and configuration objects, which are mappings in JSON."""
        if issubclass(kind, (list, tuple, set)):
            element = SIMPLE.get(arguments[0]) if arguments else None
            self.types.add(f"list[{element}]" if element in ("str", "int", "float") else "list")
        elif issubclass(kind, (dict, collections.abc.Mapping)):
            self.types.add("dict")
        elif issubclass(kind, enum.Enum):
            if issubclass(kind, str):
                self.values += [member.value for member in kind]
            else:
                self.types.add("int" if all(isinstance(member.value, int) for member in kind) else "str")
        elif kind.__name__ == "ndarray":
            self.types.add("list")
        elif dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields"):
            self.types.add("dict")


def jsonable(value: Any) -> Any:
    """Return a default as JSON, or None where only the library can build it."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, (str, int)) else None
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return value


def default_of(field: Any) -> Any:
    """Return the default of a dataclass field; a factory's value where it can be made without arguments."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def hints_of(owner: type) -> dict[str, Any]:
    """Return the annotations; a name that only type checkers import stands for a configuration object."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(owner, localns=unknown, include_extras=True)
        except NameError as error:
            if error.name is None or error.name in unknown:
                raise
            unknown[error.name] = dict


def fields_of(owner: type) -> dict[str, tuple[Any, Any]]:
    """Return name -> (annotation, default) of a dataclass or a msgspec struct."""
    hints = hints_of(owner)
    if dataclasses.is_dataclass(owner):
        return {f.name: (hints[f.name], default_of(f)) for f in dataclasses.fields(owner) if f.init}
    names, defaults = owner.__struct_fields__, owner.__struct_defaults__
    padded = (None,) * (len(names) - len(defaults)) + tuple(defaults)
    return {name: (hints[name], default) for name, default in zip(names, padded, strict=True)}


def describe(annotation: Any, default: Any) -> dict[str, Any]:
    """Return the schema of one field: `type`, `enum` (text values) and `default`."""
    shape = Shape()
    shape.add(annotation)
    value = jsonable(default)
    if default is None:
        shape.types.add("null")
    # transformers types `SchedulerType | str`, yet takes only the values of the enumeration.
    hf_enum = any(
        inspect.isclass(part) and issubclass(part, str) and issubclass(part, enum.Enum)
        for part in typing.get_args(annotation)
    )
    if hf_enum:
        shape.types.discard("str")
    if "str" in shape.types:
        shape.values = [item for item in shape.values if not isinstance(item, str)]
    for item in [item for item in shape.values if isinstance(item, bool)]:
        shape.values.remove(item)
        shape.types.add("bool")
    entry: dict[str, Any] = {"type": sorted(shape.types) or ([] if shape.values else ["any"])}
    if shape.values:
        entry["enum"] = shape.values
    if value is not None:
        entry["default"] = value
    return entry


def generate(name: str) -> str:
    """Return the JSON text of one schema, one field a line."""
    distribution, module, owner = SOURCES[name]
    version = next(
        f"{dist} {importlib.metadata.version(dist)}"
        for dist in (distribution, f"{distribution}-cpu")
        if importlib.util.find_spec(module.split(".")[0]) and _installed(dist)
    )
    fields = fields_of(getattr(importlib.import_module(module), owner))
    rows = [
        f"    {json.dumps(field)}: {json.dumps(describe(annotation, default))}"
        for field, (annotation, default) in sorted(fields.items())
        if not field.startswith("_")
    ]
    head = f'{{\n  "source": {json.dumps(f"{owner} of {version}")},\n  "fields": {{\n'
    return head + ",\n".join(rows) + "\n  }\n}\n"


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Write the schemas named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(SOURCES))
    SCHEMAS_DIR.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().names:
        (SCHEMAS_DIR / f"{name}.json").write_text(generate(name), encoding="utf-8")


if __name__ == "__main__":
    main()
