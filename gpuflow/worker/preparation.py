"""What an attempt needs before its child starts: folders, secrets, store, inputs, the checkpoint to go on from.

Called by the supervisor on the pool thread that runs the attempt. Nothing here is told to the ledger or holds a GPU.

The work is done on a thread of its own (`Preparing`), since a connection, a name server or a slow disk can hold it up
for any time. When the attempt is to stop, that thread is left alone: its result is dropped, and what other attempts use
it asks for (`is_waited_for`) before it changes that.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from gpuflow.artifacts.checkpoint_store import (
    CheckpointGone,
    CheckpointUnreachable,
    StoredCheckpoint,
    fetch_checkpoint,
    newest_stored,
)
from gpuflow.artifacts.destination import destination_store
from gpuflow.artifacts.inputs import localize
from gpuflow.artifacts.reading import reading_by
from gpuflow.artifacts.store import Store
from gpuflow.artifacts.task_access import Access, limited_to, results_of, task_hosts, task_roots
from gpuflow.errors import ArtifactError
from gpuflow.logs import get_logger
from gpuflow.merge.specs import MERGED
from gpuflow.policy.child import child_policy
from gpuflow.protocol import Request
from gpuflow.secrets import Redactor
from gpuflow.settings import Settings
from gpuflow.worker.child_environment import child_environment, given_variables, python_path
from gpuflow.worker.child_python import ChildPython
from gpuflow.worker.child_user import child_user, files_as
from gpuflow.worker.containers.local import local_container
from gpuflow.worker.download_child import ChildReader
from gpuflow.worker.merged_inputs import gather, refuse_variables, specs_of
from gpuflow.worker.outcome import StopReason
from gpuflow.worker.results_folder import ResultsFolder, attempt_and_step
from gpuflow.worker.secret_sources import redactor_of, reference_values, secrets_of
from gpuflow.worker.spec_policy import SpecPolicy, policy_of

log = get_logger("gpuflow.preparation")

#: Times that the newest checkpoint of the store is chosen again, because the one chosen was removed meanwhile.
_CHOICES: Final = 5
#: Whoever waits for the preparation says so often that he lives, in seconds.
TICK_SECONDS: Final = 0.25

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PreparedAttempt:
    """Everything that a child is started with; `store` is where its results go, None for nowhere else."""

    request: Request
    environment: dict[str, str]
    redactor: Redactor
    store: Store | None
    output_dir: Path
    checkpoint_dir: Path
    settings: Settings


def _always() -> bool:
    return True


def _none(_: Sequence[str]) -> Iterable[str]:
    return ()


def prepare(
    spec: Mapping[str, Any],
    *,
    python: ChildPython,
    task_id: str,
    attempt: int,
    gpus: Sequence[str],
    share_mib: int | None = None,
    cpus: float | None = None,
    folder: ResultsFolder,
    settings: Settings,
    worker_id: str,
    wanted: Callable[[], bool] = _always,
    owned: Callable[[Sequence[str]], Iterable[str]] = _none,
) -> PreparedAttempt:
    """Create the attempt's folder and bring to this machine what its child reads.

    `cpus` is what it has declared. `wanted` says whether somebody still waits for it, `owned` which of other tasks are
    of the same owner, so that their results may be read. Raises OSError and GPUFlowError: NotAllowed, RefusedVariable,
    MissingSecret, ArtifactError, CheckpointUnreachable.
    """
    policy = policy_of(settings, worker_id)
    policy.ask(spec)
    output_dir = folder.create_attempt(attempt)
    refuse_variables(spec.get("env") or {})
    readers = results_of(spec, settings, task_id, owned)
    access = Access(roots=task_roots(settings, readers), results_of=readers)
    with limited_to(access):
        return _prepare_within_access(
            spec,
            python=python,
            task_id=task_id,
            attempt=attempt,
            gpus=gpus,
            share_mib=share_mib,
            cpus=cpus,
            folder=folder,
            settings=settings,
            worker_id=worker_id,
            wanted=wanted,
            policy=policy,
            access=access,
            output_dir=output_dir,
        )


def _prepare_within_access(
    spec: Mapping[str, Any],
    *,
    python: ChildPython,
    task_id: str,
    attempt: int,
    gpus: Sequence[str],
    share_mib: int | None,
    cpus: float | None,
    folder: ResultsFolder,
    settings: Settings,
    worker_id: str,
    wanted: Callable[[], bool],
    policy: SpecPolicy,
    access: Access,
    output_dir: Path,
) -> PreparedAttempt:
    user = child_user(settings)
    secrets = secrets_of(spec, settings, worker_id)
    children: dict[str, Any] = {}
    callers: list[dict[str, Any]] = []
    if MERGED in spec:
        callers = list(specs_of(spec))
        with files_as(user), _reader(settings, wanted) as reader, reading_by(reader):
            gathered = gather(spec, secrets, settings, worker_id, policy)
        secrets, children = gathered.secrets, {MERGED: gathered.children}
        spec = {**{name: value for name, value in spec.items() if name != MERGED}, "env": gathered.env}
    values = reference_values(spec, secrets, settings)
    store = destination_store(spec, settings, values)
    chosen = _resume_from(folder, store, task_id, attempt, wanted)
    resume_from = str(chosen) if chosen else None
    if user is not None and folder.fetched_dir.is_dir():
        user.own(folder.fetched_dir)
    with files_as(user), _reader(settings, wanted) as reader, reading_by(reader):
        inputs = localize(spec, settings=settings, environment=values)
    # Once more: a reference has become what it loads.
    policy.ask(inputs.spec)
    refuse_variables(inputs.spec.get("env") or {})
    checkpoint_dir = folder.checkpoint_dir(attempt)
    request = Request(
        task_id=task_id,
        task_type=str(spec["taskType"]),
        spec={name: value for name, value in local_container(inputs.spec, settings).items() if name != "notify"}
        | children,
        output_dir=str(output_dir),
        attempt=attempt,
        gpus=tuple(gpus),
        share_mib=share_mib,
        checkpoint_dir=str(checkpoint_dir),
        checkpoint_path=inputs.checkpoint_path,
        cache_dir=str(settings.cache_dir),
        resume_from=resume_from,
        policy=child_policy(access.roots_of_child(), task_hosts(settings)),
    )
    environment = child_environment(
        os.environ,
        pass_env=settings.pass_env,
        requested=spec.get("env"),
        secrets=secrets,
        offline=settings.offline,
        given=given_variables(
            task_id=task_id,
            attempt=attempt,
            gpus=gpus,
            output_dir=output_dir,
            checkpoint_dir=checkpoint_dir,
            resume_from=resume_from,
            notice_seconds=settings.notice_seconds,
            model=spec.get("model"),
            results_dir=settings.results_dir,
            python_path=python_path(),
            executors=settings.executors,
            cpus=cpus,
        ),
    )
    environment = python.variables(environment)
    return PreparedAttempt(
        request=request,
        environment=environment,
        redactor=redactor_of([spec, *callers], secrets, environment, settings),
        store=store,
        output_dir=output_dir,
        checkpoint_dir=checkpoint_dir,
        settings=settings,
    )


def _reader(settings: Settings, wanted: Callable[[], bool]) -> ChildReader:
    """Return what reads inputs into the cache, where it stands: the attempt's folder may be another user's."""
    settings.cache_dir.mkdir(parents=True, exist_ok=True)
    return ChildReader(settings=settings, cwd=settings.cache_dir, wanted=wanted, cpu_seconds=settings.prepare_seconds)


def _resume_from(
    folder: ResultsFolder, store: Store | None, task_id: str, attempt: int, wanted: Callable[[], bool] = _always
) -> Path | None:
    """Return the newest complete checkpoint of earlier attempts, of this machine or of the store; None for none.

    The latest attempt counts, then the step; between equals the one that is here. Raises OSError, and
    CheckpointUnreachable rather than to begin anew, or from an older one, in silence.
    """
    here = folder.resume_from(attempt)
    if store is None or attempt == 1:
        return here
    for _ in range(_CHOICES):
        try:
            found = newest_stored(store, task_id, below=attempt)
            if found is None or (here is not None and attempt_and_step(here) >= (found.attempt, found.step)):
                return here
            return _fetched(folder, store, found, wanted)
        except CheckpointGone as error:
            log.info("checkpoint_gone", task=task_id, attempt=attempt, cause=str(error))
        except ArtifactError as error:
            raise CheckpointUnreachable(f"the checkpoint to go on from cannot be fetched: {error}") from error
    raise CheckpointUnreachable(f"the store's checkpoints of {task_id} are removed faster than they can be fetched")


def _fetched(folder: ResultsFolder, store: Store, found: StoredCheckpoint, wanted: Callable[[], bool]) -> Path:
    target = folder.fetched_dir / f"{found.attempt}-{found.name}"
    folder.fetched_dir.mkdir(parents=True, exist_ok=True)
    path = fetch_checkpoint(store, found, target)
    log.info("checkpoint_fetched", task=found.task_id, of_attempt=found.attempt, name=found.name, step=found.step)
    for other in folder.fetched_dir.iterdir():
        # An attempt that has ended meanwhile leaves alone what the next one fetches.
        if other != path and wanted():
            shutil.rmtree(other, ignore_errors=True)
    return path


class Stopped(Exception):
    """The preparation was told to stop; `reason` says why."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


class PreparationTimeout(OSError):
    """The inputs of an attempt have not come in the time that an attempt may hold its GPUs without a child."""


class Preparing:
    """Runs the preparation of one attempt; other threads stop it as they stop an attempt.

    `deadline_seconds` is the time limit of the whole attempt (None: no limit), `most_seconds` that of its preparation.
    `on_tick` is called while it waits; it may call `stop`.
    """

    def __init__(
        self, *, deadline_seconds: float | None, most_seconds: float, on_tick: Callable[[], None] = lambda: None
    ) -> None:
        self.began_at = time.monotonic()
        self._deadline_seconds = deadline_seconds
        self._most_seconds = most_seconds
        self._on_tick = on_tick
        self._reason: StopReason | None = None
        self._waits = True
        self._ended: queue.Queue[Callable[[], object]] = queue.Queue()

    @property
    def reason(self) -> StopReason | None:
        """Why it was told to stop; None: it was not."""
        return self._reason

    @property
    def is_waited_for(self) -> bool:
        """Whether what the work brings is still wanted."""
        return self._waits and self._reason is None

    @property
    def seconds(self) -> float:
        """How long the attempt takes by now."""
        return time.monotonic() - self.began_at

    def stop(self, reason: StopReason, *, at_once: bool = False) -> None:
        """Stop waiting; the first reason counts, but for the loss of the lease."""
        if self._reason is None or reason in ("lost", "superseded"):
            self._reason = reason
        self._ended.put(_nothing)

    def run(self, work: Callable[[], T], what: str) -> T:
        """Do the work and return what it gives. Raises what it raises, Stopped, and PreparationTimeout."""
        found: list[T] = []

        def do() -> None:
            try:
                found.append(work())
                self._ended.put(_nothing)
            except BaseException as error:  # noqa: BLE001  (raised again where it is waited for)
                raised = error

                def again() -> None:
                    raise raised

                self._ended.put(again)

        threading.Thread(target=do, name="gpuflow-prepare", daemon=True).start()
        try:
            return self._wait(found, what)
        finally:
            self._waits = False

    def _wait(self, found: list[T], what: str) -> T:
        while True:
            try:
                self._ended.get(timeout=TICK_SECONDS)()
            except queue.Empty:
                self._on_tick()
            if self._reason is not None:
                raise Stopped(self._reason)
            if found:
                return found[0]
            if self._deadline_seconds is not None and self.seconds > self._deadline_seconds:
                raise Stopped("timeout")
            if self.seconds > self._most_seconds:
                raise PreparationTimeout(
                    f"{what} has not come in {self._most_seconds:g} s (GPUFLOW_PREPARE_SEC); does its source answer?"
                )


def _nothing() -> None:
    """Nothing was raised."""
