"""What a session is told: one JSON object a line on its stdin. Pure; docs/reference/sessions.md has the protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

#: Longest line that is read, in bytes: data that stands in a request is up to 1 GiB. A longer one is passed over, and
#: the session lives.
MAX_BYTES: Final = 2 * 1024 * 1024 * 1024
#: Longest part of a bad line that an error repeats, in characters.
_SHOWN: Final = 80

#: The beginning of a run line as a worker writes it, from which its id can be had without the rest.
_RUN: Final = re.compile(rb'\s*\{"op": ?"run", ?"id": ?("(?:[^"\\]|\\.){1,4096}")')

EngineName = Literal["vllm", "transformers", "container"]
#: Task types that a loaded model answers.
FAMILIES: Final = ("inference", "embedding")
#: Engine -> the task types that it answers.
ENGINES: Final[Mapping[EngineName, tuple[str, ...]]] = {
    "vllm": FAMILIES, "transformers": FAMILIES, "container": ("container",),
}  # fmt: skip


class BadLine(Exception):
    """A line that is no operation. `id` is that of the request, where the line names one."""

    def __init__(self, message: str, *, id: str | None = None) -> None:
        super().__init__(message)
        self.id = id


@dataclass(frozen=True, kw_only=True)
class Open:
    """What to load: a canonical spec with its model, the engine, and the GPUs (UUIDs) that the process sees.

    `spec.adapted` says that requests will bring adapters. `share_mib` is how much of each GPU it may use; None: all.
    """

    spec: Mapping[str, Any]
    engine: EngineName
    task_type: str = "inference"
    gpus: tuple[str, ...] = ()
    share_mib: int | None = None
    cache_dir: str | None = None
    checkpoint_path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Serve a request; `request` is `gpuflow.protocol.Request` as an object."""

    id: str
    request: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Abort:
    """End one request; the others go on."""

    id: str


@dataclass(frozen=True, kw_only=True)
class Ping:
    """Ask for a sign of life; `n` comes back."""

    n: Any = None


@dataclass(frozen=True)
class Close:
    """Take no more requests, and end when the open ones have ended."""


Operation = Open | Run | Abort | Ping | Close


def read_operation(line: bytes) -> Operation:
    """Return the operation of a line. Raises BadLine saying what is wrong with it."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"a line is not JSON ({error}): {_show(line)}") from error
    if not isinstance(raw, dict):
        raise BadLine(f"a line is no JSON object: {_show(line)}")
    name = raw.get("op")
    reader = _READERS.get(name) if isinstance(name, str) else None
    if reader is None:
        raise BadLine(f"op is {name!r}; it must be one of {', '.join(_READERS)}")
    return reader(raw)


def too_long(beginning: bytes) -> BadLine:
    """Return the refusal of a line longer than MAX_BYTES, with the id of its request where the beginning tells it."""
    found = _RUN.match(beginning)
    try:
        name = json.loads(found[1]) if found else None
    except ValueError:
        name = None
    return BadLine(
        f"a line is longer than {MAX_BYTES} bytes; send large data by a file (data.path). It begins: "
        f"{_show(beginning[: 4 * _SHOWN])}",
        id=name,
    )


def _show(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _opening(raw: Mapping[str, Any]) -> Open:
    spec = raw.get("spec")
    if not isinstance(spec, dict):
        raise BadLine("op open needs spec, an object")
    engine = raw.get("engine")
    if engine not in ENGINES:
        raise BadLine(f"op open has engine {engine!r}; it must be one of {', '.join(ENGINES)}")
    family = raw.get("task_type") or spec.get("taskType") or "inference"
    if family not in ENGINES[engine]:
        raise BadLine(f"op open has task type {family!r}; engine {engine} serves {', '.join(ENGINES[engine])}")
    gpus = raw.get("gpus") or []
    if not isinstance(gpus, list) or not all(isinstance(gpu, str) for gpu in gpus):
        raise BadLine("op open has gpus that are no list of texts")
    for name in ("cache_dir", "checkpoint_path"):
        if not isinstance(raw.get(name), str | None):
            raise BadLine(f"op open has a {name} that is no text")
    share = raw.get("share_mib")
    if share is not None and (not isinstance(share, int) or isinstance(share, bool) or share < 1):
        raise BadLine(f"op open has share_mib {share!r}; it must be a number of MiB, or null")
    return Open(
        spec=spec,
        engine=engine,
        task_type=family,
        gpus=tuple(gpus),
        share_mib=share,
        cache_dir=raw.get("cache_dir"),
        checkpoint_path=raw.get("checkpoint_path"),
    )


def _id(raw: Mapping[str, Any]) -> str:
    given = raw.get("id")
    if not isinstance(given, str) or not given:
        raise BadLine(f"op {raw['op']} has the id {given!r}; it must be text")
    return given


def _run(raw: Mapping[str, Any]) -> Run:
    name = _id(raw)
    request = raw.get("request")
    if not isinstance(request, dict):
        raise BadLine("op run needs request, an object", id=name)
    return Run(id=name, request=request)


_READERS: Final = {
    "open": _opening,
    "run": _run,
    "abort": lambda raw: Abort(id=_id(raw)),
    "ping": lambda raw: Ping(n=raw.get("n")),
    "close": lambda raw: Close(),
}
