"""The task type `container`: an image in a container engine, or its preset as a plain process where there is none.

Both speak the event protocol on stdout. A one-off container ends as its `finish` event and its exit code say; one of a
preset with `mode: session` answers a request, here one that is started for it only (`executors.containers.session`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from executors import cancellation
from executors.base import Executor
from executors.containers.starting import Launch, launch_of, starter_of
from executors.programs.heard import Heard, check
from executors.programs.running import follow
from gpuflow.protocol import Emitter, Request
from gpuflow.spec.patterns import metric_pattern


class Container(Executor):
    """Runs `spec.container` and gives back its exit code, its metrics, and what it said."""

    task_types: ClassVar[tuple[str, ...]] = ("container",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Run the container or process to its end. Raises ExecutorError for one that cannot be run, or that fails."""
        output_dir = Path(request.output_dir)
        Path(request.checkpoint_dir or output_dir).mkdir(parents=True, exist_ok=True)
        output_dir.mkdir(parents=True, exist_ok=True)
        launch = launch_of(request, emitter)
        if launch.section["mode"] == "session":
            from executors.containers.session import answer_alone

            return answer_alone(launch, emitter)
        return _to_its_end(launch, emitter)


def _to_its_end(launch: Launch, emitter: Emitter) -> dict[str, Any]:
    """Run it once. Nothing of it is left then."""
    section = launch.section
    heard = Heard(emitter, {name: metric_pattern(text) for name, text in section["metrics"].items()})
    starter = starter_of(launch, emitter)
    with cancellation.notice_held(), starter.started() as program:
        ran = follow(
            program, on_stdout=heard.stdout, on_stderr=heard.stderr, timeout_seconds=section["timeout_seconds"]
        )
        starter.check_memory(ran.code)
    check(ran, heard, starter.kind)
    heard.close()
    return {
        **heard.value(Path(launch.request.output_dir)),
        "exit_code": ran.code,
        "metrics": heard.metrics,
        "output": heard.output(),
        **starter.how,
    }
