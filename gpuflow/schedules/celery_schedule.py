"""The scheduler of `celery -A gpuflow beat`: RedBeat's, which submits nothing for others where signatures are required.

RedBeat keeps the periodic tasks in Redis, and beat signs what it submits. So where unsigned work is refused, beat
submits what stands in the app's own `beat_schedule`, which is code, and nothing that somebody has written to Redis.

RedBeat ends with the first error of the broker, at whatever step. This one waits: for the broker, at its start too, and
for the lock of beats, where another one has it.
"""

from __future__ import annotations

from typing import Any, Final

from celery.signals import beat_init
from redbeat import RedBeatScheduler  # type: ignore[import-untyped]
from redbeat.schedulers import (  # type: ignore[import-untyped]
    LUA_EXTEND_TO_SCRIPT,
    acquire_distributed_beat_lock,
    get_redis,
)
from redis.exceptions import LockError, RedisError

from gpuflow.logs import get_logger

log = get_logger("gpuflow.schedules")

#: The broker and the lock are asked for again this often, in seconds; or at each turn, where turns are shorter.
_AGAIN_SECONDS: Final = 5.0


#: RedBeat takes the lock once, at its start, and waits there for it without looking at anything else.
beat_init.disconnect(acquire_distributed_beat_lock)


class Scheduler(RedBeatScheduler):  # type: ignore[misc]
    """RedBeat's scheduler, for an app of ours or any other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._refused: set[str] = set()
        self._is_set_up = False
        super().__init__(*args, **kwargs)

    def setup_schedule(self) -> None:
        """Write the entries of the configuration; a broker that does not answer is asked again at the next turn."""
        try:
            super().setup_schedule()
            self._is_set_up = True
        except (RedisError, OSError) as error:
            log.warning("schedules_not_run", cause=str(error))

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Submit what is due, and return in how many seconds to look again."""
        try:
            if not self._is_set_up:
                self.setup_schedule()
            if self._is_set_up and (not self.lock_key or self._has_lock()):
                return float(super().tick(*args, **kwargs))
        except LockError as error:
            log.warning("lock_of_beats_lost", cause=str(error))
            self.lock = None
            self._is_set_up = False  # the server may have lost its memory, and the entries with it
        except (RedisError, OSError) as error:
            log.warning("schedules_not_run", cause=str(error))
            self._is_set_up = False
        return min(_AGAIN_SECONDS, float(self.max_interval))

    def close(self) -> None:
        """Let go of the lock; what the broker does not take ends by itself."""
        try:
            super().close()
        except (RedisError, OSError) as error:
            log.warning("lock_of_beats_kept", cause=str(error))

    def _has_lock(self) -> bool:
        """Say whether this is the beat that submits; take the lock if it is free."""
        if self.lock is None:
            client = get_redis(self.app)
            lock = client.lock(self.lock_key, timeout=self.lock_timeout, sleep=self.max_interval)
            lock.lua_extend = client.register_script(LUA_EXTEND_TO_SCRIPT)
            if lock.acquire(blocking=False):
                self.lock = lock
                log.info("lock_of_beats_taken")
        return self.lock is not None

    def maybe_due(self, entry: Any, **kwargs: Any) -> Any:
        """Submit an entry if it is due, and return in how many seconds it is.

        Raises LockError when another beat submits meanwhile: one that stood still between two entries is told here.
        """
        if self.lock is not None and entry.is_due()[0]:
            self.lock.extend(int(self.lock_timeout))
        return super().maybe_due(entry, **kwargs)

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
