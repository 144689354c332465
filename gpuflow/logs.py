"""Structured log lines (`event key=value ...`) through the standard library's logging, so Celery's options hold.

Nothing global is configured: another user of structlog in the process keeps its own settings. `dress` is for the
processes of a fleet (worker, beat, gateway), which write for an operator.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from functools import cache, cached_property, partial
from typing import Any

from gpuflow.outages import SymptomFilter
from gpuflow.secrets import known
from gpuflow.terminal import log_lines, log_value


class Logger:
    """A logger of structlog that is made, and structlog loaded, when it is first asked to write.

    Structlog loads rich, and rich its highlighter: a fifth of what a command that writes no line takes to start.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _bound(self) -> Any:
        import structlog

        return structlog.wrap_logger(
            logging.getLogger(self._name),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.format_exc_info,
                _masked,
                _rendered,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        )

    def __getattr__(self, method: str) -> Any:
        """Return structlog's method of that name: info, warning, bind, ..."""
        return getattr(self._bound, method)


def get_logger(name: str) -> Any:
    """Return a logger whose calls take an event name and keys: `log.info("task_started", task=..., attempt=...)`."""
    return Logger(name)


def _masked(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide secrets in the values of a line, and what could forge another line or steer a terminal."""
    for name, value in line.items():
        if isinstance(value, str | BaseException | list | tuple | dict):
            text = known.text(str(value))
            line[name] = log_lines(text) if name == "exception" else log_value(text)
    return line


@cache
def _as_text() -> Any:
    import structlog

    return structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True, repr_native_str=False)


def _rendered(logger: Any, method: str, line: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """Return the text of a line, and with it, for `JsonFormatter` and filters, what it consists of."""
    return (str(_as_text()(logger, method, dict(line))),), {"extra": {"gpuflow": dict(line)}}


class MaskingFormatter(logging.Formatter):
    """Formats as another formatter does, tracebacks included; hides secrets and what steers a terminal.

    The lines of a record after its first are indented, so that no text of a task looks like a record of its own.
    """

    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        """Return the record without secrets."""
        return log_lines(known.text(self._inner.format(record)))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (RFC 3339, UTC), `level`, `logger`, `event`, and the fields of our own lines.

    A line of another library has its text as `message` and no `event`. Secrets are hidden.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON, in ASCII."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        shown: dict[str, Any] = {"time": at.replace("+00:00", "Z"), "level": record.levelname, "logger": record.name}
        fields = getattr(record, "gpuflow", None)
        if isinstance(fields, dict):
            shown |= {name: value for name, value in fields.items() if name not in shown}
        else:
            shown["message"] = record.getMessage()
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        masked = {name: known.text(value) if isinstance(value, str) else value for name, value in shown.items()}
        return json.dumps(masked, default=lambda value: log_value(known.text(str(value))))


def _handle(handler: logging.Handler, record: logging.LogRecord) -> bool | logging.LogRecord:
    """Do what `Handler.handle` does as of Python 3.13: a task that an exception in its thread ends keeps no lock.

    Before, a thread that waited for the lock could get that exception between taking and guarding it, and every thread
    of the worker that had a line to write waited for ever.
    """
    found = handler.filter(record)
    if found and handler.lock is not None:
        with handler.lock:
            handler.emit(found if isinstance(found, logging.LogRecord) else record)
    return found


def use_level(log_level: str) -> None:
    """Let gpuflow's own lines of this level pass, the setting LOG_LEVEL, whatever Celery's `-l` says, unless lower."""
    chosen = logging.getLevelNamesMapping()[log_level]
    logging.getLogger("gpuflow").setLevel(min(chosen, logging.getLogger().level or logging.CRITICAL))


def use_format(log_format: str, handler: logging.Handler) -> None:
    """Let a handler write the setting LOG_FORMAT, text or json, and no secrets."""
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    elif not isinstance(handler.formatter, MaskingFormatter):
        handler.setFormatter(MaskingFormatter(handler.formatter))


def dress(log_format: str, *loggers: str | None) -> None:
    """Make the handlers of these loggers (None: the root) write for an operator.

    Secrets are hidden, what an outage of the broker causes is one line, and with `log_format` "json" a line is JSON. At
    level DEBUG (`use_level`, before) all that an outage causes is written too. Loads what writes a line: a process that
    has just run out of memory, or of files, could not.
    """
    _as_text()
    says_all = logging.getLogger("gpuflow").isEnabledFor(logging.DEBUG)
    for name in loggers:
        for handler in logging.getLogger(name).handlers:
            use_format(log_format, handler)
            if sys.version_info < (3, 13):
                handler.handle = partial(_handle, handler)  # type: ignore[method-assign, assignment]
            if not says_all and not any(isinstance(one, SymptomFilter) for one in handler.filters):
                handler.addFilter(SymptomFilter())
