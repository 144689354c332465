"""The task type `echo`: does what it is told and gives back what it was given. For tests, demos and checks of a fleet.

The standard library alone; the whole child takes some tens of milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from executors import cancellation, task_access
from executors.base import Executor, ExecutorError, write_responses
from executors.checkpoints import folder_of, to_resume
from gpuflow.checkpoints import mark_complete
from gpuflow.policy.paths import check_file_name
from gpuflow.protocol import Emitter, Request

_BLOCK_BYTES: Final = 1 << 20
#: How often `until_exists` looks for its path, in seconds.
_POLL_SECONDS: Final = 0.02
#: What a careless library might print between the events.
_GARBAGE: Final = (
    b"plain text\n",
    b"\xff\xfe\x00 not UTF-8\n",
    b"[1, 2, 3]\n",
    b'{"event": "finish"}\n',
    b'{"event": "progress", "current"\n',
    b'{"event": "text_delta", "delta": "\\ud83d"}\n',
    b"{" * 5000 + b"\n",
    b"x" * 100_000 + b"\n",
)


class Echo(Executor):
    """Sleeps, fails, floods, forks or ends as `spec.echo` says, and returns the items of `data`."""

    task_types: ClassVar[tuple[str, ...]] = ("echo",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Play the part of `spec.echo`; return items, output, environment, gpus, pid, and from when to when it ran."""
        began_at = time.time()
        wanted: Mapping[str, Any] = request.spec.get("echo") or {}
        for option, number in (("ignore_sigterm", signal.SIGTERM), ("ignore_notice", signal.SIGUSR1)):
            if wanted.get(option):
                signal.signal(number, signal.SIG_IGN)
        if wanted.get("stderr"):
            print(wanted["stderr"], file=sys.stderr, flush=True)
        if wanted.get("stdout_garbage"):
            _litter(emitter)
        held = b"\1" * (int(wanted.get("memory_mib") or 0) << 20)
        children = _start_children(int(wanted.get("children") or 0), emitter)
        resumed = _work(request, wanted, emitter)
        del held
        _fail_if_asked(wanted.get("fail"), request.attempt)
        if wanted.get("artifact"):
            _write_artifact(request, emitter, str(wanted["artifact"]), int(wanted.get("artifact_bytes") or 0))
        result = {**_result(request, wanted, emitter), "began_at": began_at, "ended_at": time.time()}
        if children:
            result["children"] = children
        if wanted.get("checkpoint_steps"):
            result["resumed_from_step"] = resumed
        write_responses(request, emitter, result)
        _leave_if_asked(wanted, result, emitter)
        return result


def _litter(emitter: Emitter) -> None:
    """Write lines that are no events to the real stdout, past the emitter's own writing."""
    stream = emitter._stream
    stream.flush()
    for line in _GARBAGE:
        stream.buffer.write(line)
    stream.buffer.flush()


def _start_children(count: int, emitter: Emitter) -> list[int]:
    """Start processes that sleep and are not waited for, as careless user code does."""
    if not count:
        return []
    import subprocess

    argv = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(86400)"]
    pids = [subprocess.Popen(argv).pid for _ in range(count)]
    emitter.emit("log", message=f"started {count} children", pids=pids)
    return pids


def _work(request: Request, wanted: Mapping[str, Any], emitter: Emitter) -> int | None:
    """Sleep, step by step, then wait for `until_exists`; return the step it went on from.

    With `checkpoint_steps` there is a checkpoint every so many steps, and one at the end of a step with a notice. The
    last step ends when the path of `until_exists` is there, or with that notice.
    """
    seconds, steps = float(wanted.get("sleep_seconds") or 0), int(wanted.get("steps") or 0)
    every = int(wanted.get("checkpoint_steps") or 0)
    resumed = to_resume(request.resume_from) if every else None
    never = threading.Event()
    with cancellation.notice_held() if every else contextlib.nullcontext():
        emitter.status("working")
        for step in range(resumed.step + 1 if resumed else 1, steps + 1):
            never.wait(seconds / steps)
            if step == steps:
                _wait_for_path(wanted, broken_off=cancellation.noticed if every else lambda: False)
            emitter.progress(step, steps)
            if every and (step % every == 0 or cancellation.noticed()):
                _save(request, step, steps, emitter)
            if every and cancellation.noticed():
                cancellation.preempt(f"the worker gave notice at step {step} of {steps}; it is saved")
    if not steps:
        never.wait(seconds)
        _wait_for_path(wanted)
    return resumed.step if resumed else None


def _wait_for_path(wanted: Mapping[str, Any], *, broken_off: Callable[[], bool] = lambda: False) -> None:
    """Return as soon as the path of `until_exists` exists or `broken_off` is true; without a path, at once."""
    path = wanted.get("until_exists")
    while path and not _exists(str(path), "echo.until_exists") and not broken_off():
        time.sleep(_POLL_SECONDS)


def _exists(path: str, field: str) -> bool:
    """Whether a path is there. Raises NotAllowed for one that the task may not look at."""
    try:
        with task_access.reading(path, field):
            return True
    except OSError:
        return False


def _save(request: Request, step: int, steps: int, emitter: Emitter) -> None:
    folder = folder_of(request) / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "step.txt").write_text(str(step))
    mark_complete(folder, step=step, max_steps=steps)
    emitter.checkpoint(str(folder), step)


def _fail_if_asked(fail: Any, attempt: int) -> None:
    if not fail:
        return
    how: Mapping[str, Any] = fail if isinstance(fail, Mapping) else {}
    if how.get("attempts") and attempt > int(how["attempts"]):
        return
    if how.get("unless_exists") and _exists(str(how["unless_exists"]), "echo.fail.unless_exists"):
        return
    message = fail if isinstance(fail, str) else how.get("message") or "asked to fail"
    raise ExecutorError(str(how.get("type") or "EchoFailure"), message, retryable=bool(how.get("retryable")))


def _write_artifact(request: Request, emitter: Emitter, name: str, size_bytes: int) -> None:
    check_file_name(name)  # once more: only here are all of its references resolved
    path = Path(request.output_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666), "wb") as file:
        for start in range(0, size_bytes, _BLOCK_BYTES):
            file.write(b"\0" * min(_BLOCK_BYTES, size_bytes - start))
    emitter.artifact(name)


def _result(request: Request, wanted: Mapping[str, Any], emitter: Emitter) -> dict[str, Any]:
    data: Mapping[str, Any] = request.spec.get("data") or {}
    inputs = _inputs(data, request, emitter)
    environment = {name: os.environ.get(name) for name in wanted.get("report_env") or ()}
    result: dict[str, Any] = {
        "items": [{"index": index, "input": entry, "output": entry} for index, entry in enumerate(inputs)],
        "output": wanted.get("output"),
        "environment": environment,
        "gpus": list(request.gpus),
        "pid": os.getpid(),
        "attempt": request.attempt,
    }
    if data:
        result["usage"] = {"items": len(inputs)}
    if "message" in wanted:
        result["message"] = wanted["message"]
    if isinstance(wanted.get("output"), Mapping):
        result.update(wanted["output"])
    return result


def _inputs(data: Mapping[str, Any], request: Request, emitter: Emitter) -> list[Any]:
    """Return the rows of any source; with `columns`, by their roles as a training would take them."""
    rows = data.get("items") or data.get("prompts")
    if not data or (rows and not {"columns", "column", "shuffle", "max_items"} & set(data)):
        return list(rows or ())
    from executors.data.columns import training_rows
    from executors.data.sources import read_entries, read_rows

    if data.get("columns") or data.get("column"):
        return training_rows(read_rows(data, request.cache_dir, emitter, bare="text"), data)
    return read_entries(data, request.cache_dir, emitter)


def _leave_if_asked(wanted: Mapping[str, Any], result: Mapping[str, Any], emitter: Emitter) -> None:
    """End the process here: with an exit code that may contradict the finish event, or without a finish event."""
    if wanted.get("exit_code") is None and not wanted.get("silent"):
        return
    emitter.result(result)
    if not wanted.get("silent"):
        emitter.finish("completed")
    raise SystemExit(int(wanted.get("exit_code") or 0))
