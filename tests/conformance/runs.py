"""Runs of one executor, each at most once: several cases look at the same run."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gpuflow.protocol import Event, Request
from gpuflow.settings import Settings
from gpuflow.worker.standalone import Ended, Standalone, environment_for
from tests.conformance.faulty_child import AT_ONCE, HANGING
from tests.conformance.providers import Provider
from tests.gate import leftovers
from tests.support.waiting import promised

_CHILD = Path(__file__).with_name("faulty_child.py")
#: From SIGTERM to SIGKILL where a child is to end by itself: no limit that a busy machine could break.
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is over, and of which no process is left: its events, and how it ended."""

    events: list[Event]
    ended: Ended
    folder: Path

    @property
    def exit_code(self) -> int | None:
        return self.ended.end.exit_code if self.ended.end else None

    @property
    def error(self) -> Mapping[str, Any]:
        assert not self.ended.completed, "it completed"
        return self.ended.error or {}

    def named(self, name: str) -> list[dict[str, Any]]:
        return [dict(event.data) for event in self.events if event.name == name]


@dataclass
class Runs:
    """All runs of one executor."""

    provider: Provider
    folder: Path
    model: Path
    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)
    done: dict[str, Run] = field(default_factory=dict)

    def good(self) -> Mapping[str, Any]:
        return self.provider.good(self.model)

    def bad(self) -> Mapping[str, Any]:
        return self.provider.bad(self.model)

    def of(
        self,
        name: str,
        spec: Mapping[str, Any],
        fault: str = "",
        *,
        stop_at: Callable[[Event], bool] | None = None,
        deadline_seconds: float | None = None,
        grace_seconds: float = _PATIENCE_SECONDS,
    ) -> Run:
        """Return the run of this name, which is made the first time. `stop_at` says at which event it is stopped."""
        if name not in self.done:
            self.done[name] = self._run(name, spec, fault, stop_at, deadline_seconds, grace_seconds)
        return self.done[name]

    def _struck_at(self, fault: str) -> str:
        """Return the event at which a fault strikes: in the middle of the work.

        What ends a process at once is the same for any code of an executor: a large library is not loaded for it.
        """
        early = self.provider.needs_ml or self.provider.in_threads
        return "worker" if early and fault in AT_ONCE else "progress"

    def _run(
        self,
        name: str,
        spec: Mapping[str, Any],
        fault: str,
        stop_at: Callable[[Event], bool] | None,
        deadline_seconds: float | None,
        grace_seconds: float,
    ) -> Run:
        request = Request(
            task_id=f"conformance-{uuid.uuid4().hex}",
            task_type=self.provider.task_type,
            spec={"taskType": self.provider.task_type, **spec},
            output_dir=str(self.folder / name),
            checkpoint_dir=str(self.folder / name / "checkpoints"),
            cache_dir=str(self.folder / "cache"),
        )
        environment = environment_for(request, Settings(pass_env=(leftovers.VARIABLE,)))
        environment |= {"CUDA_VISIBLE_DEVICES": "", **self.provider.environment, **self.variables}
        events: list[Event] = []

        def on_event(event: Event) -> None:
            events.append(event)
            if stop_at is not None and stop_at(event):
                runner.stop("timeout" if fault == "hang" else "cancelled")

        runner = Standalone(
            request,
            environment=environment,
            argv=[self.python, "-P", str(_CHILD), *([fault, self._struck_at(fault)] if fault else [])],
            on_event=on_event,
            deadline_seconds=deadline_seconds,
            grace_seconds=grace_seconds,
        )
        ended = runner.run()
        left = _processes_of(request.task_id)
        promised(not left, f"processes {left} of the run {name!r} are left")
        return Run(events=events, ended=ended, folder=Path(request.output_dir))


def _processes_of(task_id: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TASK_ID") == task_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def at_progress(event: Event) -> bool:
    return event.name == "progress"


def when_hanging(event: Event) -> bool:
    return event.name == "log" and event.data.get("message") == HANGING
