"""An event of a task or pipeline as a line of text for people: `gpuflow logs` and the monitor show the same. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

#: Events that no log needs: every piece of a text comes again in the whole of it.
_SILENT: Final = frozenset({"text_delta"})


def message(name: str, data: Mapping[str, Any]) -> str | None:
    """Return an event as text for people; None for one that needs no line."""
    if name in _SILENT:
        return None
    if name in ("log", "text"):
        return str(data.get("message", data.get("content", "")))
    if name == "state":
        return _state(data)
    if name == "stage":
        error = _cause(data)
        return str(data.get("state")).lower() + (f": {error}" if error else "")
    if name == "worker":
        return ": ".join(str(part) for part in (data.get("status"), data.get("message")) if part)
    if name == "progress":
        return _progress(data)
    if name == "artifact":
        return f"artifact {data.get('path')}"
    if name == "finish":
        error = _cause(data)
        return f"finish {data.get('status')}" + (f": {error}" if error else "")
    if name == "connection":
        return str(data.get("status"))
    return f"{name} {json.dumps(data, ensure_ascii=False, default=str)}" if data else name


def _state(data: Mapping[str, Any]) -> str:
    text = str(data.get("state"))
    if data.get("attempt") and text == "STARTING":
        text += f" attempt {data['attempt']}"
    if data.get("worker"):
        text += f" on {data['worker']}"
    error = _cause(data)
    return text + (f": {error}" if error else "")


def _progress(data: Mapping[str, Any]) -> str:
    total = f"/{data['total']}" if data.get("total") is not None else ""
    metrics = data.get("metrics")
    shown = ""
    if isinstance(metrics, Mapping):
        shown = " ".join(f"{name}={_short(value)}" for name, value in metrics.items())
    told = f"{data.get('current')}{total} {data.get('unit', 'step')} {shown}".rstrip()
    return f"{told}: {data['message']}" if data.get("message") else told


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cause(data: Mapping[str, Any]) -> str:
    error = data.get("error")
    return str(error.get("message", "")) if isinstance(error, Mapping) else ""
