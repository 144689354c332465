"""Runs `python -m executors.models` for the command line: shows its progress, returns its result."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Final

from gpuflow.cli import output
from gpuflow.cli.errors import bad_input
from gpuflow.cluster.commands import with_our_packages
from gpuflow.errors import GPUFlowError
from gpuflow.protocol import parse_line
from gpuflow.settings import Settings
from gpuflow.worker.child_environment import OFFLINE

#: Called with the bytes that are done, and those of all if that is known.
Tell = Callable[[float, float | None], None]

_TAIL_CHARACTERS: Final = 300


def ask(command: str, *arguments: str) -> dict[str, Any]:
    """Run one command of the child and return its result value; what it says goes to stderr.

    Raises GPUFlowError with its error; click.UsageError for input that it refuses.
    """
    settings = Settings.load()
    given = [*arguments]
    argv = [sys.executable, "-P", "-m", "executors.models", command, "--json", "--cache-dir", str(settings.cache_dir)]
    environment = {**with_our_packages(os.environ), **(OFFLINE if settings.offline else {})}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen([*argv, *given], env=environment, stdout=subprocess.PIPE, stderr=log) as child,
        progress() as tell,
    ):
        value, finish = _follow(child, tell)
        child.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip()
    if finish.get("status") == "completed" and value is not None:
        return value
    error = finish.get("error") or {}
    cause = str(error.get("message") or said[-_TAIL_CHARACTERS:] or f"the child ended with {child.returncode}")
    raise bad_input(cause) if error.get("type") == "BadInput" else GPUFlowError(cause)


def _follow(child: subprocess.Popen[bytes], tell: Tell) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    assert child.stdout is not None  # noqa: S101  (it was asked for)
    value: dict[str, Any] | None = None
    finish: dict[str, Any] = {}
    for line in child.stdout:
        event = parse_line(line)
        if event.name == "worker" and event.data.get("message"):
            output.note(event.data["message"])
        elif event.name == "progress":
            tell(float(event.data["current"]), event.data.get("total"))
        elif event.name == "result":
            value = dict(event.data["value"])
        elif event.name == "finish":
            finish = dict(event.data)
    return value, finish


@contextlib.contextmanager
def progress(label: str = "") -> Iterator[Tell]:
    """Give what draws a bar of bytes on a terminal (on stderr), and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(label, total=None, visible=False)
        yield lambda done, total: bars.update(bar, completed=done, total=total, visible=True)
