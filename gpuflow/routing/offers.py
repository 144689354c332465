"""What tasks ask to be run by, and what a worker offers to run: names that both sides write alike. Pure.

`inference` is a task type by whatever engine, `inference:vllm` by that engine alone, `inference@fast` in the
environment of that name. Code that a task brings (`policy.code`) is part of the name, as in `inference+remote-code`:
only a worker that allows it offers such a name. `inference~warm` is a replica of a served model (`gpuflow.serving`),
which keeps its session loaded: only a worker with sessions offers that. `function/my_team.jobs.embed` is a team's
function: a worker offers those that it was started with. A message carries the name of what it asks for
(`routing.affinity`), a worker takes those that it offers (`broker.gate.MessageFilter`), and `explain` tells what one
lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Self
from urllib.parse import quote, unquote

from gpuflow.policy.code import OF_MODELS, SETTING, kinds_of
from gpuflow.policy.secrets import NEVER, is_allowed
from gpuflow.protocol import FUNCTION_TYPE
from gpuflow.routing.session_names import SESSION_TYPES

#: What `engine` says where any will do.
ANY_ENGINE = "auto"
#: Engines that can keep a model loaded for many tasks.
WARM_ENGINES = frozenset({"vllm", "transformers"})
#: Task types without a choice of engines that sessions answer, where the task has a request to one.
WARM_TASK_TYPES = frozenset({"container"})
#: Field of a spec that makes its task a replica: the name of the served model. No template has it.
REPLICA_OF = "replicaOf"
#: What ends the name of what a replica asks for.
_WARM = "~warm"
#: What begins the name of a team's function.
_FUNCTION = "function/"
#: The task type that is code by itself, and those that bring none.
_COMMAND = "command"
_WITHOUT_CODE = frozenset({"echo", "container"})


@dataclass(frozen=True, kw_only=True)
class Lack:
    """Why something is not offered, as a clause, and the command that mends it; no `mend` where none does."""

    why: str
    mend: str = ""


@dataclass(frozen=True, kw_only=True)
class Offers:
    """The names that a worker takes, and why it does not take others that it knows."""

    names: frozenset[str] = frozenset()
    lacking: Mapping[str, Lack] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "names": sorted(self.names),
            "lacking": {name: [lack.why, lack.mend] for name, lack in sorted(self.lacking.items())},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read `to_dict()`."""
        lacking = {str(name): Lack(why=str(why), mend=str(mend)) for name, (why, mend) in data["lacking"].items()}
        return cls(names=frozenset(map(str, data["names"])), lacking=lacking)


def offer_name(task_type: str, *, engine: str | None = None, environment: str | None = None) -> str:
    """Return the name of a task type by an engine, or in an environment; by any, where neither is given."""
    if environment:
        return f"{task_type}@{environment}"
    return f"{task_type}:{engine}" if engine and engine != ANY_ENGINE else task_type


def asked_name(spec: Mapping[str, Any]) -> str:
    """Return the name of what a canonical spec asks for."""
    if spec.get("taskType") == FUNCTION_TYPE:
        return function_name(str((spec.get("function") or {}).get("name") or ""))
    engine, environment = spec.get("engine"), spec.get("environment")
    name = offer_name(str(spec["taskType"]), engine=engine, environment=environment)
    name = "+".join([name, *(kind for kind in kinds_of(spec) if kind != _COMMAND)])
    return name + _WARM if spec.get(REPLICA_OF) else name


def function_name(task: str) -> str:
    """Return the name of a team's function, by that of its Celery task."""
    # What divides the other names, a Celery task's may have in it.
    return f"{_FUNCTION}{quote(task, safe='').replace('~', '%7E')}"


def is_function(name: str) -> bool:
    """Say whether a name is that of a team's function."""
    return name.startswith(_FUNCTION)


def is_replica(name: str) -> bool:
    """Say whether a name is that of what a replica of a served model asks for."""
    return name.endswith(_WARM)


def without_replica(name: str) -> str:
    """Return the name that tasks have whose session a replica keeps loaded."""
    return name.removesuffix(_WARM)


def with_replicas(offers: Offers, keeps_warm: Callable[[str], bool]) -> Offers:
    """Return what is offered where sessions are kept: `offers`, and replicas of what can be kept loaded."""
    names = {name for name in offers.names if task_type_of(name) in SESSION_TYPES and keeps_warm(name)}
    return Offers(names=offers.names | {name + _WARM for name in names}, lacking=offers.lacking)


def code_asked(name: str) -> tuple[str, ...]:
    """Return the kinds of code that a name asks a worker to allow."""
    own = (_COMMAND,) if task_type_of(name) == _COMMAND else ()
    return (*own, *without_replica(name).split("+")[1:])


def secrets_asked(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the secrets that a spec asks a worker for, sorted, each once.

    Without those that no worker gives: they wait for nobody, and the first worker refuses them.
    """
    named = spec.get("secrets")
    names = {name for name in named if isinstance(name, str)} if isinstance(named, list | tuple) else set()
    return tuple(sorted(name for name in names if not is_allowed(name, NEVER)))


def not_offered(secrets: Collection[str], offered: Collection[str]) -> str:
    """Return which secrets a worker that offers some lacks, as a clause; "" for none."""
    lacking = [name for name in secrets if name not in offered]
    if not lacking:
        return ""
    first = lacking[0]
    return (
        f"offers tasks no secret {' and no '.join(lacking)}; a file {first} in its GPUFLOW_SECRETS_DIR, "
        f"GPUFLOW_SECRET_{first}, or the variable {first} with GPUFLOW_ALLOW_SECRETS={first} on a worker would"
    )


def without_code(name: str) -> str:
    """Return a name without the code that it asks for, and without that it is of a replica."""
    return without_replica(name).partition("+")[0]


def with_code(offers: Offers, allowed: Collection[str]) -> Offers:
    """Return what is offered where these kinds of code are allowed: `offers`, and the names with such code."""
    models = [kind for kind in OF_MODELS if kind in allowed]
    names, lacking = set(), dict(offers.lacking)
    for name in offers.names:
        kinds = [kind for kind in ("project",) if kind in allowed] if task_type_of(name) == _COMMAND else models
        if task_type_of(name) == _COMMAND and _COMMAND not in allowed:
            lacking[name] = Lack(why=not_allowed(name, allowed))
            continue
        if task_type_of(name) in _WITHOUT_CODE:
            kinds = []
        names |= {"+".join([name, *some]) for count in range(len(kinds) + 1) for some in combinations(kinds, count)}
    return Offers(names=frozenset(names), lacking=lacking)


def not_allowed(name: str, allowed: Collection[str]) -> str:
    """Return what a worker that allows these kinds lacks for a name, as a clause; "" for nothing."""
    lacking = [kind for kind in code_asked(name) if kind not in allowed]
    if not lacking:
        return ""
    setting = f"{SETTING}={','.join(sorted({*allowed, *lacking}))}"
    return f"allows tasks no {' and no '.join(lacking)}; {setting} on a worker would"


def parts_of(name: str) -> tuple[str, str | None, str | None]:
    """Return the task type of a name, with the engine or the environment that it has."""
    rest, _, environment = without_code(name).partition("@")
    task_type, _, engine = rest.partition(":")
    return task_type, engine or None, environment or None


def task_type_of(name: str) -> str:
    """Return the task type of a name."""
    return parts_of(name)[0]


def in_words(name: str) -> str:
    """Return a name for people."""
    name = without_code(name)
    if is_function(name):
        return f"function {unquote(name.removeprefix(_FUNCTION))}"
    task_type, by_engine, engine = name.partition(":")
    if by_engine:
        return f"{task_type} by engine {engine}"
    task_type, in_environment, environment = name.partition("@")
    return f"{task_type} in environment {environment}" if in_environment else name
