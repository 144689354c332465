"""What `celery inspect conf` and `report`, and so Flower, show of a worker's configuration: with all URLs masked.

Celery hides passwords in the settings that it knows; other libraries' settings, such as the address of RedBeat's
schedule, hold the same URL. The worker program installs it when it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery.worker.control import Panel

from gpuflow.secrets import known

#: Celery's commands that show the configuration, by all their names.
COMMANDS: Final = ("conf", "dump_conf", "report")


def install() -> None:
    """Mask the answers of the commands, once for the process."""
    for name in COMMANDS:
        command = Panel.data[name]
        if not getattr(command, "masked", False):
            Panel.data[name] = _masking(command)


def _masking(command: Callable[..., Any]) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return _masked(command(*args, **kwargs))

    answer.__doc__ = command.__doc__
    answer.masked = True  # type: ignore[attr-defined]
    return answer


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return known.text(value)
    if isinstance(value, dict):
        return {key: _masked(item) for key, item in value.items()}
    return [_masked(item) for item in value] if isinstance(value, list | tuple) else value
