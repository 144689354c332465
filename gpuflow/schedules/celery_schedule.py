"""The scheduler of `celery -A gpuflow beat`: RedBeat's, which submits nothing for others where signatures are required.

RedBeat keeps the periodic tasks in Redis, and beat signs what it submits. So where unsigned work is refused, beat
submits what stands in the app's own `beat_schedule`, which is code, and nothing that somebody has written to Redis.
"""

from __future__ import annotations

from typing import Any

from redbeat import RedBeatScheduler  # type: ignore[import-untyped]

from gpuflow.logs import get_logger

log = get_logger("gpuflow.schedules")


class Scheduler(RedBeatScheduler):  # type: ignore[misc]
    """RedBeat's scheduler, for an app of ours or any other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._refused: set[str] = set()
        super().__init__(*args, **kwargs)

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """Submit what an entry says; None for one that is not that of the configuration, where it has to be."""
        signer = getattr(self.app, "signer", None)
        if signer is None or not signer.requires or self._is_configured(entry):
            return super().apply_async(entry, *args, **kwargs)
        if entry.name not in self._refused:
            self._refused.add(entry.name)
            log.error(
                "periodic_task_refused",
                entry=entry.name,
                cause="it is not in the app's beat_schedule, and GPUFLOW_SIGNING is require; put it there, or use "
                "`gpuflow schedules add`",
            )
        return None

    def _is_configured(self, entry: Any) -> bool:
        wanted = (self.app.redbeat_conf.schedule or {}).get(entry.name)
        if not isinstance(wanted, dict):
            return False
        given = (entry.task, list(entry.args or ()), dict(entry.kwargs or {}), dict(entry.options or {}))
        return given == (
            wanted.get("task"),
            list(wanted.get("args") or ()),
            dict(wanted.get("kwargs") or {}),
            dict(wanted.get("options") or {}),
        )


__all__ = ["Scheduler"]
