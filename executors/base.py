"""What every executor is and may raise, and how it writes its files.

Imported by all executors and by `__main__`; the standard library and the event protocol alone, so that a child starts
fast.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from gpuflow.protocol import Emitter, Request, write_whole

if TYPE_CHECKING:
    from executors.merging import MergedChild

#: Name of the result file in the output folder.
RESPONSES: Final = "responses.json"
#: Section of a spec that carries the calls of several callers, see `executors.merging`.
MERGED: Final = "merge_children"


class ExecutorError(Exception):
    """A failure whose type, message and worth of another attempt the executor knows itself."""

    def __init__(self, type: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.type = type
        self.message = message
        self.retryable = retryable


def bad_input(message: str) -> ExecutorError:
    """Return the error of a request that no attempt can fulfil: what is wrong, and how to mend it."""
    return ExecutorError("BadInput", message)


class Executor(ABC):
    """Runs the tasks of one or more task types, one request a process. Users' own executors derive from it too.

    A class names its `task_types`, and the `environment` (a preset of configs/environments) that its libraries are in;
    `default` is the worker's own. It is made without arguments. What `run` prints goes to the log; what it tells goes
    through the emitter; files go to `request.output_dir`.
    """

    task_types: ClassVar[tuple[str, ...]]
    environment: ClassVar[str] = "default"

    @abstractmethod
    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Do the work and return the result value; raise ExecutorError, or anything else, for a failure."""

    def run_children(
        self, request: Request, children: Sequence[MergedChild], emitter: Emitter
    ) -> dict[str, dict[str, Any]]:
        """Run the children of a merged request; return the result value of each, or `{"error": {...}}`, by its id.

        Here they run one after the other. An executor that can serve several at once does so in its own way, but for
        `merging.run_alone`, which is how one bad child fails alone.
        """
        from executors.merging import run_alone

        results = {}
        for done, child in enumerate(children):
            emitter.progress(done, len(children), "child")
            results[child.id] = run_alone(child, self.run, emitter)
        emitter.progress(len(children), len(children), "child")
        return results


def plain(value: Any) -> Any:
    """Return `value` as strict JSON can hold it: NaN and infinities become None, lone surrogates `?`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def write_json_atomically(path: Path, value: Any) -> None:
    """Write `value` as strict JSON; the file appears whole, by rename, and is on disk then. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=1, default=str)
    write_whole(path, f"{text}\n".encode(), synced=True)


def write_responses(request: Request, emitter: Emitter, value: Mapping[str, Any]) -> None:
    """Write the result file of the task and declare it. A large result value will go to the same folder."""
    emitter.output_dir = request.output_dir
    write_json_atomically(Path(request.output_dir) / RESPONSES, value)
    emitter.artifact(RESPONSES)
