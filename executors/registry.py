"""Which class runs which task type: gpuflow's own, and those that users register (`gpuflow.spec.user_types`).

The class is imported when it is asked for, so a light task stays light. As a program, `python -m executors.registry
[TASK_TYPE...]`, it imports them and prints what it found as JSON, for `gpuflow executor`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from executors.base import Executor, ExecutorError
from gpuflow.importing import load
from gpuflow.protocol import Emitter, is_user_type

if TYPE_CHECKING:
    from gpuflow.spec.user_types import Registration

#: Task type -> "module:Class".
EXECUTORS: Final[Mapping[str, str]] = {
    "echo": "executors.echo:Echo",
    "inference": "executors.inference:Inference",
    "embedding": "executors.embedding:Embedding",
    "sft": "executors.sft:SupervisedTuning",
    "lora_sft": "executors.sft:SupervisedTuning",
    "dpo": "executors.dpo:PreferenceTuning",
    "reward": "executors.reward:RewardTuning",
    "grpo": "executors.grpo:GroupTuning",
    "ppo": "executors.ppo:PolicyTuning",
    "command": "executors.command:Command",
    "container": "executors.container:Container",
    "rag": "executors.rag:Rag",
}

#: The same for a child that was started for vLLM, which the worker says in this variable.
_ENGINE: Final = "GPUFLOW_ENGINE"
_ON_VLLM: Final[Mapping[str, str]] = dict.fromkeys(("inference", "embedding"), "executors.sessions.alone:OneShotVllm")


def find(task_type: str) -> Executor:
    """Return an executor for a task type.

    Raises ExecutorError: UnknownTaskType, MissingDependency when its libraries are not installed here, BadExecutor for
    a user's that is none.
    """
    place = _place(task_type)
    if place is not None:
        module, _, name = place.partition(":")
        executor: Executor = getattr(load(module), name)()
        return executor
    if not is_user_type(task_type):
        raise ExecutorError(
            "UnknownTaskType", f"no executor runs task type {task_type!r}; there are: {', '.join(EXECUTORS)}"
        )
    return _load(_registration(task_type))()


def _place(task_type: str) -> str | None:
    if task_type in _ON_VLLM and os.environ.get(_ENGINE) == "vllm":
        return _ON_VLLM[task_type]
    return EXECUTORS.get(task_type)


def _registration(task_type: str) -> Registration:
    from gpuflow.spec.user_types import VARIABLE, entries_of, registered, usable

    entries = entries_of(os.environ.get(VARIABLE, ""))
    found = usable(entries).get(task_type)
    if found is None:
        problems = [one.problem for one in registered(entries) if one.task_type == task_type and one.problem]
        raise ExecutorError(
            "UnknownTaskType",
            problems[0]
            if problems
            else f"no executor is registered for task type {task_type!r}; install its package beside the worker, or "
            f"name it in {VARIABLE} ({task_type}=module:Class)",
        )
    return found


def _load(found: Registration) -> type[Executor]:
    """Import the class of a user's executor. Raises ExecutorError."""
    import inspect

    where, _, name = found.place.rpartition(":")
    try:
        module = _file(Path(where)) if where.endswith(".py") else import_module(where)
        kind = getattr(module, name)
    except ModuleNotFoundError as error:
        raise ExecutorError(
            "MissingDependency", f"{found.place} of {found.task_type} cannot be imported: {error}; install it there"
        ) from error
    except (Exception, SystemExit) as error:
        raise _bad(found, f"cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(kind, type) or not issubclass(kind, Executor) or inspect.isabstract(kind):
        raise _bad(found, "is no class that derives from executors.base.Executor and has a method run")
    if found.task_type not in getattr(kind, "task_types", ()):
        raise _bad(found, f"does not name {found.task_type} in its task_types")
    return kind


def _bad(found: Registration, why: str) -> ExecutorError:
    return ExecutorError(
        "BadExecutor", f"{found.place} of {found.task_type} {why}; mend it, `gpuflow executor list` checks it"
    )


def _file(path: Path) -> ModuleType:
    """Import a file by its path; it may import its neighbours."""
    name = f"gpuflow_user_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ModuleNotFoundError(f"there is no file {path}")
    sys.path.append(str(path.parent))
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def describe(only: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return every executor of this environment with what is wrong with it, gpuflow's own first.

    With `only`, those of these task types; no other is imported.
    """
    from gpuflow.spec.user_types import VARIABLE, entries_of, registered

    known = [(task_type, place, "gpuflow", "") for task_type, place in EXECUTORS.items()]
    known += [
        (one.task_type, one.place, one.package or one.source, one.problem)
        for one in registered(entries_of(os.environ.get(VARIABLE, "")))
    ]
    return [_described(*one) for one in known if not only or one[0] in only]


def _described(task_type: str, place: str, source: str, problem: str) -> dict[str, Any]:
    import inspect

    kind: type[Executor] | None = None
    if not problem:
        try:
            kind = type(find(task_type))
        except ExecutorError as error:
            problem = error.message
        except (Exception, SystemExit) as error:  # noqa: BLE001  (what any executor raises is what is asked for)
            problem = f"{type(error).__name__}: {error}"
    return {
        "task_type": task_type,
        "place": place,
        "source": source,
        "environment": getattr(kind, "environment", None),
        "about": next(iter((inspect.getdoc(kind) or "").splitlines()), "") if kind else "",
        "problem": problem,
    }


if __name__ == "__main__":
    told = Emitter.claim_stdout()  # what an executor prints at its import goes to stderr
    told.result({"executors": json.loads(json.dumps(describe(sys.argv[1:]), default=str))})
