"""By which Python a child is started, in which environment and with which engine: of what stands on this machine.

Called by the supervisor and by `gpuflow executor run`. The choice itself is `gpuflow.environments.choice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuflow.environments import ChosenEnvironment, Ready, Snapshot, choose
from gpuflow.errors import GPUFlowError
from gpuflow.routing.offers import asked_name, in_words


class EnvironmentNotReady(GPUFlowError):
    """The environment that a task is to run in does not work on this worker; another one may have it."""


@dataclass(frozen=True, kw_only=True)
class ChildPython:
    """How a child is started. `engine` is "" for a task type that has no choice of engines."""

    use: Ready
    engine: str = ""

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line of the child."""
        return (str(self.use.python), "-P", "-m", "executors")

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a child: those of the environment, over them `given`, and what tells its choice."""
        ours = {"GPUFLOW_ENVIRONMENT": self.use.name}
        if self.engine:
            ours["GPUFLOW_ENGINE"] = self.engine
        if self.use.python_path:
            ours["PYTHONPATH"] = self.use.python_path
        return {**self.use.variables, **given, **ours}


def python_of(spec: Mapping[str, Any], stands: Snapshot, *, named: str | None = None) -> ChildPython:
    """Return how the child of a canonical spec is started; `named` is the environment that a user's executor names.

    Raises EnvironmentNotReady with the command that mends it.
    """
    wanted = spec.get("environment") or named
    answer = choose(stands.states, str(spec["taskType"]), engine=spec.get("engine"), environment=wanted)
    what = in_words(asked_name(spec))
    if not isinstance(answer, ChosenEnvironment):
        mend = f"; run {answer.mend} on this machine" if answer.mend else ""
        raise EnvironmentNotReady(f"{what} cannot run on this worker: {answer.why}{mend}")
    use = stands.usable[answer.environment]
    if not use.python.exists():
        raise EnvironmentNotReady(
            f"{what} cannot start: {use.python} of environment {use.name} has gone; "
            f"run `gpuflow env create {use.name} --force` on this machine"
        )
    return ChildPython(use=use, engine=answer.engine)
