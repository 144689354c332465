"""From a delivery to a committed result: START, child, artifacts, COMMIT. Called by the Celery tasks (tasks/).

A supervised Celery task is one call of `supervise(task, spec)`. What it returns or raises is what Celery stores,
counts and links, and it does so only after the record says so.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, Literal, NoReturn, TypeVar

from celery.exceptions import Ignore
from redis.exceptions import RedisError

from gpuflow.artifacts.destination import MANIFEST, is_at, stored_at, stored_name, upload_attempt
from gpuflow.artifacts.held_files import aside, hold_files
from gpuflow.artifacts.manifest import SealedResults, digests_in, seal_results
from gpuflow.artifacts.partial import file_digest
from gpuflow.artifacts.store import Store
from gpuflow.broker.merged_calls import FETCH_HEADER, RUN_HEADER
from gpuflow.broker.publication import THE_SAME
from gpuflow.errors import ArtifactError, GPUFlowError
from gpuflow.fleet.gpu_locks import Hold
from gpuflow.ledger.ledger import Holder, StartVerdict
from gpuflow.ledger.records import RECORD_SCHEMA, SCHEMA_HEADER, Usage, new_record_fields
from gpuflow.ledger.retries import AVOID_SECONDS, Again, decide
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.merge.sealing import named_by_engine, seal_calls
from gpuflow.merge.specs import MERGED, run_spec
from gpuflow.routing.affinity import model_key
from gpuflow.routing.offers import REPLICA_OF
from gpuflow.routing.requirement import Requirement
from gpuflow.spec.units import duration_seconds
from gpuflow.worker.attempt import ASK_SECONDS, Attempt
from gpuflow.worker.checkpoint_uploads import CheckpointUploads, begin_uploads, forget_checkpoints, goes_on
from gpuflow.worker.child_python import ChildPython, EnvironmentNotReady
from gpuflow.worker.child_user import files_as, owner_of
from gpuflow.worker.confinement import explained
from gpuflow.worker.launcher import hold_of, launcher_of, limits_by_engine, runner_of
from gpuflow.worker.outcome import HandedBack, Outcome, cause_of, exception_of, handed_back, stopped
from gpuflow.worker.passed_on import passed_on
from gpuflow.worker.preparation import PreparedAttempt, Preparing, Stopped, prepare
from gpuflow.worker.results_folder import ResultsFolder
from gpuflow.worker.runtime import Runtime, current
from gpuflow.worker.secret_sources import scrubbed
from gpuflow.worker.steps import until_answered
from gpuflow.worker.task_limits import LimitPlan, Runner
from gpuflow.worker.task_owner import TaskOwner
from gpuflow.worker.usage_meter import UsageMeter, meter_of

log = get_logger("gpuflow.supervisor")

#: A delivery that another worker is to take comes back to its queue after this many seconds.
PASS_ON_SECONDS: Final = 1.0

T = TypeVar("T")


def supervise(task: Any, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run one delivery of a supervised task and return its committed result.

    Raises what Celery is to record: TaskFailed, TaskCancelled, TaskDead after they are committed; Ignore for a
    delivery that leaves no trace: a duplicate, a superseded attempt, one that was given back to its queue.
    """
    delivery = Delivery(current(), task, spec)
    try:
        return delivery.run()
    finally:
        delivery.runtime.admission.release(delivery.tag)


class Delivery:
    """One delivery of one supervised task on this worker."""

    def __init__(self, runtime: Runtime, task: Any, spec: Mapping[str, Any]) -> None:
        self.runtime = runtime
        self.request = task.request
        self.backend = task.backend
        self.spec = spec
        self.id: str = task.request.id
        self.tag: str = task.request.properties["delivery_tag"]
        self.folder = ResultsFolder(runtime.app.settings.results_dir, self.id)
        self.ledger = runtime.app.ledger
        self.failures = 0
        self.alone = False
        #: Whether it is a run of merged calls, and the calls that it executes: digest -> spec.
        self.is_run = bool(self.request.get(RUN_HEADER))
        self.calls: dict[str, dict[str, Any]] = {}
        self.start_call = uuid.uuid4().hex
        self.owner = TaskOwner(runtime, task.request, self._until_told)
        self._asked_at = 0.0
        self.store: Store | None = None
        self.uploads: CheckpointUploads | None = None
        self.meter: UsageMeter | None = None
        self.limits = LimitPlan()

    def run(self) -> dict[str, Any]:
        """START, the attempt, COMMIT."""
        if (self.request.get(SCHEMA_HEADER) or 1) > RECORD_SCHEMA:
            self._pass_on("newer")
        started = self._until_told(self._start)
        if started.verdict in ("live", "lost", "gone"):
            log.warning("delivery_dropped", task=self.id, why=started.verdict)
            if started.verdict != "lost":  # it runs elsewhere, by a message of its own, or is no more
                raise Ignore
            self._let_go()
        if started.verdict in ("avoid", "newer"):
            self._pass_on(started.verdict)
        if started.verdict == "final":
            return self._replay()
        if started.verdict == "merged":
            return self._fetch()
        holder = Holder(attempt=started.attempt, token=self.runtime.leases.owner)
        self.failures, self.alone = started.failures, started.alone
        self.runtime.app.attempts.begin(self.id, holder)
        self.runtime.leases.begin(self.tag, self.id, started.attempt)
        passed_on.forget(self.id)
        log.info("task_started", task=self.id, attempt=started.attempt, worker=self.runtime.worker_id)
        self._mark(holder, "prepare")
        if self.is_run:
            self._take_calls(holder)
        elif self.spec.get(REPLICA_OF):
            self._end_unwanted(holder)
        outcome = self._attempt(holder)
        self._mark(holder, "commit")
        if outcome.completed:
            return self._succeed(holder, outcome)
        return self._end(holder, outcome)

    def _mark(self, holder: Holder, part: str) -> None:
        """Note for traces which part of the attempt begins."""
        if self.runtime.app.traces is not None:
            self.runtime.app.traces.mark(self.id, holder.attempt, part)

    def _trace_run(self, holder: Holder, prepared: PreparedAttempt, runner: Runner) -> None:
        """Note for traces that the work itself begins, and give a child of its own the ids of its span."""
        self._mark(holder, "run")
        traces = self.runtime.app.traces
        if traces is not None and runner != "session":  # a session has many tasks, and one environment
            prepared.environment.update(traces.variables(self.id, holder.attempt))

    def _pass_on(self, why: str) -> NoReturn:
        """Leave the task to other workers: its message is back in its queue in a moment."""
        if passed_on.note(self.id, why):
            log.info("delivery_passed_on", task=self.id, why=why)
        self._until_told(lambda: self.runtime.leases.settle(self.tag, "front", PASS_ON_SECONDS))
        raise Ignore

    def _let_go(self) -> NoReturn:
        """End a delivery that is none of the current attempt.

        Its message is somebody else's, as a rule. Where a sweep has given it to this process again meanwhile, it goes
        back to its queue, for START to decide: acknowledged by us, it would be gone.
        """
        self._until_told(lambda: self.runtime.leases.settle(self.tag, "front"))
        raise Ignore

    def _start(self) -> StartVerdict:
        if self.runtime.presence is not None:
            self.runtime.presence.note_held()
        return self.ledger.start(
            self.id,
            worker=self.runtime.worker_id,
            owner_token=self.runtime.leases.owner,
            tag=self.tag,
            lowest_attempt=self.folder.next_attempt(),
            new_fields=None if self.is_run else self._new_fields(),
            call=self.start_call,
            returned=self.runtime.leases.returned(self.tag),
            fetches=bool(self.request.get(FETCH_HEADER)),
        )

    def _new_fields(self) -> dict[str, str]:
        """Return the record of a task whose producer wrote none. A run whose record is gone has no callers any more."""
        task_type = str(self.spec.get("taskType", ""))
        return new_record_fields(name=task_type, task_type=task_type, spec=self.spec, requirement=None)

    def _take_calls(self, holder: Holder) -> None:
        """Read what this run is to execute; nothing joins it any more but equal calls. Without a caller it ends."""
        store = self.runtime.app.merger.store
        calls = self._until_told(lambda: store.calls(self.id))
        waited_for = self._until_told(lambda: store.waited_for(self.id, list(calls)))
        found = {digest: calls[digest] for digest in waited_for}
        # One without a spec is a call of no supervised task, and is not signed.
        self.calls = {digest: call.spec for digest, call in found.items() if call.spec and call.refused is None}
        refused = [call.refused for call in found.values() if call.refused is not None]
        if refused and not self.calls:
            self._finish(holder, TaskState.FAILED, cause_of(refused[0]), Outcome(completed=False))
        if not self.calls:
            left = {"type": "Cancelled", "message": "every caller of this run has left", "retryable": False}
            self._finish(holder, TaskState.CANCELLED, left, Outcome(completed=False))
        self.spec = run_spec(self.calls)

    def _end_unwanted(self, holder: Holder) -> None:
        """End a replica that the fleet does not know as one: it was queued again by hand."""
        client, key = self.runtime.app.redis, self.runtime.app.keys.served_replicas
        if not self._until_told(lambda: client.hexists(key, self.id)):
            message = "no served model wants this replica; `gpuflow serve` begins new ones"
            left = {"type": "Cancelled", "message": message, "retryable": False}
            self._finish(holder, TaskState.CANCELLED, left, Outcome(completed=False))

    def _fetch(self) -> dict[str, Any]:
        """Return the end of a call that was merged into a run which has ended."""
        record = self._until_told(lambda: self.ledger.get(self.id))
        if record.state is TaskState.MERGED:
            self._until_told(lambda: self.runtime.app.merger.fetch(record))
            record = self._until_told(lambda: self.ledger.get(self.id))
        if not record.state.final:
            raise Ignore  # it waits for another run, or was queued again by hand
        return self._replay()

    def _attempt(self, holder: Holder) -> Outcome:
        runtime, number, settings = self.runtime, holder.attempt, self.runtime.app.settings
        limit = duration_seconds(self.spec["timeout"]) if self.spec.get("timeout") else None
        allocation = runtime.admission.keep(self.tag, limit)
        leases = runtime.leases
        preparing = Preparing(
            deadline_seconds=limit,
            most_seconds=settings.prepare_seconds,
            on_tick=lambda: self._while_preparing(preparing),
        )
        try:
            runtime.policy.ask(self.spec)
            hold = hold_of(runtime, self.tag, allocation)
            self.meter = meter_of(runtime.admission, self.tag, hold, allocation)
            python = self.python(hold.uuids)
            asked = allocation.requirement if allocation is not None else None
            runtime.begin(self.id, preparing)
            if not leases.start(self.tag, lambda: preparing.stop("lost")):
                preparing.stop("lost")
            prepared = preparing.run(
                lambda: self.prepare(python, number, hold, asked, lambda: preparing.is_waited_for),
                f"what task {self.id} reads",
            )
            runner = runner_of(runtime, allocation, prepared)
            self._trace_run(holder, prepared, runner)
            self.limits = runtime.limits.plan(asked, runner, limits_by_engine(prepared))
            launch = launcher_of(
                runtime,
                self.tag,
                allocation,
                python,
                prepared,
                plan=self.limits,
                owner=self.owner.name,
                alone=self.alone,
            )
        except HandedBack as error:
            return self._not_begun(handed_back(error))
        except Stopped as order:
            told = stopped(order.reason, preparing.seconds, limit)
            return self._not_begun(Outcome(completed=False, error=told, stop=order.reason))
        except (OSError, GPUFlowError) as error:
            return self._not_begun(Outcome(completed=False, error=cause_of(error)))
        except BaseException:
            self._not_begun(Outcome(completed=False))
            raise
        self.store = prepared.store
        attempt = Attempt(
            prepared.request,
            self.ledger,
            holder,
            launch=launch,
            log_path=self.folder.log_path(number),
            log_max_bytes=settings.child_max_log_bytes,
            grace_seconds=settings.grace_seconds,
            notice_seconds=settings.notice_seconds,
            deadline_seconds=limit,
            began_at=preparing.began_at,
            celery_meta=self._celery_meta(number),
            on_tick=lambda: leases.beat(self.tag),
            redactor=prepared.redactor,
        )
        runtime.admission.models.used(model_key(self.spec))
        self.uploads = begin_uploads(
            self.store, attempt, wanted=lambda: leases.holds(self.tag), rights=lambda: self._rights(number)
        )
        runtime.begin(self.id, attempt)
        leases.start(self.tag, lambda: attempt.stop("lost"))
        if not leases.holds(self.tag):
            attempt.stop("lost")
        if preparing.reason is not None:
            attempt.stop(preparing.reason)
        outcome = None
        try:
            outcome = attempt.run()
        finally:
            leases.beat(self.tag, over=True)
            self._usage()
            runtime.admission.child_gone(self.tag)
            self._wake()
            if self.uploads is not None:
                self.uploads.finish(upload=outcome is not None and goes_on(outcome))
            runtime.end(self.id)
        with self._rights(number):
            return scrubbed(self._by_engine(outcome, python), prepared.output_dir, prepared.redactor)

    def python(self, gpus: Sequence[str]) -> ChildPython:
        """Return how the child is started. Raises EnvironmentNotReady."""
        return self.runtime.supported_runtimes.python_of(self.spec, gpus=bool(gpus))

    def prepare(
        self, python: ChildPython, attempt: int, hold: Hold, asked: Requirement | None, wanted: Callable[[], bool]
    ) -> PreparedAttempt:
        """Return what the child is started with (`preparation.prepare`)."""
        return prepare(
            self.spec,
            python=python,
            task_id=self.id,
            attempt=attempt,
            gpus=hold.uuids,
            share_mib=hold.share_mib,
            cpus=asked.cpu if asked is not None else None,
            folder=self.folder,
            settings=self.runtime.app.settings,
            worker_id=self.runtime.worker_id,
            wanted=wanted,
            owned=lambda others: self.owner.of_the_same(others, wanted),
        )

    def exception(self, state: TaskState, error: dict[str, Any]) -> Exception:
        """Return what Celery is told of an end without result."""
        return exception_of(state, error)

    def _usage(self) -> Usage | None:
        """Return what the attempt has used until this was asked first; None: it had no place yet."""
        return None if self.meter is None else self.meter.stop()

    def _while_preparing(self, preparing: Preparing) -> None:
        """Say that this supervisor lives; ask whether a user wants the task cancelled: no word of it may have come."""
        self.runtime.leases.beat(self.tag)
        if time.monotonic() - self._asked_at >= ASK_SECONDS:
            self._asked_at = time.monotonic()
            try:
                if self.ledger.is_to_be_cancelled(self.id):
                    preparing.stop("cancelled")
            except RedisError as error:
                log.debug("not_asked", task=self.id, cause=str(error))

    def _not_begun(self, outcome: Outcome) -> Outcome:
        """Note that the attempt has ended before its child."""
        self._usage()
        self.runtime.leases.beat(self.tag, over=True)
        self.runtime.admission.child_gone(self.tag)
        self._wake()
        self.runtime.end(self.id)
        return outcome

    def _by_engine(self, outcome: Outcome, python: ChildPython) -> Outcome:
        """Name engine and limits in the result, and the environment in the error of a child that it did not even begin.

        Where a limit of this worker may be the cause, the error names its setting.
        """
        if outcome.error is not None and outcome.stop is None:
            settings = self.runtime.app.settings
            held = self.limits.address_space_mib(settings.child_max_memory)
            outcome = replace(outcome, error=explained(outcome.error, settings, outcome.log_tail, held_to_mib=held))
        if outcome.completed:
            result = named_by_engine(outcome.result, python.engine, merged=MERGED in self.spec)
            return replace(outcome, result=result if self.is_run else {**result, **self.limits.report()})
        if outcome.began or outcome.stop is not None or not python.use.variant:
            return outcome
        broken = EnvironmentNotReady(
            f"the child could not begin in environment {python.use.name}: {(outcome.error or {}).get('message')}; "
            f"run `gpuflow env check {python.use.name}` on worker {self.runtime.worker_id}"
        )
        self.runtime.supported_runtimes.let_down(python, "a child could not begin in it")
        return replace(outcome, error=cause_of(broken))

    def _wake(self) -> None:
        """Let the consumers of the machine look for the next task while this one is committed."""
        if self.runtime.connecting:
            return
        try:
            self.runtime.leases.wake(machine=True)
        except RedisError as error:
            log.debug("not_woken", cause=str(error))

    def _celery_meta(self, number: int) -> Callable[[Mapping[str, Any] | None, Mapping[str, Any] | None], str]:
        def meta(progress: Mapping[str, Any] | None, told: Mapping[str, Any] | None) -> str:
            if told is not None:
                return str(self.backend.meta(told.get("state"), told.get("meta"), self.request))
            state = "STARTED" if progress is None else "PROGRESS"
            text: str = self.backend.meta(state, {**(progress or {}), "attempt": number}, self.request)
            return text

        return meta

    def _succeed(self, holder: Holder, outcome: Outcome) -> dict[str, Any]:
        number = holder.attempt
        try:
            sealed = self._seal(number, outcome)
        except (OSError, GPUFlowError) as error:
            return self._end(holder, replace(outcome, completed=False, stop=None, error=cause_of(error)))
        committed = self._commit(
            lambda: self.ledger.commit(
                self.id,
                TaskState.SUCCEEDED,
                holder=holder,
                result=sealed.result,
                manifest=sealed.digest,
                log_tail=outcome.log_tail,
                usage=None if self.meter is None else self.meter.with_artifacts(sealed.total_bytes),
            )
        )
        if not committed:
            log.warning("late_result_refused", task=self.id, attempt=number)
            self._let_go()
        log.info("task_succeeded", task=self.id, attempt=number, worker=self.runtime.worker_id)
        self._publish(number)
        forget_checkpoints(self.uploads, self.store, self.folder, self.id, number)
        return sealed.result

    def _publish(self, number: int) -> None:
        """Point the names of the task's folder at its committed attempt, where that folder is."""
        try:
            if self.folder.attempt_dir(number).is_dir():
                self.folder.publish(number)
        except OSError as error:
            log.warning("links_not_written", task=self.id, cause=str(error))

    def _seal(self, number: int, outcome: Outcome) -> SealedResults:
        """Close the attempt's folder, and store it where the task wants it. Raises OSError, ArtifactError."""
        folder, store = self.folder.attempt_dir(number), self.store

        def url_of(name: str) -> str:
            return store.url(stored_name(self.id, number, name)) if store is not None else (folder / name).as_uri()

        with self._rights(number):
            if self.is_run:
                sealed = seal_calls(folder, outcome.result, outcome.artifacts, self.calls, url_of)
            else:
                result = {**outcome.result, **stored_at(self.spec, store, self.id, number)}
                sealed = seal_results(folder, result, outcome.artifacts, self.spec, url_of)
        if store is not None and not is_at(store, f"{self.id}/{folder.name}", folder):
            self._upload(store, number, sealed)
        return sealed

    def _upload(self, store: Store, number: int, sealed: SealedResults) -> None:
        """Store the sealed results. A process of the task, or of its user, may live on: what is read is held first."""
        with aside(self.folder.root, number) as own:
            held, inside = own / "results", (self.folder.attempt_dir(number).name,)
            names = [*sealed.names, MANIFEST]
            hold_files(self.folder.root, inside, names, held, rights=lambda: self._rights(number))
            if file_digest(held / MANIFEST) != sealed.digest:
                raise ArtifactError(f"{MANIFEST} was written to after the results were sealed; end all processes")
            upload_attempt(store, held, self.id, number, sealed.names, digests_in(held / MANIFEST))

    def _rights(self, number: int) -> AbstractContextManager[None]:
        """Return a context in which this thread uses files with the rights of the task."""
        return files_as(owner_of(self.runtime.app.settings, self.folder.attempt_dir(number)))

    def _commit(self, step: Callable[[], bool]) -> bool:
        """COMMIT; once more if it was refused by an older snapshot that has not been told yet what runs here."""
        leases = self.runtime.leases
        if self._until_told(step):
            return True
        if not leases.holds(self.tag):
            return False
        self._until_told(leases.reaffirm)
        return leases.holds(self.tag) and self._until_told(step)

    def _end(self, holder: Holder, outcome: Outcome) -> dict[str, Any]:
        number = holder.attempt
        if outcome.stop in ("lost", "superseded"):
            tell = log.debug if outcome.stop == "lost" else log.warning  # that the lease was lost has been said
            tell("attempt_superseded", task=self.id, attempt=number, why=outcome.stop)
            self._let_go()
        error = outcome.error or {"type": "Failed", "message": "the attempt failed", "retryable": False}
        if outcome.stop == "cancelled":
            self._finish(holder, TaskState.CANCELLED, error, outcome)
        if outcome.stop in ("preempted", "shutdown"):
            self._yield_attempt(holder, outcome, "preempted", error, 0)
        if error.get("beside"):
            # Its engine died with several requests: each of them is tried by itself, and only the culprit fails so.
            self._yield_attempt(holder, outcome, "preempted", error, 0, alone=True)
        decision = decide(error, self.failures, self.spec.get("retry"))
        if isinstance(decision, Again):
            self._yield_attempt(holder, outcome, "failed", error, decision.delay_seconds)
        else:
            self._finish(holder, decision.state, decision.error, outcome)
        raise AssertionError("an attempt has ended in no way")  # both calls raise

    def _yield_attempt(
        self,
        holder: Holder,
        outcome: Outcome,
        reason: Literal["failed", "preempted"],
        error: Mapping[str, Any],
        delay_seconds: float,
        *,
        alone: bool = False,
    ) -> NoReturn:
        """Put the task back to its queue; raises Ignore, or TaskCancelled if a user wanted that meanwhile."""
        avoid = self.runtime.worker_id if reason == "failed" and self._others_serve() else ""
        self._put_back(holder, outcome, reason, error, delay_seconds, avoid=avoid, alone=alone)
        raise Ignore

    def _put_back(
        self,
        holder: Holder,
        outcome: Outcome,
        reason: Literal["failed", "preempted"],
        error: Mapping[str, Any],
        delay_seconds: float,
        *,
        avoid: str = "",
        alone: bool = False,
        instead: Sequence[str] = THE_SAME,
    ) -> None:
        """End the attempt, and let the task wait again. Raises TaskCancelled if a user wanted that meanwhile.

        With `alone`, a warm session is to answer it by itself from now on; `instead` is what comes for its message.
        """
        self.runtime.leases.requeueing(self.tag)
        answer = self._until_told(
            lambda: self.ledger.yield_attempt(
                self.id,
                holder,
                self.tag,
                reason=reason,
                error=error,
                log_tail=outcome.log_tail,
                delay_seconds=delay_seconds,
                avoid=avoid,
                avoid_seconds=delay_seconds + AVOID_SECONDS,
                alone=alone,
                usage=self._usage(),
                instead=instead,
            )
        )
        if answer == "cancel":
            self._cancel(holder, outcome)
        self.runtime.leases.forget(self.tag)
        log.info(
            "task_given_back",
            task=self.id,
            attempt=holder.attempt,
            why=reason,
            answer=answer,
            cause=error["message"],
            delay_seconds=round(delay_seconds, 1),
        )

    def _cancel(self, holder: Holder, outcome: Outcome) -> NoReturn:
        """End the task as a user wants it, who asked for that in its last moment."""
        cancelled = {"type": "Cancelled", "message": "cancelled by a user", "retryable": False}
        self._finish(holder, TaskState.CANCELLED, cancelled, outcome)

    def _finish(self, holder: Holder, state: TaskState, error: Mapping[str, Any], outcome: Outcome) -> NoReturn:
        """Commit an end without result and raise it for Celery; Ignore when it is refused."""
        if not self._commit(
            lambda: self.ledger.commit(
                self.id, state, holder=holder, error=error, log_tail=outcome.log_tail, usage=self._usage()
            )
        ):
            log.warning("late_failure_refused", task=self.id, attempt=holder.attempt)
            self._let_go()
        self.folder.forget_fetched()
        log.info("task_ended", task=self.id, attempt=holder.attempt, state=str(state), cause=error["message"])
        raise self.exception(state, dict(error))

    def _others_serve(self) -> bool:
        """Whether another live worker serves the queue of this task."""
        lease = self.runtime.leases.held().get(self.tag)
        try:
            return lease is not None and self.runtime.fleet.serves_beside(self.runtime.worker_id, lease.queue)
        except RedisError:
            return False

    def _replay(self) -> dict[str, Any]:
        """Give Celery the end of a task whose record is final: storing and counting it again is idempotent."""
        record = self._until_told(lambda: self.ledger.get(self.id))
        self.runtime.app.attempts.begin(self.id, Holder(attempt=record.attempt, token=""))
        if record.state is TaskState.SUCCEEDED:
            self._publish(record.attempt)
            return dict(record.result or {})
        if record.state is TaskState.CANCELLED and not self._was_stopped():
            # It was cancelled on its way here. Whoever did that tells Celery the same.
            reason = str((record.error or {}).get("message", ""))
            self.backend.mark_as_revoked(
                self.id, reason, request=self.request, store_result=not self.request.ignore_result
            )
            raise Ignore
        raise self.exception(record.state, dict(record.error or {}))

    def _was_stopped(self) -> bool:
        """Whether the task was cancelled while an attempt ran."""
        attempts = self._until_told(lambda: self.ledger.attempts(self.id))
        return any(entry.outcome == "cancelled" for entry in attempts)

    def _until_told(self, step: Callable[[], T]) -> T:
        return until_answered(self.runtime.leases, self.tag, self.id, step)
