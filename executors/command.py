"""The task type `command`: any script or program, with its events, progress, metrics and files.

The program runs in its own folder, or in a folder of the worker; what it writes to OUTPUT_DIR is its result's files.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

from executors import cancellation
from executors.base import Executor, ExecutorError, bad_input
from executors.cache import cache_root
from executors.programs.lines import Progress, metrics_in, progress_in, shortened
from executors.programs.running import EX_TEMPFAIL, Ran, run, shell_argv
from executors.programs.venvs import Wanted, python_for
from gpuflow.protocol import MAX_RESULT_BYTES, RESULT_FILE, Emitter, Event, Request, parse_line, read_json
from gpuflow.spec.patterns import metric_pattern

#: Folder of an attempt in which a program that was brought runs; it is no result.
WORK_FOLDER: Final = "work"
#: Characters of the end of what the program printed, which its result holds.
OUTPUT_CHARACTERS: Final = 65_536
#: Lines of stderr, or else of stdout, that the error of a failed program quotes.
_QUOTED_LINES: Final = 8
#: Progress bars are told of at most so often, in seconds.
_BAR_SECONDS: Final = 0.5
#: Characters of each of these.
_QUOTED_CHARACTERS: Final = 1000
#: Most metrics that a task has, whatever names its events give.
_MOST_METRICS: Final = 1000


class Command(Executor):
    """Runs `spec.command` and gives back its exit code, its metrics, and what it said."""

    task_types: ClassVar[tuple[str, ...]] = ("command",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Run the program to its end. Raises ExecutorError for one that cannot be run, or that fails."""
        section: Mapping[str, Any] = request.spec["command"]
        patterns = {name: metric_pattern(text) for name, text in (section.get("metrics") or {}).items()}
        output_dir = Path(request.output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        heard = Heard(emitter, patterns)
        environment = _environment(request, section, emitter)
        with _folder(section, output_dir) as folder:
            emitter.status("working")
            argv, in_shell = _argv(section)
            ran = run(
                argv,
                cwd=folder,
                environment=environment,
                on_stdout=heard.stdout,
                on_stderr=heard.stderr,
                in_shell=in_shell,
            )
        _check(ran, heard)
        heard.close()
        # responses.json is written from it when it has been rid of secrets, which a program may have printed.
        return {**heard.value(output_dir), "exit_code": ran.code, "metrics": heard.metrics, "output": heard.output()}


class Heard:
    """What the program has said so far; both of its streams are read at once."""

    def __init__(self, emitter: Emitter, patterns: Mapping[str, Any]) -> None:
        self._emitter, self._patterns = emitter, patterns
        self._lock = threading.Lock()
        self._tail: deque[str] = deque()
        self._tail_characters = 0
        self._errors: deque[str] = deque(maxlen=_QUOTED_LINES)
        self._knows_events = False
        self._shown_at = 0.0
        self._current: tuple[float, float | None, str] = (0, None, "step")
        self._last_bar: Progress | None = None
        self._result: Mapping[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.finish: Mapping[str, Any] | None = None

    def stdout(self, line: bytes) -> None:
        """Take a line of stdout: an event, or text."""
        event = parse_line(line)
        with self._lock:
            if (
                event.name != "log"
                or "invalid" in event.data
                or event.data.get("message") != line.decode("utf-8", "replace")
            ):
                self._event(event)
                return
            text = str(event.data["message"])
            if not self._said(text):
                text = shortened(text, OUTPUT_CHARACTERS)
                self._keep(text)
                self._emitter.emit("log", message=text)

    def stderr(self, line: bytes) -> None:
        """Take a line of stderr, which goes to the log."""
        text = line.decode("utf-8", "replace")
        with self._lock:
            if not self._said(text):
                self._errors.append(shortened(text, _QUOTED_CHARACTERS))
                print(text, file=sys.stderr, flush=True)

    def _event(self, event: Event) -> None:
        data = dict(event.data)
        if event.name == "progress":
            self._knows_events = True
            self._count(_numbers(data.get("metrics")))
        if event.name == "finish":
            self.finish = data
        elif event.name == "result":
            self._result = data
        elif event.name != "connection":
            self._emitter.emit(event.name, **data)

    def _said(self, text: str) -> bool:
        """Tell of progress and metrics in a line; return whether it was a bar, which is no line of its own."""
        found = metrics_in(text, self._patterns)
        progress = None if self._knows_events else progress_in(text)
        is_bar = progress is not None and progress.is_bar
        self._count(found)
        if progress is not None:
            self._current = progress.current, progress.total, progress.unit
            self._last_bar = progress if is_bar else None
            now = time.monotonic()
            if is_bar and progress.current < progress.total and now - self._shown_at < _BAR_SECONDS and not found:
                return True
            self._shown_at, self._last_bar = now, None
        if progress is not None or found:
            current, total, unit = self._current
            self._emitter.progress(current, total, unit, **found)
        return is_bar

    def _count(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name in self.metrics or len(self.metrics) < _MOST_METRICS:
                self.metrics[name] = value

    def close(self) -> None:
        """Tell of what was held back."""
        if self._last_bar is not None:
            self._emitter.progress(self._last_bar.current, self._last_bar.total, self._last_bar.unit)

    def _keep(self, text: str) -> None:
        self._tail.append(text)
        self._tail_characters += len(text) + 1
        while self._tail_characters - len(self._tail[0]) - 1 >= OUTPUT_CHARACTERS:
            self._tail_characters -= len(self._tail.popleft()) + 1

    def output(self) -> str:
        """Return the end of the text that it printed."""
        return "\n".join(self._tail)[-OUTPUT_CHARACTERS:]

    def value(self, output_dir: Path) -> dict[str, Any]:
        """Return the value of its `result` event. Raises ExecutorError for one that cannot be read."""
        value = self._result.get("value")
        if self._result.get("file"):
            try:
                if not (output_dir / RESULT_FILE).is_file():
                    raise OSError("it is no plain file")
                if (output_dir / RESULT_FILE).stat().st_size > MAX_RESULT_BYTES:
                    raise OSError(f"it has more than {MAX_RESULT_BYTES >> 20} MiB")
                value = read_json((output_dir / RESULT_FILE).read_bytes())
            except (OSError, ValueError, RecursionError) as error:
                raise ExecutorError(
                    "BadResult", f"the result that it wrote to a file cannot be read: {error}"
                ) from error
        if value is None:
            return {}
        return dict(value) if isinstance(value, Mapping) else {"value": value}

    def last_words(self) -> str:
        """Return what the error of a failed program quotes."""
        said = list(self._tail)[-_QUOTED_LINES:]
        lines = list(self._errors) or [shortened(line, _QUOTED_CHARACTERS) for line in said]
        return "\n".join(lines)


def _numbers(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        return {}
    return {
        str(name): one for name, one in metrics.items() if isinstance(one, int | float) and not isinstance(one, bool)
    }


@contextlib.contextmanager
def _folder(section: Mapping[str, Any], output_dir: Path) -> Iterator[Path]:
    """Give the folder in which the program runs: a copy of what came, one of the worker, or OUTPUT_DIR."""
    if section.get("brought"):
        brought, work = Path(str(section["brought"])), output_dir / WORK_FOLDER
        try:
            if brought.is_dir():
                shutil.copytree(brought, work, symlinks=True)
            else:
                work.mkdir()
                shutil.copy(brought, work / brought.name)
                (work / brought.name).chmod(0o755)
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return
    folder = Path(str(section["path"])).expanduser() if section.get("path") else output_dir
    if not folder.is_absolute():
        raise bad_input(f"command.path is {str(folder)!r}; give an absolute path of the worker")
    if not folder.is_dir():
        raise bad_input(
            f"command.path: there is no folder {folder} on this worker; correct it, or put the folder there"
        )
    yield folder


def _environment(request: Request, section: Mapping[str, Any], emitter: Emitter) -> dict[str, str]:
    """Return the environment of the program; its `python` is that of its requirements, else the one of this child."""
    environment = dict(os.environ)
    python = Path(sys.executable)
    if section.get("requirements"):
        root = cache_root(request.cache_dir)
        wanted = Wanted(
            requirements=section["requirements"],
            python=section.get("python"),
            project=Path(str(section["brought"])) if section.get("brought") else None,
            brought=frozenset(request.spec.get("env") or {}) | frozenset(request.spec.get("secrets") or ()),
        )
        python = python_for(wanted, root, emitter)
        environment["VIRTUAL_ENV"] = str(python.parents[1])
        environment.pop("PYTHONPATH", None)
    environment["OUTPUT_DIR"] = request.output_dir
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return environment


def _argv(section: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the arguments, and whether they are a shell's."""
    command, shell = section["command"], section.get("shell")
    if isinstance(command, str) and shell is not False:
        return shell_argv(shell if isinstance(shell, str) else "/bin/sh", command), True
    if isinstance(command, str):
        try:
            argv = shlex.split(command)
        except ValueError as error:
            raise bad_input(f"command.command cannot be split into words: {error}; give a list of arguments") from error
    else:
        argv = [str(part) for part in command]
    if not argv:
        raise bad_input("command.command is empty; give a program")
    if shell:
        return shell_argv(shell if isinstance(shell, str) else "/bin/sh", shlex.join(argv)), True
    return argv, False


def _check(ran: Ran, heard: Heard) -> None:
    """Raise how the program failed, or that it ended early after a notice; nothing for one that is completed."""
    finish = heard.finish or {}
    status, error = finish.get("status"), finish.get("error")
    if ran.noticed and (ran.code in (EX_TEMPFAIL, 128 + signal.SIGTERM) or ran.signal or status == "cancelled"):
        cancellation.preempt("the program ended after the notice; it goes on from its last complete checkpoint, if any")
    if ran.code == 0 and status in (None, "completed"):
        return
    if status == "failed" and isinstance(error, Mapping):
        raise ExecutorError(
            str(error.get("type") or "CommandFailed"),
            str(error.get("message") or "the program says that it failed"),
            retryable=bool(error.get("retryable")),
        )
    _raise_failure(ran, status, heard.last_words())


def _raise_failure(ran: Ran, status: str | None, last_words: str) -> NoReturn:
    said = f"; its last words:\n{last_words}" if last_words else ""
    if ran.code == 0:
        raise ExecutorError("CommandFailed", f"the program says {status!r} and ended with exit code 0{said}")
    if status == "completed":
        raise ExecutorError("Contradiction", f"the program says 'completed' and ended with exit code {ran.code}{said}")
    if ran.signal:
        name = signal.Signals(ran.signal).name if ran.signal in signal.valid_signals() else str(ran.signal)
        raise ExecutorError("CommandKilled", f"the program was ended by {name}{said}", retryable=True)
    raise ExecutorError(
        "CommandFailed", f"the program ended with exit code {ran.code}{said}", retryable=ran.code == EX_TEMPFAIL
    )
