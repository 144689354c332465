"""Runs of an executor as requests of one session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuflow.protocol import Event
from gpuflow.worker.standalone import Ended
from tests.conformance.runs import Run, Runs
from tests.fixtures.session_child import SessionChild


class SessionRuns(Runs):
    """Requests of one session that is warm. Nothing happens to its process: there are no faults."""

    session: SessionChild

    def of(self, name: str, spec: Mapping[str, Any], fault: str = "", **_: Any) -> Run:
        if name not in self.done:
            self.done[name] = self._asked(name, spec)
        return self.done[name]

    def _asked(self, name: str, spec: Mapping[str, Any]) -> Run:
        folder = self.folder / name
        request = {
            "task_id": name,
            "task_type": self.provider.task_type,
            "spec": {"taskType": self.provider.task_type, **spec},
            "output_dir": str(folder),
        }
        self.session.send("run", id=name, request=request)
        finish = self.session.until("finish", name)
        told = self.session.of(name)
        ended = Ended(
            completed=finish["status"] == "completed",
            result=next((one["value"] for one in told if one["event"] == "result"), {}),
            error=finish.get("error"),
            artifacts=tuple(one["path"] for one in told if one["event"] == "artifact"),
            end=None,
        )
        events = [Event(name=one["event"], data=one) for one in told]
        return Run(events=events, ended=ended, folder=folder)
