"""How every error of the command line ends: one line that names cause and mend, on stderr, and an exit code.

0 done, 1 failed, 2 bad input, 130 Ctrl-C, 141 the reader of our output went away. A traceback only with --debug.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

import click

from gpuflow.errors import GPUFlowError, InvalidSettings, InvalidTemplate, UnknownTask, unreachable_text

DONE: Final = 0
FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
_PIPE_CLOSED: Final = 141
_BAD_INPUT_ERRORS: Final = (InvalidSettings, InvalidTemplate, UnknownTask)
_TRUE: Final = frozenset({"1", "true", "yes", "on"})


class _State:
    debug = False


class ReaderGone(Exception):
    """Nobody reads what we print any more (`gpuflow queues | head -1`)."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by a signal; `number` is that signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def set_debug(wanted: bool) -> None:
    """Choose whether errors come with a traceback; GPUFLOW_DEBUG chooses it too."""
    _State.debug = wanted or os.environ.get("GPUFLOW_DEBUG", "").strip().lower() in _TRUE


def bad_input(message: str) -> click.UsageError:
    """Return the error of an argument that cannot be used: `cause; mend`."""
    return click.UsageError(message)


def guarded(action: Callable[[], Any]) -> int:
    """Run `action`, tell its error if it has one, and return the exit code."""
    set_debug(False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = action()
        sys.stdout.flush()
    except (BrokenPipeError, ReaderGone):
        # Python would flush once more at its end and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except (KeyboardInterrupt, click.Abort) as error:
        return interrupted(error)
    except Exception as error:  # noqa: BLE001  (the one place where every error becomes a line)
        return tell(error)
    return code if isinstance(code, int) and not isinstance(code, bool) else DONE


def interrupted(error: BaseException) -> int:
    """Return the exit code of an interruption: 128 and the signal."""
    return 128 + error.number if isinstance(error, Terminated) else INTERRUPTED


def tell(error: Exception) -> int:
    """Write an error to stderr and return the exit code."""
    if _State.debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, click.ClickException):
        _say(_usage_text(error))
        return BAD_INPUT
    if isinstance(error, GPUFlowError):
        _say(str(error), report=isinstance(error, InvalidTemplate) and bool(error.mistakes))
        return BAD_INPUT if isinstance(error, _BAD_INPUT_ERRORS) else FAILED
    _say(foreign_text(error))
    return FAILED


def foreign_text(error: Exception) -> str:
    """Return the line for an error that is not ours: of the broker, of the system, or a bug."""
    kind = type(error)
    origin = kind.__module__.split(".", 1)[0]
    if origin in ("redis", "kombu", "amqp"):
        if kind.__name__ in ("ConnectionError", "TimeoutError", "OperationalError", "BusyLoadingError"):
            return unreachable_text(error)
        return f"the broker refused: {error}; `gpuflow doctor` checks it"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}; mend that, then try again"
    return f"internal error: {kind.__name__}: {error}; run it again with --debug and report the traceback"


def _usage_text(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".")
    ctx = getattr(error, "ctx", None)
    if ctx is None or ";" in text:
        return text
    return f"{text}; see `{ctx.command_path} --help`"


def _say(text: str, *, report: bool = False) -> None:
    """Write an error: `gpuflow: cause; mend`. The lines of a template's report name their file and stand as is."""
    from gpuflow.terminal import clean

    lines = [line for line in clean(text).splitlines() if line.strip()] or ["unknown error"]
    for number, line in enumerate(lines):
        click.echo(line if report or number else f"gpuflow: {line}", err=True)
