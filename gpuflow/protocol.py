"""The protocol between an executor (the child process) and its supervisor: request, events, checkpoint folders.

One JSON object a line on the child's stdout; the request is one JSON object on its stdin. This file imports the
standard library alone, so that a child starts fast and an executor in any environment can use it. It knows neither
Celery nor Redis.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

#: Schema number of the request and of every event; readers accept this one and the one before.
PROTOCOL_SCHEMA: Final = 1

#: Longest line that the supervisor takes as one event, in bytes; a longer one is cut and becomes a log event.
MAX_LINE_BYTES: Final = 8 * 1024 * 1024

#: A result whose JSON is larger than this goes by a file, in bytes: other events of the process need not wait for it.
INLINE_RESULT_BYTES: Final = 1024 * 1024

#: Largest result, in bytes of JSON.
MAX_RESULT_BYTES: Final = 256 * 1024 * 1024

#: The file of a large result, in the output folder; whoever supervises removes it once it is read.
RESULT_FILE: Final = ".result.json"

#: Event names with their required fields. Any other name is passed on as it is. A result may have `file` for `value`.
EVENT_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "connection": ("status",),
    "worker": ("status",),
    "progress": ("current",),
    "text_delta": ("delta",),
    "text": ("content",),
    "artifact": ("path",),
    "checkpoint": ("path", "step"),
    "result": ("value",),
    "finish": ("status",),
    "log": ("message",),
}

FINISH_STATUSES: Final = ("completed", "failed", "cancelled")

#: Error type of a cancelled finish after a notice (SIGUSR1): the task is to go on in another attempt.
PREEMPTED: Final = "Preempted"

#: Task type of the records of a team's functions.
FUNCTION_TYPE: Final = "function"

#: Unit of the progress of a replica whose model is loaded; that of a download or a conversion has another one.
REPLICA_UNIT: Final = "replica"

#: The file that makes a checkpoint folder a complete one. It comes last, by rename; without it, a folder is not read.
CHECKPOINT_MARKER: Final = "complete.json"
#: Task types of users' own executors: names with a dot, the first part says whose. Those of gpuflow have none.
_USER_TYPE: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}(\.[a-z0-9_-]{1,63})+")
#: How JSON names a half of a surrogate pair.
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_CHECKPOINT: Final = re.compile(r"checkpoint-([0-9]+)")
#: An id that can name a folder.
_SAFE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of a task: its name, its other fields, and when the supervisor read it (Unix seconds)."""

    name: str
    data: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0

    def to_json(self) -> str:
        """Return the event as one line of JSON, without the newline."""
        return whole_text(json.dumps({"event": self.name, **self.data}, ensure_ascii=False, default=str))


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a child is asked to do.

    `spec` is a canonical task spec (references resolved, aliases replaced). Paths are absolute. `gpus` are UUIDs, in
    the order of CUDA_VISIBLE_DEVICES. `share_mib` is how much memory of each it may use; None: all of it.
    `checkpoint_path` is the local folder of `checkpoint.load`, if there is one. `policy` is what the task may read,
    write and reach (`gpuflow.policy.child`); None: there is no limit.
    """

    task_id: str
    task_type: str
    spec: Mapping[str, Any]
    output_dir: str
    attempt: int = 1
    gpus: tuple[str, ...] = ()
    share_mib: int | None = None
    checkpoint_dir: str | None = None
    resume_from: str | None = None
    checkpoint_path: str | None = None
    cache_dir: str | None = None
    policy: Mapping[str, Any] | None = None
    schema: int = PROTOCOL_SCHEMA

    def to_json(self) -> str:
        """Return the request as JSON, for the child's stdin."""
        return json.dumps(self.__dict__, ensure_ascii=False, default=list)

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read a request; unknown fields of a newer schema are ignored. Raises ValueError with the cause."""
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("the request must be one JSON object")
        known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        missing = [name for name in ("task_id", "task_type", "spec", "output_dir") if name not in known]
        if missing:
            raise ValueError(f"the request lacks {', '.join(missing)}")
        known["gpus"] = tuple(known.get("gpus") or ())
        return cls(**known)


def whole_text(text: str) -> str:
    """Return a text that UTF-8 can hold: half a surrogate pair (half an emoji) becomes U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def read_json(text: str | bytes) -> Any:
    """Read JSON that a child has written; every text in it can be written on. Raises ValueError, RecursionError."""
    value = json.loads(text)
    if _SURROGATE.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
        return json.loads(whole_text(json.dumps(value, ensure_ascii=False)))
    return value


def is_user_type(task_type: object) -> bool:
    """Say whether a task type has the form of a user's own (`acme.translate`), whether or not anybody runs it."""
    return isinstance(task_type, str) and len(task_type) <= 200 and _USER_TYPE.fullmatch(task_type) is not None


def is_safe_id(value: object) -> bool:
    """Say whether the id of a task can name its folder; a task with another one has no results on a disk."""
    return isinstance(value, str) and _SAFE_ID.fullmatch(value) is not None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder (`checkpoint-STEP/` with its marker), the lowest step first.

    Links are passed over: a checkpoint is a folder of its own. Raises OSError, though not for a folder that is missing.
    """
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [
        (int(match[1]), path)
        for path in entries
        if (match := _CHECKPOINT.fullmatch(path.name)) and not path.is_symlink() and is_complete(path)
    ]
    return [path for _, path in sorted(found)]


def is_complete(checkpoint: Path) -> bool:
    """Say whether all of a checkpoint folder is there: its marker is, as a plain file."""
    marker = checkpoint / CHECKPOINT_MARKER
    return marker.is_file() and not marker.is_symlink()


def parse_line(line: bytes | str, at: float | None = None) -> Event:
    """Turn one line of a child's stdout into an event; whatever is not a valid event becomes a log event.

    Both `event` and its alias `type` name the event. A known event that lacks a required field becomes a log event
    with `invalid` set, so that a wrong executor is visible and harms nothing.
    """
    text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
    text = text.rstrip("\r\n")
    when = time.time() if at is None else at
    try:
        raw = read_json(text) if text.lstrip()[:1] == "{" else None
    except (ValueError, RecursionError):
        return Event(name="log", data={"message": text}, at=when)
    if not isinstance(raw, dict):
        return Event(name="log", data={"message": text}, at=when)
    name = raw.pop("event", None) or raw.pop("type", None)
    if not isinstance(name, str):
        return Event(name="log", data={"message": text}, at=when)
    missing = [key for key in EVENT_FIELDS.get(name, ()) if key not in raw]
    if name == "result" and isinstance(raw.get("file"), str):
        missing = []
    if missing or (name == "finish" and raw.get("status") not in FINISH_STATUSES):
        why = f"lacks {', '.join(missing)}" if missing else f"status {raw.get('status')!r} is unknown"
        return Event(name="log", data={"message": text, "invalid": f"event {name!r} {why}"}, at=when)
    return Event(name=name, data=raw, at=when)


def write_whole(path: Path, content: bytes, *, synced: bool = False) -> None:
    """Write a file that appears whole, by rename; with `synced`, it is on disk then. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def take_stdin() -> BinaryIO:
    """Return the real stdin, on which the supervisor goes on to write; who reads standard input now finds it empty."""
    stream = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return stream


class Emitter:
    """Writes events from the child to its supervisor; safe to use from several threads.

    `claim_stdout()` keeps the real stdout for events and points `sys.stdout` at stderr, so that a library's print
    ends in the log and not between the events. `output_dir` is set as soon as it is known.
    """

    #: The output folder of the request: a large result is written there.
    output_dir: str | None = None

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        #: Whether a line was begun that has no end: a signal raised while it was written.
        self._is_torn = False

    @classmethod
    def claim_stdout(cls) -> Emitter:
        """Return an emitter on the real stdout and send all later prints of this process to stderr."""
        stream = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        return cls(stream)

    def emit(self, name: str, /, **data: Any) -> None:
        """Write one event."""
        line = Event(name=name, data=data).to_json()
        with self._lock:
            torn, self._is_torn = self._is_torn, True
            self._stream.write(f"\n{line}\n" if torn else f"{line}\n")
            self._stream.flush()
            self._is_torn = False

    def status(self, status: str, message: str = "") -> None:
        """Say what the child is doing: loading, working, cleaning_up, ..."""
        self.emit("worker", status=status, message=message)

    def progress(self, current: float, total: float | None = None, unit: str = "step", /, **metrics: float) -> None:
        """Say how far the work is; `metrics` are numbers such as loss or tokens_per_second."""
        self.emit("progress", current=current, total=total, unit=unit, metrics=metrics)

    def text_delta(self, delta: str, request: str | int | None = None) -> None:
        """Pass on newly generated text of one request."""
        self.emit("text_delta", delta=delta, request=request)

    def artifact(self, path: str) -> None:
        """Declare a file or folder, relative to the output folder, as part of the result."""
        self.emit("artifact", path=path)

    def checkpoint(self, path: str, step: int) -> None:
        """Tell of a complete checkpoint: its folder, and the steps that are done in it."""
        self.emit("checkpoint", path=path, step=step)

    def result(self, value: Mapping[str, Any]) -> None:
        """Give the result value; the last one counts. A large one is written to a file first. Raises OSError."""
        content = json.dumps(dict(value), ensure_ascii=False, default=str).encode("utf-8", "replace")
        if self.output_dir is None or len(content) <= INLINE_RESULT_BYTES:
            self.emit("result", value=dict(value))
            return
        place = Path(self.output_dir, RESULT_FILE)
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.with_name(f"{RESULT_FILE}.{os.getpid()}.new")
        try:
            fresh.write_bytes(content)
            fresh.replace(place)
        finally:
            fresh.unlink(missing_ok=True)
        self.emit("result", file=RESULT_FILE)

    def finish(self, status: str = "completed", error: Mapping[str, Any] | None = None) -> None:
        """End the work: completed, failed or cancelled. `error` holds type, message and retryable."""
        if error is None:
            self.emit("finish", status=status)
        else:
            self.emit("finish", status=status, error=dict(error))


class RequestEmitter(Emitter):
    """Tells the events of one request of a session: each with its id, none after the request has ended."""

    def __init__(self, parent: Emitter, request_id: str) -> None:
        super().__init__(parent._stream)
        self._parent = parent
        self._id = request_id
        self._ended = False

    def emit(self, name: str, /, **data: Any) -> None:
        """Write one event of the request."""
        with self._lock:
            if not self._ended:
                self._ended = name == "finish"
                self._parent.emit(name, **{**data, "id": self._id})

    @property
    def ended(self) -> bool:
        """Whether its finish event has been written."""
        return self._ended
