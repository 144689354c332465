"""Structured log lines (`event key=value ...`) through the standard library's logging, so Celery's options hold.

Nothing global is configured: another user of structlog in the process keeps its own settings.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import structlog

from gpuflow.secrets import known
from gpuflow.terminal import log_lines, log_value


def get_logger(name: str) -> Any:
    """Return a logger whose calls take an event name and keys: `log.info("task_started", task=..., attempt=...)`."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            _masked,
            structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True, repr_native_str=False),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _masked(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide secrets in the values of a line, and what could forge another line or steer a terminal."""
    for name, value in line.items():
        if isinstance(value, str | BaseException | list | tuple | dict):
            text = known.text(str(value))
            line[name] = log_lines(text) if name == "exception" else log_value(text)
    return line


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


def mask_handlers(logger: logging.Logger) -> None:
    """Hide secrets in all that the handlers of a logger write."""
    for handler in logger.handlers:
        if not isinstance(handler.formatter, MaskingFormatter):
            handler.setFormatter(MaskingFormatter(handler.formatter))
