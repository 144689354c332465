"""In which environment a task runs, and so by which engine: one pure choice, of what stands on a machine.

Called by the worker, at its start for what it offers and before each child, and by `gpuflow explain` and `executor`.
How environments stand is read in `gpuflow.environments.states`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuflow.environments.definition import DEFAULT
from gpuflow.routing.offers import ANY_ENGINE, Lack, Offers, offer_name
from gpuflow.spec.sections import is_used


@dataclass(frozen=True, kw_only=True)
class State:
    """How an environment stands on this machine for children with, or without, GPUs.

    `serves` are the task types that it is for, `ready` those of them that can run now; `works` says whether any child
    can. `own` is one of the user's. `lack` tells what keeps it, or the rest of its task types, from running.
    """

    name: str
    engine: str = ""
    serves: frozenset[str] = frozenset()
    ready: frozenset[str] = frozenset()
    works: bool = False
    own: bool = False
    lack: Lack = field(default_factory=lambda: Lack(why="is not built"))


@dataclass(frozen=True, kw_only=True)
class ChosenEnvironment:
    """The environment that a task runs in, and the engine there; "" for a task type that has no choice of engines."""

    environment: str
    engine: str = ""


def choose(
    states: Sequence[State], task_type: str, *, engine: str | None = None, environment: str | None = None
) -> ChosenEnvironment | Lack:
    """Choose the environment of a task, or say what is lacking.

    One that is named by `environment` is the only one. Else it is one that serves the task type, the special ones
    before `default`; of the user's own, where no shipped one serves it; and `default` for what none serves. `engine`
    other than auto leaves only environments of that engine: nothing stands in for it.
    """
    found = _candidates(states, task_type, engine, environment)
    served = any(task_type in state.serves for state in states)
    for state in found:
        if task_type in state.ready or (state.works and (not served or _is_free(state, task_type))):
            return ChosenEnvironment(
                environment=state.name, engine=state.engine if is_used("engine", task_type) else ""
            )
    return _lack(found, task_type, engine, environment)


def _is_free(state: State, task_type: str) -> bool:
    """Whether an environment that a task names may run what it was not made for: one of the user's own."""
    return state.own and task_type not in state.serves


def _candidates(
    states: Sequence[State], task_type: str, engine: str | None, environment: str | None
) -> Sequence[State]:
    if environment:
        return [state for state in states if state.name == environment]
    serving = [state for state in states if task_type in state.serves]
    shipped = [state for state in serving if not state.own]
    found = shipped or serving or [state for state in states if state.name == DEFAULT]
    if engine and engine != ANY_ENGINE:
        found = [state for state in found if state.engine == engine]
    return sorted(found, key=lambda state: (state.name == DEFAULT, state.name))


def _lack(found: Sequence[State], task_type: str, engine: str | None, environment: str | None) -> Lack:
    if not found and environment:
        return Lack(why=f"there is no environment {environment}; {environment}.yaml in GPUFLOW_ENV_DIR would define it")
    if not found:
        return Lack(why=f"no environment runs {task_type} by engine {engine}")
    broken = [state for state in found if not state.works or task_type in state.serves]
    if not broken:
        return Lack(why=f"environment {found[0].name} does not serve {task_type}")
    whys = ", ".join(f"environment {state.name} {state.lack.why}" for state in broken)
    return Lack(why=whys, mend=" or ".join(state.lack.mend for state in broken if state.lack.mend))


def offers_of(states: Sequence[State], task_types: Mapping[str, str | None]) -> Offers:
    """Return what is offered of some task types; each with the environment that its executor names, if it does."""
    names: set[str] = set()
    lacking: dict[str, Lack] = {}
    for task_type, named in task_types.items():
        engines = {state.engine for state in states if task_type in state.serves and is_used("engine", task_type)}
        asks: list[tuple[str, ChosenEnvironment | Lack]] = [(task_type, choose(states, task_type, environment=named))]
        asks += [
            (offer_name(task_type, engine=engine), choose(states, task_type, engine=engine, environment=named))
            for engine in sorted(engines - {""})
        ]
        asks += [
            (offer_name(task_type, environment=state.name), choose(states, task_type, environment=state.name))
            for state in states
        ]
        for name, answer in asks:
            if isinstance(answer, ChosenEnvironment):
                names.add(name)
            else:
                lacking[name] = answer
    return Offers(names=frozenset(names), lacking=lacking)
