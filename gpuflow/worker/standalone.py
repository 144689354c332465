"""Runs one request by itself: a child behind a shim, as a worker starts it, without task, record or broker.

Called by `gpuflow executor run` and by the conformance suite. Nothing of the child is left when `run` returns.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpuflow.protocol import Event, Request, parse_line
from gpuflow.settings import Settings
from gpuflow.spec.units import duration_seconds
from gpuflow.worker.child import Child, ChildEnd
from gpuflow.worker.child_environment import child_environment, given_variables, python_path
from gpuflow.worker.confinement import UNCONFINED
from gpuflow.worker.containers.local import removal_of
from gpuflow.worker.engine_sockets import own_sockets
from gpuflow.worker.given_result import GivenResult, ResultLost, shown_piece
from gpuflow.worker.outcome import StopReason, cannot_start, failed, stopped, succeeded

_TICK_SECONDS: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a request ended: the result of a completed one, the error record of any other. `end` is that of its child."""

    completed: bool
    result: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    artifacts: tuple[str, ...] = ()
    end: ChildEnd | None = None


class Standalone:
    """One child for one request.

    `on_event` gets every event as it comes, lines of stderr as events `log` with `stream: stderr`. `deadline_seconds`
    is the limit of the whole run, `grace_seconds` the time from SIGTERM to SIGKILL.
    """

    def __init__(
        self,
        request: Request,
        *,
        environment: Mapping[str, str],
        argv: Sequence[str] = (sys.executable, "-P", "-m", "executors"),
        on_event: Callable[[Event], None] = lambda _: None,
        deadline_seconds: float | None = None,
        grace_seconds: float = 10.0,
    ) -> None:
        self._request = request
        self._environment = environment
        self._argv = argv
        self._on_event = on_event
        self._deadline_seconds = deadline_seconds
        self._grace_seconds = grace_seconds
        self._stop: StopReason | None = None
        self._at_once = False
        self._terminated = False
        self._kill_at = math.inf
        self._finish: Mapping[str, Any] = {}
        self._given = GivenResult(Path(request.output_dir))
        self._artifacts: list[str] = []

    def stop(self, reason: StopReason = "cancelled", *, at_once: bool = False) -> None:
        """Stop the child by SIGTERM, and after the grace by SIGKILL; `at_once` by SIGKILL now. The first reason counts.

        It takes effect within a moment; it only notes the wish, so a signal's handler may call it.
        """
        if self._stop is None:
            self._stop = reason
        self._at_once = self._at_once or at_once

    def run(self) -> Ended:
        """Run the child to its end. Its folders are made first. Raises OSError if they cannot be made."""
        output_dir = Path(self._request.output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        try:
            with own_sockets(self._environment, removal_of(self._request), UNCONFINED) as begun:
                child = Child(
                    self._argv,
                    request=self._request.to_json(),
                    environment=begun.environment,
                    cwd=output_dir,
                    at_end=begun.at_end,
                )
        except OSError as error:
            return Ended(completed=False, error=cannot_start(error))
        try:
            for kind, line in child.read(_TICK_SECONDS):
                if kind == "log":
                    data = {"message": line.decode("utf-8", "replace"), "stream": "stderr"}
                    self._on_event(Event(name="log", data=data, at=time.time()))
                elif kind == "event":
                    self._handle(parse_line(line))
                elif kind == "cut":
                    self._given.passed_over(line)
                    self._on_event(Event(name="log", data={"message": shown_piece(line)}, at=time.time()))
                self._enforce(child, started)
        except BaseException:
            child.kill()
            child.wait()
            raise
        return self._judge(child.wait(), time.monotonic() - started)

    def _handle(self, event: Event) -> None:
        if event.name == "finish":
            self._finish = event.data
        elif event.name == "result":
            self._given.told(event.data)
        elif event.name == "artifact":
            self._artifacts.append(str(event.data["path"]))
        self._on_event(event)

    def _enforce(self, child: Child, started: float) -> None:
        now = time.monotonic()
        if self._deadline_seconds is not None and now - started > self._deadline_seconds:
            self.stop("timeout")
        if self._stop is not None and not self._terminated:
            self._terminated = True
            self._kill_at = now + self._grace_seconds
            child.terminate()
        if now >= self._kill_at or (self._at_once and self._kill_at < math.inf):
            self._kill_at = math.inf
            child.kill()

    def _judge(self, end: ChildEnd, seconds: float) -> Ended:
        artifacts = tuple(dict.fromkeys(self._artifacts))
        if succeeded(self._finish, end):
            try:
                return Ended(completed=True, result=self._given.read(), artifacts=artifacts, end=end)
            except ResultLost as lost:
                return Ended(completed=False, error=lost.record(), artifacts=artifacts, end=end)
        stop = self._stop
        error = failed(self._finish, end) if stop is None else stopped(stop, seconds, self._deadline_seconds)
        return Ended(completed=False, error=error, artifacts=artifacts, end=end)


def environment_for(request: Request, settings: Settings) -> dict[str, str]:
    """Return the environment of a request's child, as a worker on this machine would make it.

    Its secrets are variables of this process. Where the request names no GPUs, it sees those that this process sees.
    """
    spec = request.spec
    given = given_variables(
        task_id=request.task_id,
        attempt=request.attempt,
        gpus=request.gpus,
        output_dir=Path(request.output_dir),
        checkpoint_dir=Path(request.checkpoint_dir or Path(request.output_dir) / "checkpoints"),
        resume_from=request.resume_from,
        model=spec.get("model"),
        results_dir=settings.results_dir,
        python_path=python_path(),
        executors=settings.executors,
    )
    if not request.gpus:
        for name in ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE"):
            del given[name]
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            given["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    return child_environment(
        os.environ,
        pass_env=settings.pass_env,
        requested=spec.get("env"),
        secrets={name: os.environ[name] for name in spec.get("secrets") or () if name in os.environ},
        offline=settings.offline,
        hub_login=True,
        given=given,
    )


def deadline_of(spec: Mapping[str, Any]) -> float | None:
    """Return the time limit of a spec in seconds; None for none."""
    return duration_seconds(spec["timeout"]) if spec.get("timeout") else None
