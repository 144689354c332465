"""What a worker does for its machine beside the work: old results, stale parts and lost containers go, the model cache
has its limit.

A thread of its own, started by a boot step. What goes is decided in `gpuflow.upkeep.retention`, and by the executors'
own program for the cache, which runs as a child: it loads the library of the hub.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from redis.exceptions import RedisError

from gpuflow.artifacts.store import file_url_path
from gpuflow.errors import ArtifactError
from gpuflow.logs import get_logger
from gpuflow.protocol import parse_line
from gpuflow.upkeep.parts_cleaning import clean_cache, clean_store
from gpuflow.upkeep.results_cleaning import ResultsCleaner
from gpuflow.worker.child_environment import child_environment, python_path
from gpuflow.worker.containers.engines import find_engine
from gpuflow.worker.containers.local import LOCKS
from gpuflow.worker.containers.removal import remove_lost
from gpuflow.worker.runtime import Runtime

log = get_logger("gpuflow.housekeeping")

#: Results are cleaned this often, by one of the workers that share the folder, in seconds.
RESULTS_SECONDS: Final = 3600.0
#: The cache is looked at this often for what is new in it, and trimmed then, in seconds.
CACHE_SECONDS: Final = 60.0
#: Each worker waits up to this share of a period longer or shorter, so that they do not all come at once.
_JITTER: Final = 0.2
_TRIM_TIMEOUT_SECONDS: Final = 1800.0


class Housekeeping(threading.Thread):
    """Cleans results, store and cache of this machine until the worker ends; a failure is logged and tried again."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(name="gpuflow-housekeeping", daemon=True)
        self._runtime = runtime
        self._stop_event = threading.Event()
        self._cache_seen: Any = None
        self._cache_told: list[str] = []
        settings = runtime.app.settings
        self._cleaner = ResultsCleaner(
            runtime.app.redis,
            runtime.app.keys,
            settings.results_dir,
            retention_seconds=settings.retention_days * 86_400,
        )

    def stop(self) -> None:
        """End after what is being done."""
        self._stop_event.set()

    def run(self) -> None:
        """Do the rounds, the first at once."""
        results_at = 0.0
        while True:
            now = time.monotonic()
            if now >= results_at:
                self._guarded("results", self._clean_results)
                self._guarded("parts", self._clean_parts)
                self._guarded("containers", self._remove_lost_containers)
                results_at = now + _about(RESULTS_SECONDS)
            self._guarded("cache", self._trim_cache)
            if self._stop_event.wait(_about(CACHE_SECONDS)):
                return

    def _guarded(self, what: str, duty: Any) -> None:
        try:
            duty()
        except RedisError as error:
            log.warning("housekeeping_not_done", what=what, cause=str(error))
        except (OSError, ArtifactError, subprocess.SubprocessError) as error:
            log.warning("housekeeping_failed", what=what, cause=str(error))
        except Exception:
            log.exception("housekeeping_stumbled", what=what)

    def _clean_results(self) -> None:
        with self._runtime.lock:
            running = tuple(self._runtime.running)
        self._cleaner.run(every_seconds=RESULTS_SECONDS * (1 - _JITTER), spare=running)

    def _clean_parts(self) -> None:
        settings = self._runtime.app.settings
        roots = [settings.results_dir]
        if (settings.store_url or "").startswith("file:"):
            roots.append(file_url_path(str(settings.store_url)))
        for root in roots:
            clean_store(root, every_seconds=RESULTS_SECONDS * (1 - _JITTER))
        clean_cache(settings.cache_dir)

    def _remove_lost_containers(self) -> None:
        """Remove the containers of attempts whose processes were all killed, this worker's or those of another."""
        settings = self._runtime.app.settings
        locks = settings.state_dir / LOCKS
        engine = find_engine(settings.container_engine).path if locks.is_dir() else None
        if engine is not None:
            remove_lost(
                engine, locks, lambda found, task: log.warning("lost_container_removed", container=found, task=task)
            )

    def _trim_cache(self) -> None:
        """Trim the cache if it has a limit and holds something else than the last time."""
        settings = self._runtime.app.settings
        limit = settings.model_cache_max_bytes
        if limit is None:
            return
        seen = _fingerprint(settings.cache_dir)
        if seen == self._cache_seen:
            return
        told = trim_cache(settings.cache_dir, limit)
        if told != self._cache_told:
            for text in told:
                log.info("model_cache", worker=self._runtime.worker_id, what=text)
        self._cache_told = told
        # While something is in use the cache may stay too large: then the next round tries again.
        self._cache_seen = None if told else seen


def trim_cache(cache_dir: Path, max_bytes: int) -> list[str]:
    """Trim a model cache by the executors' program, and return what it says. Raises OSError, SubprocessError."""
    path = python_path()
    environment = child_environment(os.environ, given={"PYTHONPATH": path} if path else {})
    argv = [sys.executable, "-P", "-m", "executors.models", "trim", "--json"]
    done = subprocess.run(
        [*argv, "--max-bytes", str(max_bytes), "--cache-dir", str(cache_dir)],
        check=False,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=environment,
        timeout=_TRIM_TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise OSError(f"the model cache cannot be trimmed: {done.stderr.decode('utf-8', 'replace').strip()[-300:]}")
    events = [parse_line(line) for line in done.stdout.splitlines()]
    return [str(event.data["message"]) for event in events if event.name == "worker" and event.data.get("message")]


def _fingerprint(cache_dir: Path) -> list[tuple[str, int]]:
    """Return what changes when an entry comes into the cache, or goes: cheap, two levels of folders."""
    seen = []
    for path in [*sorted(cache_dir.glob("*")), *sorted(cache_dir.glob("*/*"))]:
        if "locks" not in path.relative_to(cache_dir).parts:
            try:
                seen.append((str(path), path.lstat().st_mtime_ns))
            except OSError:
                continue
    return seen


def _about(seconds: float) -> float:
    return seconds * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311  (spreads, hides nothing)
