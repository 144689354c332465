"""Structured log lines (`event key=value ...`) through the standard library's logging, so Celery's options hold.

Nothing global is configured: another user of structlog in the process keeps its own settings.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """Return a logger whose calls take an event name and keys: `log.info("task_started", task=..., attempt=...)`."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"], drop_missing=True, repr_native_str=False),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )
