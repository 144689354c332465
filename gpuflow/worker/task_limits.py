"""Which of a task's declared memory and CPUs this worker holds it to, and by what; what stands of it in the result.

One `TaskLimits` for the worker, one `LimitPlan` for each attempt. GPUFLOW_TASK_LIMITS chooses (`docs/howto/limits.md`):
a group of cgroup v2 holds the whole task; a limit of the address space holds each of its processes, and memory only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gpuflow.errors import GPUFlowError
from gpuflow.logs import get_logger
from gpuflow.routing.requirement import Requirement
from gpuflow.settings import Settings
from gpuflow.worker.cgroups import Cgroups, NoCgroups, TaskGroup, find_cgroups

log = get_logger("gpuflow.limits")

#: `container`: the engine holds the container to what the task and its preset ask for.
HeldBy = Literal["cgroup", "address-space", "container", "none"]
#: What runs an attempt: a child of its own, a request to a warm session, the client of a container.
Runner = Literal["child", "session", "container"]

_OFF: Final = "GPUFLOW_TASK_LIMITS is none"
_SESSION: Final = "a warm session answers it, which serves many tasks"
_NO_CPU: Final = "the worker's cgroup has no cpu controller"
_ADDRESS_SPACE: Final = "an address-space limit holds memory only, of each process"


@dataclass(kw_only=True)
class LimitPlan:
    """The limits of one attempt. `declared` and `enforced` have the keys `memoryMib` and `cpus`; `why` names what is
    declared and not enforced.
    """

    by: HeldBy = "none"
    declared: Mapping[str, float] = field(default_factory=dict)
    enforced: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    group: TaskGroup | None = None
    #: The attempt fails rather than run without its group.
    is_strict: bool = False
    _cgroups: Cgroups | None = None

    def begin(self, name: str) -> None:
        """Make the group of the attempt, where it is to have one. Raises OSError where it must have it."""
        if self.by != "cgroup" or self._cgroups is None or not self.enforced:
            return
        memory, cpus = self.enforced.get("memoryMib"), self.enforced.get("cpus")
        try:
            self.group = self._cgroups.make(name, memory_mib=None if memory is None else int(memory), cpus=cpus)
        except OSError as error:
            if self.is_strict:
                raise
            log.warning("limits_not_enforced", cause=str(error))
            self.by, self.enforced, self.why = "none", {}, f"no cgroup: {error}"

    @property
    def resource_limits(self) -> dict[str, int]:
        """Resource limits of each process, by their names in the module `resource`."""
        memory = self.enforced.get("memoryMib") if self.by == "address-space" else None
        return {} if memory is None else {"RLIMIT_DATA": int(memory) << 20}

    def address_space_mib(self, other_bytes: int | None) -> float | None:
        """Return what each process is held to, unless a limit of others, in bytes, is lower and was hit before."""
        memory = self.enforced.get("memoryMib") if self.by == "address-space" else None
        return None if memory is None or (other_bytes is not None and other_bytes >> 20 <= memory) else memory

    def report(self) -> dict[str, Any]:
        """Return what stands in the result: empty for a task that declares nothing."""
        if not self.declared:
            return {}
        told: dict[str, Any] = {"declared": dict(self.declared), "enforced": dict(self.enforced), "by": self.by}
        if self.why:
            told["why"] = self.why
        end = self.group.end if self.group is not None else None
        if end is not None and end.peak_bytes is not None:
            told["peakMemoryMib"] = end.peak_bytes >> 20
        return {"limits": told}


@dataclass(frozen=True, kw_only=True)
class TaskLimits:
    """What this worker can hold its tasks to. `why` says what is in the way of more."""

    by: Literal["cgroup", "address-space", "none"] = "none"
    why: str = ""
    cgroups: Cgroups | None = None
    is_strict: bool = False

    def plan(
        self, asked: Requirement | None, runner: Runner = "child", by_engine: Mapping[str, float] | None = None
    ) -> LimitPlan:
        """Return the limits of an attempt that asks for this much; `by_engine`: what a container's engine holds."""
        declared: dict[str, float] = {}
        if asked is not None and asked.memory_mib:
            declared["memoryMib"] = asked.memory_mib
        if asked is not None and asked.cpu:
            declared["cpus"] = asked.cpu
        if not declared:
            return LimitPlan()
        if runner == "container":
            held = {name: by_engine[name] for name in declared if by_engine and name in by_engine}
            return LimitPlan(by="container" if held else "none", declared=declared, enforced=held)
        if runner == "session":
            return LimitPlan(declared=declared, why=_SESSION)
        if self.by == "cgroup" and self.cgroups is not None:
            kept = {name: much for name, much in declared.items() if name != "cpus" or self.cgroups.holds_cpu}
            why = "" if kept == declared else _NO_CPU
            return LimitPlan(
                by="cgroup" if kept else "none", declared=declared, enforced=kept, why=why, is_strict=self.is_strict,
                _cgroups=self.cgroups,
            )  # fmt: skip
        if self.by == "address-space" and "memoryMib" in declared:
            kept = {"memoryMib": declared["memoryMib"]}
            return LimitPlan(by="address-space", declared=declared, enforced=kept, why=_ADDRESS_SPACE)
        return LimitPlan(declared=declared, why=_ADDRESS_SPACE if self.by == "address-space" else self.why)

    def to_dict(self) -> dict[str, str]:
        """Return it for the registry."""
        return {"by": self.by, "why": self.why}


def limits_of(settings: Settings) -> TaskLimits:
    """Return what this worker holds its tasks to, and say so where it is less than was asked for.

    Call it once, before the first child. Raises GPUFlowError where GPUFLOW_TASK_LIMITS=cgroup cannot be kept.
    """
    mode = settings.task_limits
    if mode == "none":
        return TaskLimits(why=_OFF)
    try:
        cgroups = find_cgroups(settings.cgroup)
    except (NoCgroups, OSError) as error:
        why = f"no cgroup: {error}"
    else:
        log.info("limits", by="cgroup", folder=str(cgroups.parent), cpu=cgroups.holds_cpu)
        why = "" if cgroups.holds_cpu else _NO_CPU
        return TaskLimits(by="cgroup", why=why, cgroups=cgroups, is_strict=mode == "cgroup")
    if mode == "cgroup":
        raise GPUFlowError(f"GPUFLOW_TASK_LIMITS is cgroup, and this worker has {why}")
    if mode == "address-space":
        log.warning("limits_by_address_space", cause=why)
        return TaskLimits(by="address-space", why=why)
    log.warning("limits_not_enforced", cause=why)
    return TaskLimits(why=why)
