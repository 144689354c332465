"""Sections of a spec that the engine does not read: they are told of, never passed over in silence. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

#: Engine -> its section of `model`.
_SECTIONS: Final[Mapping[str, str]] = {"vllm": "vllm", "transformers": "transformers"}


def with_warnings(result: dict[str, Any], messages: Sequence[str]) -> dict[str, Any]:
    """Return a result value that says what of its task was not used; as it is where there is nothing to say."""
    return {**result, "warnings": [*result.get("warnings", ()), *messages]} if messages else result


def unused(
    spec: Mapping[str, Any], *, engine: str, task_type: str, loaded: Mapping[str, Any] | None = None
) -> list[str]:
    """Return a message for each section of `spec` that has no effect; `loaded` is what a session was opened with."""
    model: Mapping[str, Any] = spec.get("model") or {}
    here: Mapping[str, Any] = (loaded or spec).get("model") or {}
    messages = []
    for name, section in _SECTIONS.items():
        if model.get(section) and name != engine:
            messages.append(f"model.{section} is not used: this task runs on the {engine} engine")
        elif model.get(section) and model[section] != here.get(section):
            messages.append(f"model.{section} of this request is not used: the session was loaded with its own")
    if task_type == "embedding" and spec.get("inference"):
        messages.append("inference is not used: an embedding is no sampling; see the section embedding")
    return messages
