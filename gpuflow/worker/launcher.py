"""Launches what an attempt runs: a child of its own, or a request to a warm session, which its first task begins.

Called by the supervisor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuflow.errors import NotAllowed
from gpuflow.fleet.gpu_locks import Hold
from gpuflow.protocol import FUNCTION_TYPE
from gpuflow.routing.offers import REPLICA_OF, WARM_ENGINES, WARM_TASK_TYPES
from gpuflow.worker.child import Child, RunningWork
from gpuflow.worker.child_python import ChildPython
from gpuflow.worker.child_user import hand_over
from gpuflow.worker.confinement import Confinement, of_attempt
from gpuflow.worker.containers.local import removal_of
from gpuflow.worker.engine_sockets import own_sockets
from gpuflow.worker.outcome import HandedBack
from gpuflow.worker.preparation import PreparedAttempt
from gpuflow.worker.runtime import Runtime
from gpuflow.worker.sessions.opening import function_opening, opening_of, serves_one_owner, warm_call
from gpuflow.worker.slots import Allocation
from gpuflow.worker.task_limits import LimitPlan, Runner
from gpuflow.worker.task_owner import OWNER

_NONE = Hold(())


def hold_of(runtime: Runtime, tag: str, allocation: Allocation | None) -> Hold:
    """Return the GPUs on which a task runs: its own, or those of the session that answers it. Raises HandedBack."""
    sessions = runtime.admission.sessions
    if allocation is not None and allocation.session and sessions is not None:
        return sessions.hold_of(tag) or _NONE
    return (allocation.hold if allocation is not None else None) or _NONE


def launcher_of(
    runtime: Runtime,
    tag: str,
    allocation: Allocation | None,
    python: ChildPython,
    prepared: PreparedAttempt,
    *,
    owner: Callable[[], str],
    plan: LimitPlan | None = None,
    alone: bool = False,
) -> Callable[[], RunningWork]:
    """Return what launches the work of one attempt. It raises OSError when that cannot be, and HandedBack.

    `owner` tells whose it is, `plan` is what a child of its own is held to. With `alone`, a warm session answers it by
    itself.
    """
    sessions = runtime.admission.sessions
    if sessions is None or allocation is None or not allocation.session:
        if prepared.request.spec.get(REPLICA_OF):
            raise HandedBack("this worker keeps no model of its kind loaded any more")
        return lambda: _own_child(allocation, python, prepared, plan or LimitPlan())
    of_function = prepared.request.task_type == FUNCTION_TYPE
    if not of_function and python.engine not in WARM_ENGINES and prepared.request.task_type not in WARM_TASK_TYPES:
        raise HandedBack("its environment has changed since it was taken")
    bound = owner() if serves_one_owner(prepared.settings, prepared.request.spec) else None
    if bound == OWNER and prepared.request.spec.get(REPLICA_OF):
        raise NotAllowed(
            "the model is served for all owners, and this worker keeps what one owner's tasks load from the others "
            "(GPUFLOW_ISOLATE, or code that the model brings); serve it for one: gpuflow serve MODEL --owner OWNER",
            setting="GPUFLOW_ISOLATE",
        )
    if of_function:
        opening, request = function_opening(python, prepared, owner=bound), warm_call(prepared.request)
    else:
        opening, request = opening_of(python, prepared, owner=bound, worker_id=runtime.worker_id), prepared.request

    def ask() -> RunningWork:
        if opening.confinement.user is not None:  # the folders of a session of containers stay the worker's
            hand_over(prepared.settings, prepared.output_dir)
        return sessions.ask(tag, request, opening, alone=alone)

    return ask


def runner_of(runtime: Runtime, allocation: Allocation | None, prepared: PreparedAttempt) -> Runner:
    """Return what runs the attempt."""
    if prepared.request.task_type == "container":
        section = prepared.request.spec.get("container")
        return "container" if isinstance(section, Mapping) and not section.get("no_engine") else "child"
    return "session" if runtime.admission.sessions is not None and allocation and allocation.session else "child"


def limits_by_engine(prepared: PreparedAttempt) -> dict[str, float]:
    """Return the memory in MiB and the CPUs that the engine holds a container to: no more than its preset has."""
    section = prepared.request.spec.get("container")
    if not isinstance(section, Mapping):
        return {}
    memory, cpus = section.get("memory_bytes"), section.get("cpus")
    held = {"memoryMib": None if memory is None else memory / (1 << 20), "cpus": cpus}
    return {name: amount for name, amount in held.items() if amount is not None}


def _own_child(allocation: Allocation | None, python: ChildPython, prepared: PreparedAttempt, plan: LimitPlan) -> Child:
    request = prepared.request
    confinement = of_attempt(prepared.settings, request, prepared.environment, python.use.python)
    plan.begin(f"{request.task_id}.{request.attempt}")
    confinement = replace(confinement, limits=_lowest(confinement.limits, plan.resource_limits), group=plan.group)
    try:
        return _begun(allocation, python, prepared, confinement)
    except BaseException:
        if plan.group is not None:
            plan.group.close()
        raise


def _lowest(limits: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return {name: min(each[name] for each in (limits, others) if name in each) for name in {**limits, **others}}


def _begun(
    allocation: Allocation | None, python: ChildPython, prepared: PreparedAttempt, confinement: Confinement
) -> Child:
    hold = allocation.hold if allocation is not None else None
    if confinement.user is not None:
        hand_over(prepared.settings, prepared.output_dir)
    talks = prepared.request.task_type == FUNCTION_TYPE
    with own_sockets(prepared.environment, removal_of(prepared.request), confinement) as started:
        return Child(
            python.argv,
            request=prepared.request.to_json() + ("\n" if talks else ""),
            environment=started.environment,
            cwd=prepared.output_dir,
            keep_open=hold.fds if hold is not None else (),
            at_end=started.at_end,
            talks=talks,
            confinement=confinement,
        )
