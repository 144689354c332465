"""What the child of a task may not do on this worker, by the settings: limits, another user, a sandbox.

Made here for attempts, sessions and readers; `worker.child` hands it on, `worker.shim` and bubblewrap carry it out.
What each level stops, docs/howto/isolate-tasks.md says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gpuflow.errors import GPUFlowError
from gpuflow.policy.child import read_policy
from gpuflow.policy.paths import texts_of
from gpuflow.protocol import FUNCTION_TYPE, Request
from gpuflow.settings import Settings, env_names
from gpuflow.worker import bubblewrap
from gpuflow.worker.cgroups import TaskGroup
from gpuflow.worker.child_environment import python_path
from gpuflow.worker.child_user import ChildUser, child_user, prepare_folders

#: Limits that a setting gives, by their names in the module `resource`.
#: RLIMIT_DATA and not RLIMIT_AS: CUDA reserves far more addresses than it uses, and those are not writable.
_LIMITS: Final[Mapping[str, str]] = {
    "child_max_processes": "RLIMIT_NPROC",
    "child_max_file_bytes": "RLIMIT_FSIZE",
    "child_max_memory": "RLIMIT_DATA",
}


#: So many folders still fit into one message to the shim.
_MOST_INPUTS: Final = 400
_LONGEST_PATH: Final = 1024


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """How a child is confined; `sandbox` is what stands before its command line, () for nothing.

    `group` is the control group that it is put into; whoever waits for the child closes it.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    user: ChildUser | None = None
    sandbox: tuple[str, ...] = ()
    group: TaskGroup | None = None

    def message(self) -> dict[str, Any]:
        """Return it for the shim."""
        user = None if self.user is None else [self.user.uid, self.user.gid, list(self.user.groups)]
        group = None if self.group is None else str(self.group.path)
        return {"limits": dict(self.limits), "user": user, "sandboxed": bool(self.sandbox), "group": group}

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the child, whose home is that of its user."""
        return dict(given) if self.user is None else {**given, **self.user.variables()}


UNCONFINED: Final = Confinement()


def of_attempt(settings: Settings, request: Request, environment: Mapping[str, str], python: Path) -> Confinement:
    """Return how the child of one attempt is confined: it writes to the folder of its attempt and reads its inputs."""
    task = Path(request.output_dir).parent
    return _of_task(
        settings,
        environment,
        python,
        results=lambda: [(task, False), *_read_only(inputs_of(request, settings)), (Path(request.output_dir), True)],
        cwd=Path(request.output_dir),
        gpus=bool(request.gpus),
        container=request.task_type == "container",
        code=lambda: _code_of(request),
    )


def _code_of(request: Request) -> list[Path]:
    """Return where the worker's interpreter looks for modules, for a function of a team that it has imported itself."""
    if request.task_type != FUNCTION_TYPE:
        return []
    return [path for one in request.spec["function"]["path"] if (path := Path(one)).is_absolute() and path.exists()]


def of_session(
    settings: Settings, request: Request, environment: Mapping[str, str], python: Path, *, seen: Path | None = None
) -> Confinement:
    """Return how a session is confined, which serves one task after the other.

    In a sandbox it has the folder `seen` at the place of all results (`sessions.view`), and over it what its opening
    reads of them.
    """
    return _of_task(
        settings,
        environment,
        python,
        results=lambda: _read_only(inputs_of(request, settings)),
        view=None if seen is None else (seen, settings.results_dir),
        cwd=bubblewrap.TMP,
        gpus=bool(request.gpus),
        container=request.task_type == "container",
    )


def of_reader(settings: Settings, cwd: Path) -> Confinement:
    """Return how a process is confined that downloads and unpacks: it runs our code alone, and changes the cache alone.

    It has limits of its own (`artifacts.reader_child`).
    """
    user = child_user(settings)
    if settings.isolate != "bubblewrap":
        return Confinement(user=user)
    sandbox = bubblewrap.whole_disk(writable=(settings.cache_dir, cwd), cwd=cwd)
    return Confinement(user=user, sandbox=sandbox)


def _of_task(
    settings: Settings,
    environment: Mapping[str, str],
    python: Path,
    *,
    results: Callable[[], Sequence[tuple[Path, bool]]],
    cwd: Path,
    gpus: bool,
    container: bool,
    view: tuple[Path, Path] | None = None,
    code: Callable[[], Sequence[Path]] = tuple,
) -> Confinement:
    limits = {limit: int(most) for name, limit in _LIMITS.items() if (most := getattr(settings, name)) is not None}
    if container:  # its child talks to the container engine, which needs our user; the container confines the task
        return Confinement(limits=limits)
    user = child_user(settings)
    if settings.isolate != "bubblewrap":
        return Confinement(limits=limits, user=user)
    read = [*code(), *_python_of(python), *_packages(environment.get("PYTHONPATH", "")), *_executors(settings)]
    sandbox = bubblewrap.own_folders(
        read=[*read, *_paths(environment.get("LD_LIBRARY_PATH", ""))],
        hidden=[one for one in (settings.results_dir, settings.state_dir, settings.secrets_dir) if one is not None],
        folders=[*_more(settings), (settings.cache_dir, settings.isolate_cache == "rw")],
        results=results(),
        view=view,
        locks=settings.cache_dir / "locks",
        cwd=cwd,
        gpus=gpus,
        network=settings.isolate_network,
        roots=_roots(settings),
    )
    return Confinement(limits=limits, user=user, sandbox=sandbox)


def _python_of(python: Path) -> Iterator[Path]:
    """Yield the folders of an interpreter: its virtual environment, and the installation that this one refers to."""
    for path in (python, python.resolve()):
        if path.parent.parent != Path("/"):
            yield path.parent.parent


def _packages(variable: str) -> Iterator[Path]:
    """Yield the folders of PYTHONPATH, and where ours lead: that of an environment holds links."""
    for path in _paths(variable):
        yield path
        for name in ("gpuflow", "executors"):
            if (path / name).is_symlink():
                yield (path / name).resolve()


def _paths(variable: str) -> list[Path]:
    return [Path(part) for part in variable.split(":") if part.startswith("/") and part.strip("/")]


def _executors(settings: Settings) -> Iterator[Path]:
    for entry in settings.executors:
        place = entry.partition("=")[2].rpartition(":")[0]
        if place.startswith("/"):
            yield Path(place)


def _roots(settings: Settings) -> list[tuple[Path, bool]]:
    """Return the folders that tasks may read and write here, outer ones first."""
    read = [(Path(one), False) for one in settings.read_roots]
    return sorted([*read, *((Path(one), True) for one in settings.write_roots)])


def _more(settings: Settings) -> list[tuple[Path, bool]]:
    return [(Path(one.removesuffix(":rw")), one.endswith(":rw")) for one in settings.isolate_folders]


def _read_only(folders: Sequence[Path]) -> list[tuple[Path, bool]]:
    return [(path, False) for path in folders]


def inputs_of(request: Request, settings: Settings) -> list[Path]:
    """Return what the request names of other tasks' results, and may read by its policy.

    Of its texts only those in known fields were judged when it was prepared; any other, of a variable say, is not.
    """
    root = settings.results_dir.resolve()
    # What the owner rule grants alone: a root of the operator's that the results lie below opens none of them.
    roots = None if request.policy is None else replace(read_policy(request.policy)[0], read=(), write=())
    named = set(texts_of([request.spec, request.checkpoint_path, request.resume_from]))
    found = set()
    for text in named:
        if not text.startswith("/") or "\0" in text or len(text) > _LONGEST_PATH:
            continue
        try:
            real = Path(text).resolve()
            inside = real.relative_to(root).parts
            if len(inside) > 1 and (roots is None or roots.refusal(str(real), shown=text) is None):
                found.add(root.joinpath(*inside[:2]))  # the folder of an attempt
        except (OSError, RuntimeError, ValueError):
            continue
    if len(found) > _MOST_INPUTS:
        raise GPUFlowError(
            f"the task reads the results of {len(found)} attempts, and one that is isolated can be shown "
            f"{_MOST_INPUTS}; gather them in a stage between, or set GPUFLOW_ISOLATE=none"
        )
    return sorted(found)


#: What programs say when the kernel refuses, by the setting that may be the cause.
_SIGNS: Final[Mapping[str, re.Pattern[str]]] = {
    "child_max_file_bytes": re.compile(r"\[Errno 27\]|File too large|SIGXFSZ|File size limit exceeded"),
    "child_max_memory": re.compile(
        r"\bMemoryError\b|\[Errno 12\]|[Cc]annot allocate memory|can't allocate memory|std::bad_alloc"
    ),
    "child_max_processes": re.compile(
        r"\[Errno 11\]|Resource temporarily unavailable|can't start new thread|[Cc]annot fork"
    ),
}


def explained(
    error: dict[str, Any], settings: Settings, log_tail: str, *, held_to_mib: float | None = None
) -> dict[str, Any]:
    """Return the error of a failed attempt with the setting by whose limit it may have failed.

    `held_to_mib` is what an address-space limit leaves each process of this task.

    The kernel says no more than "no", and the program says that in its error or its log; a limit of others may have
    been the cause as well.
    """
    said = f"{error.get('message', '')}\n{log_tail}"
    variables = env_names()
    if held_to_mib is not None and _SIGNS["child_max_memory"].search(said):
        held = f"each of its processes is held to the {held_to_mib:g} MiB that it asks for (GPUFLOW_TASK_LIMITS)"
        return {**error, "message": "; ".join(filter(None, (error.get("message"), held)))}
    for name, sign in _SIGNS.items():
        most = getattr(settings, name)
        if most is not None and sign.search(said):
            held = f"{variables[name]} of this worker is {int(most)}"
            return {**error, "message": "; ".join(filter(None, (error.get("message"), held)))}
    return error


def check(settings: Settings) -> None:
    """Raise GPUFlowError where a worker of this machine cannot confine its tasks as the settings say."""
    if settings.isolate == "bubblewrap":
        bubblewrap.check()
        for folder in (settings.cache_dir / "locks", settings.results_dir):  # what is not there cannot be shown
            folder.mkdir(parents=True, exist_ok=True)
    prepare_folders(settings, python_path())
