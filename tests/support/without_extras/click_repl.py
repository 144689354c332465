"""Stands before click-repl, which `celery amqp` alone needs and every command of Celery loads, with prompt_toolkit."""

from __future__ import annotations


def register_repl(group: object, name: str = "repl") -> None:
    """Add no shell to `celery amqp`."""
