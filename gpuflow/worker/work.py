"""What an attempt runs: a child of its own, or a request to a warm session, which its first task begins.

Called by the supervisor.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuflow.worker.child import Child, Work
from gpuflow.worker.preparation import Prepared
from gpuflow.worker.runtime import Runtime
from gpuflow.worker.sessions.opening import WARM_ENGINES, opening_of
from gpuflow.worker.slots import Allocation
from gpuflow.worker.starting import Start


def gpus_of(runtime: Runtime, tag: str, allocation: Allocation | None) -> tuple[str, ...]:
    """Return the GPUs on which a task runs: its own, or those of the session that answers it."""
    sessions = runtime.admission.sessions
    if allocation is not None and allocation.slot == "request" and sessions is not None:
        return sessions.gpus_of(tag)
    return allocation.gpus if allocation is not None else ()


def begin_of(
    runtime: Runtime, tag: str, allocation: Allocation | None, start: Start, prepared: Prepared
) -> Callable[[], Work]:
    """Return what begins the work of one attempt. It raises OSError when that cannot be."""
    admission = runtime.admission
    sessions = admission.sessions
    if sessions is None or allocation is None or not allocation.session or start.engine not in WARM_ENGINES:
        return lambda: _own_child(allocation, start, prepared)
    opening = opening_of(allocation.session, start, prepared)

    def begin() -> Work:
        if allocation.slot == "job":
            sessions.open(opening, tag, admission.hand_over(tag))
        return sessions.ask(tag, prepared.request, opening.variables)

    return begin


def _own_child(allocation: Allocation | None, start: Start, prepared: Prepared) -> Child:
    hold = allocation.hold if allocation is not None else None
    return Child(
        start.argv,
        request=prepared.request.to_json(),
        environment=prepared.environment,
        cwd=prepared.output_dir,
        keep_open=hold.fds if hold is not None else (),
    )
