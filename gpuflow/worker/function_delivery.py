"""Runs calls of a team's own functions in children: START, a child that calls the function, COMMIT.

What a supervised task has, a function has: GPUs of its own alone, a record, one committed result, limits and orders
that end it whatever it waits for. Celery's own steps around the task (links, chords, retries, states) stay with its
tracer, in the worker. Called by `gpuflow.task`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

from celery import Signature, signature
from celery.app.task import get_actual_ignore_result
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded, TimeLimitExceeded
from celery.result import result_from_tuple

from gpuflow.artifacts.large_arguments import load_arguments
from gpuflow.artifacts.manifest import SealedResults
from gpuflow.artifacts.references import References
from gpuflow.artifacts.task_access import task_hosts
from gpuflow.broker.publication import Publication, holding
from gpuflow.broker.wire import portable
from gpuflow.celery_app import TASK_MODULES, GPUFlow
from gpuflow.environments import Ready
from gpuflow.errors import GPUFlowError, TaskFailed
from gpuflow.fleet.gpu_locks import Hold
from gpuflow.functions.calls import (
    CLOSING,
    EXCEPTION,
    FUNCTION_HEADER,
    TEMPLATED_WITHOUT_RESOURCES,
    TOLD,
    Call,
    Ending,
    given,
    given_or_plain,
    is_templated,
    raised,
)
from gpuflow.ledger.ledger import Holder, StartVerdict
from gpuflow.ledger.records import TaskRecord, new_record_fields
from gpuflow.ledger.replacing import replace_task
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.protocol import FUNCTION_TYPE, Request, is_safe_id
from gpuflow.routing.families import SPEC_OPTION
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.resources import asks_gpus_alone, format_resources
from gpuflow.secrets import Redactor
from gpuflow.spec.function_section import is_ours
from gpuflow.traces.context import TRACEPARENT
from gpuflow.worker.child_environment import child_environment, given_variables, python_path
from gpuflow.worker.child_python import ChildPython
from gpuflow.worker.child_user import child_user
from gpuflow.worker.given_result import ResultLost, read_inside
from gpuflow.worker.outcome import Outcome
from gpuflow.worker.preparation import PreparedAttempt
from gpuflow.worker.runtime import Runtime, current
from gpuflow.worker.secret_sources import redactor_of
from gpuflow.worker.supervisor import Delivery

log = get_logger("gpuflow.functions")

#: Field of the result of a task that wants nothing to be told of its end.
IGNORED: Final = "ignored"
#: What stands for the broker's address in a child that is kept from it.
_NO_BROKER: Final = "redis://isolated.invalid:6379/0"


def run(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one delivery of a call, and return what the function returned.

    Raises what it raised, TaskCancelled, TaskFailed with the cause where its process ended; Ignore for a delivery that
    leaves no trace.
    """
    if task.__module__ == "__main__":
        raise GPUFlowError(
            f"task {task.name} is defined in the program that runs as __main__, which a child cannot import; move it "
            "to a module, and start the worker with --include MODULE"
        )
    if not is_safe_id(task.request.id):
        raise GPUFlowError(
            f"the id {task.request.id[:200]!r} cannot name the folder of the task; send it with at most 128 of "
            "A-Z a-z 0-9 . _ - that begin with a letter or digit"
        )
    delivery = FunctionDelivery(current(), task, args, kwargs)
    try:
        return given_or_plain(delivery.run().get("value"))
    finally:
        delivery.runtime.admission.release(delivery.tag)


@cache
def home_of(app: GPUFlow) -> str:
    """Return where a child finds an app, `module:attribute`, of ours before one of the team's; "" for nowhere."""
    found = ""
    for name, module in list(sys.modules.items()):
        if name == "__main__" or name.partition(".")[0] == "celery":
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is app and not found.startswith("gpuflow."):
                found = f"{name}:{attribute}"
    return found


def modules_of(task: Any) -> list[str]:
    """Return the modules that a child imports: the task's own, and what the worker was started with."""
    conf = task.app.conf
    named = [task.__module__, *conf.include, *conf.imports]
    return [name for name in dict.fromkeys(map(str, named)) if name not in TASK_MODULES]


@dataclass(frozen=True, kw_only=True)
class FunctionPython(ChildPython):
    """The interpreter of the worker itself, whose packages the functions are of."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line of the child."""
        return (str(self.use.python), "-P", "-m", "gpuflow.functions")


class FunctionDelivery(Delivery):
    """One delivery of one call of a function on this worker."""

    def __init__(self, runtime: Runtime, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__(runtime, task, {"taskType": FUNCTION_TYPE, "function": {"name": task.name}})
        self.task = task
        self._given = (args, kwargs)
        here = str(Path.cwd())
        sent_args, sent_kwargs = portable([list(args), dict(kwargs)])
        self.call = Call.of(
            task,
            sent_args,
            sent_kwargs,
            modules=modules_of(task),
            app=home_of(task.app),
            path=tuple(dict.fromkeys((here, *sys.path))),  # the worker imported from there, as Celery does
            cwd=here,
            log_level=logging.getLogger().level,
        )
        #: Whether a template calls it, which says by itself what it asks for, unless it asks for nothing.
        self._is_templated = is_templated(task.request)
        self._is_bare = task.request.get(FUNCTION_HEADER) == TEMPLATED_WITHOUT_RESOURCES
        self._attempt_number = 0
        self._redactor = Redactor()
        self._ending: Ending | None = None

    def python(self, gpus: Sequence[str]) -> ChildPython:
        """Return the worker's own interpreter."""
        return FunctionPython(
            use=Ready(name="", variant=None, python=Path(sys.executable), task_types=frozenset({FUNCTION_TYPE}))
        )

    def prepare(
        self, python: ChildPython, attempt: int, hold: Hold, asked: Requirement | None, wanted: Callable[[], bool]
    ) -> PreparedAttempt:
        """Return what the child is started with: the worker's own variables, whose code it runs, and what we give."""
        settings, folder = self.runtime.app.settings, self.folder
        output_dir = folder.create_attempt(attempt)
        checkpoint_dir = folder.checkpoint_dir(attempt)
        resume_from = folder.resume_from(attempt)
        variables = given_variables(
            task_id=self.id,
            attempt=attempt,
            gpus=hold.uuids,
            output_dir=output_dir,
            checkpoint_dir=checkpoint_dir,
            resume_from=str(resume_from) if resume_from else None,
            model=None,
            results_dir=settings.results_dir,
            python_path=python_path(),
            notice_seconds=settings.notice_seconds,
            cpus=asked.cpu if asked is not None else None,
        )
        is_kept_apart = settings.isolate != "none" or child_user(settings) is not None
        environment = child_environment(
            os.environ,
            pass_env=settings.pass_env,
            given=variables,
            offline=settings.offline,
            hub_login=not is_kept_apart,
        )
        own = {"REDIS_URL": _NO_BROKER} if is_kept_apart else _others(os.environ, variables)
        self._refuse_without_gpus(hold, asked)
        warm = {"name": self.task.warm_name, "keep_seconds": self.task.keep_seconds}
        self._attempt_number = attempt
        self._redactor = redactor_of([self.spec], {}, {**own, **environment}, settings)
        return PreparedAttempt(
            request=Request(
                task_id=self.id,
                task_type=FUNCTION_TYPE,
                spec={**self.spec, "function": {**replace(self._call(attempt), environ=own).to_dict(), "warm": warm}},
                output_dir=str(output_dir),
                attempt=attempt,
                gpus=tuple(hold.uuids),
                share_mib=hold.share_mib,
                checkpoint_dir=str(checkpoint_dir),
                resume_from=str(resume_from) if resume_from else None,
                cache_dir=str(settings.cache_dir),
            ),
            environment=environment,
            redactor=self._redactor,
            store=None,
            output_dir=output_dir,
            checkpoint_dir=checkpoint_dir,
            settings=settings,
        )

    def _refuse_without_gpus(self, hold: Hold, asked: Requirement | None) -> None:
        """Raise GPUFlowError for a function that asks for GPUs, and has none since its sender did not say so."""
        if hold.uuids or not (asked is None or self._is_bare) or not asks_gpus_alone(self.task.resources):
            return
        if self._is_bare:
            asked_by = self.task.resources
            raise GPUFlowError(
                f"task {self.task.name} asks for GPUs ({asked_by}), of which the template that calls it says nothing; "
                "give `resources` there, beside taskType: function"
            )
        raise GPUFlowError(
            f"task {self.task.name} asks for GPUs, and came by a queue that gives none; send it without `queue`"
        )

    def _call(self, attempt: int) -> Call:
        """Return the call as this attempt tells the child of it: whether an earlier one did not come to its end.

        Raises ArtifactError for arguments that lie in a store and cannot be had.
        """
        info = dict(self.call.request.get("delivery_info") or {})
        history = self._until_told(lambda: self.ledger.attempts(self.id)) if attempt > 1 else []
        again = bool(history) and history[-1].outcome in ("lost", "preempted")
        told = {**info, "redelivered": bool(info.get("redelivered")) or again}
        settings = self.runtime.app.settings
        arguments = load_arguments(*self._given, References(settings, hosts=task_hosts(settings)))
        return replace(
            self.call,
            request={**self.call.request, "delivery_info": told},
            arguments=self.call.arguments if arguments is None else arguments,
        )

    def exception(self, state: TaskState, error: dict[str, Any]) -> Exception:
        """Return the exception of the function, where it raised one, or Celery's of a limit."""
        ending = self._ending
        if ending is not None and state is TaskState.FAILED:
            made = raised(ending.exception, ending.traceback, self.task.backend)
            if made is not None:
                return _with_cause(made, error)
        if state is TaskState.FAILED and isinstance(error.get(EXCEPTION), Mapping):  # it is told again
            made = raised(error[EXCEPTION], "", self.task.backend)
            if made is not None:
                return _with_cause(made, error)
        limit = {"TimeLimitExceeded": TimeLimitExceeded, "SoftTimeLimitExceeded": SoftTimeLimitExceeded}
        kind = limit.get(str(error.get("type"))) if state is TaskState.FAILED else None
        return kind(error.get("message")) if kind is not None else super().exception(state, error)

    def _celery_meta(self, number: int) -> Callable[[Mapping[str, Any] | None, Mapping[str, Any] | None], str]:
        """Return what makes Celery's entry: of a task whose result nobody reads, of the states alone that it sets."""
        meta = super()._celery_meta(number)
        is_ignored = get_actual_ignore_result(self.task, self.request)
        return lambda progress, told: "" if is_ignored and told is None else meta(progress, told)

    def _new_fields(self) -> dict[str, str]:
        return new_record_fields(name=self.task.name, task_type=FUNCTION_TYPE, spec=self.spec, requirement=None)

    def _start(self) -> StartVerdict:
        """Begin the next attempt; of a message whose task was replaced since, nothing is begun."""
        if self.request.delivery_info.get("redelivered") and self._was_replaced():
            log.warning("delivery_dropped", task=self.id, why="replaced")
            raise Ignore
        return super()._start()

    def _was_replaced(self) -> bool:
        app = self.runtime.app
        if self._until_told(lambda: app.redis.exists(app.keys.replaced(self.tag))):
            return True
        message = self._until_told(lambda: self.ledger.parts([self.id]))[0].message
        return bool(message) and f'"delivery_tag": "{self.tag}"' not in message

    def _seal(self, number: int, outcome: Outcome) -> SealedResults:
        """Seal the results. Celery stores the value whole, and so does the record, for an end that is told again.

        A call that has left no file has no folder: there may be a million of them a day.
        """
        children = outcome.result.get("children") or ()
        self.request.children.extend(result_from_tuple(given(one), app=self.task.app) for one in children)
        value = {"value": outcome.result.get("value")}
        own_user = child_user(self.runtime.app.settings) is None  # a folder of another's is read with his rights alone
        if own_user and not outcome.artifacts and self.folder.forget_empty(number):
            return SealedResults(result=value, digest="", names=())
        sealed = super()._seal(number, replace(outcome, result=value))
        return replace(sealed, result={**sealed.result, **value})

    def _replay(self) -> dict[str, Any]:
        result = super()._replay()
        if result.get(IGNORED):
            raise Ignore
        return result

    def _end(self, holder: Holder, outcome: Outcome) -> dict[str, Any]:
        """End it: a function whose child began is tried again only where it says so itself."""
        error = dict(outcome.error or {})
        told = error.pop(TOLD, False) and outcome.stop is None
        if not told:
            self._forget_ending()
            if error.get("type") == CLOSING and outcome.stop is None:
                self._yield_attempt(holder, outcome, "preempted", error, 0)
        else:
            self._ending = ending = self._told()
            if ending.exception:
                error[EXCEPTION] = ending.exception
            kind = ending.flow.get("kind")
            if kind == "retry":
                self._again(holder, outcome, ending.flow)
            if kind == "replace":
                self._replace(holder, outcome, ending.flow)
            if kind == "ignore" and self._is_templated:
                return self._nothing(holder, outcome)
            if kind == "ignore":
                self._ignore(holder, outcome)
            if kind == "reject":
                self._reject(holder, outcome, ending.flow)
        if outcome.began and outcome.stop is None and (told or error.get("type") != "CannotStart"):
            error["retryable"] = False
        self.failures = max(0, self.failures - int(self.request.retries or 0))
        return super()._end(holder, replace(outcome, error=error or None))

    def _not_begun(self, outcome: Outcome) -> Outcome:
        return replace(super()._not_begun(outcome), began=False)

    def _told(self) -> Ending:
        """Read how the child says that it ended; where that cannot be had, it has failed by its own word.

        Its exception loses what looks like a secret, as every error does.
        """
        folder = self.folder.attempt_dir(self._attempt_number)
        try:
            with self._rights(self._attempt_number):
                ending = Ending.from_json(read_inside(folder, Ending.FILE))
                (folder / Ending.FILE).unlink()
        except (OSError, ValueError, RecursionError, ResultLost) as cause:
            log.warning("ending_not_read", task=self.id, cause=str(cause))
            return Ending()
        hidden = self._redactor.data({"exception": ending.exception, "traceback": ending.traceback})
        return replace(ending, exception=hidden["exception"], traceback=hidden["traceback"])

    def _forget_ending(self) -> None:
        """Remove what a child has left that was stopped on its way out."""
        with contextlib.suppress(OSError), self._rights(self._attempt_number):
            (self.folder.attempt_dir(self._attempt_number) / Ending.FILE).unlink()

    def _again(self, holder: Holder, outcome: Outcome, flow: Mapping[str, Any]) -> NoReturn:
        """Put the call back to its queue as it is to be called then, in the step that ends the attempt."""
        error = {"type": "Retry", "message": self._redactor.text(str(flow.get("message"))), "retryable": True}
        cause = self.exception(TaskState.FAILED, dict(outcome.error or {}))
        asked = flow.get("call")
        if asked is None and self._is_templated:
            self._refuse(holder, outcome, "it raised Retry, and asks for no further try of its own; use self.retry()")
        if asked is None:  # it was sent under another id
            self._ignore(holder, outcome, Retry(error["message"], exc=cause))
        try:
            publication, is_replacement = self._publication(asked)
        except Exception as refused:  # noqa: BLE001  (Celery's own: what cannot be sent again is rejected)
            self._reject(holder, outcome, {"reason": str(refused), "requeue": False})
        self._tell_retry(holder, cause)
        again = publication.arguments(replaces=is_replacement)
        self._put_back(holder, outcome, "failed", error, publication.delay_seconds, instead=again)
        raise Retry(error["message"], exc=cause, when=publication.delay_seconds or None)

    def _publication(self, asked: Mapping[str, Any]) -> tuple[Publication, bool]:
        """Return what Celery publishes for a retry, and whether that is of a replacement. Raises what it raises."""
        record = self._until_told(lambda: self.ledger.get(self.id))
        options = {name: given(value) for name, value in asked["options"].items()}
        if record.requirement:
            options["resources"] = format_resources(Requirement.from_dict(record.requirement))
        options["task_id"] = self.id  # whatever the child says
        if self._is_templated:
            options |= {SPEC_OPTION: dict(record.runs), **_told_of(record)}
        with holding(self.id) as held:
            self.runtime.app.send_task(self.task.name, given(asked["args"]), given(asked["kwargs"]), **options)
        return held[-1], record.replacement is not None

    def _tell_retry(self, holder: Holder, cause: Exception) -> None:
        """Let Celery's state be RETRY while the attempt is still ours: what the next one says comes after it."""
        if not get_actual_ignore_result(self.task, self.request):
            told = self.backend.encode_result(cause, "RETRY")
            meta = str(self.backend.meta("RETRY", told, self.request))
            self._until_told(lambda: self.ledger.report(self.id, holder, (), "", meta))

    def _reject(self, holder: Holder, outcome: Outcome, flow: Mapping[str, Any]) -> NoReturn:
        """Put the call back as it came, or let it go for good."""
        told = {"type": "Reject", "message": self._redactor.text(str(flow["reason"])), "retryable": True}
        if flow["requeue"]:
            self._yield_attempt(holder, outcome, "preempted", told, 0)
        self._ending = None
        try:
            self._finish(holder, TaskState.FAILED, {**told, "retryable": False}, outcome)
        except TaskFailed as error:
            if self._is_templated:  # what follows the task has to hear of it
                raise
            raise Reject(flow["reason"], requeue=False) from error

    def _ignore(self, holder: Holder, outcome: Outcome, word: Exception | None = None) -> NoReturn:
        """End it without a word to Celery, or with this one."""
        result = {"value": None, IGNORED: True}
        commit, usage = self.ledger.commit, self._usage()
        if not self._commit(
            lambda: commit(
                self.id, TaskState.SUCCEEDED, holder=holder, result=result, log_tail=outcome.log_tail, usage=usage
            )
        ):
            self._let_go()
        raise word or Ignore()

    def _nothing(self, holder: Holder, outcome: Outcome) -> dict[str, Any]:
        """End it as one that has returned nothing: what follows the task of a template waits for its end."""
        return self._succeed(holder, replace(outcome, completed=True, error=None, result={"value": None}))

    def _refuse(self, holder: Holder, outcome: Outcome, why: str) -> NoReturn:
        """End it as failed, since the task of a template cannot end as it would."""
        self._ending = None
        error = {"type": "Failed", "message": f"task {self.task.name}: {why}", "retryable": False}
        self._finish(holder, TaskState.FAILED, error, outcome)

    def _replace_within(self, holder: Holder, outcome: Outcome, called: Signature) -> NoReturn:
        """Let another function end the task of a template: its message comes for this one, the record stays.

        A chain, a group or a chord would end as several tasks, of which the template knows nothing.
        """
        if called.get("subtask_type") or is_ours(called.task):
            what = f"a {called['subtask_type']}" if called.get("subtask_type") else f"{called.task}, no function"
            self._refuse(
                holder,
                outcome,
                f"it replaces itself by {what}, which a template cannot wait for; replace it by one function, or "
                "make stages of it",
            )
        options = dict(called.options)
        try:
            publication = self._as_replacement(called, options)
        except Exception as refused:  # noqa: BLE001  (Celery's own: whatever cannot be sent)
            self._refuse(holder, outcome, f"what it replaces itself by cannot be sent: {refused}")
        told = {"type": "Replaced", "message": f"replaced by {called.task}", "retryable": True}
        instead = publication.arguments(replaces=True)
        self._put_back(holder, outcome, "preempted", told, publication.delay_seconds, instead=instead)
        raise Ignore

    def _as_replacement(self, called: Signature, options: dict[str, Any]) -> Publication:
        """Return what is published for a function that takes the place of this one. Raises what Celery raises."""
        app = self.runtime.app
        resources = options.get("resources") or getattr(app.tasks.get(called.task), "resources", None)
        own = {"accelerators": resources} if resources and not isinstance(resources, Mapping) else resources
        spec = {"taskType": FUNCTION_TYPE, "function": {"name": called.task}, **({"resources": own} if own else {})}
        record = self._until_told(lambda: self.ledger.get(self.id))
        limit = (self.request.timelimit or [None])[0]
        options = {**options, SPEC_OPTION: spec, "task_id": self.id, **_told_of(record)}
        options.pop("resources", None)
        for name, value in (("time_limit", limit), ("priority", record.spec.get("priority"))):
            if value is not None and options.get(name) is None:
                options[name] = value  # the template's
        with holding(self.id) as held:
            app.send_task(called.task, called.args, called.kwargs, **options)
        return held[-1]

    def _replace(self, holder: Holder, outcome: Outcome, flow: Mapping[str, Any]) -> NoReturn:
        """Send what replaces it, under its id.

        A death before that is noted lets this message begin once more. What cannot be sent is the task's failure: the
        error goes on to Celery, and to nobody else, as the record is gone.
        """
        app = self.runtime.app
        called = signature(given(flow["signature"]), app=app)
        if self._is_templated:
            self._replace_within(holder, outcome, called)
        answer = self._until_told(lambda: replace_task(self.ledger, self.id, holder))
        if answer == "cancel":
            self._cancel(holder, outcome)
        if answer == "refused":
            self._let_go()
        called.delay()
        seconds = max(1, app.ledger.retention_seconds)
        self._until_told(lambda: app.redis.set(app.keys.replaced(self.tag), "", ex=seconds))
        log.info("task_replaced", task=self.id, attempt=holder.attempt)
        raise Ignore


def _told_of(record: TaskRecord) -> dict[str, str]:
    """Return options of the call of a template that its next message has as the first one had them."""
    return {"owner": record.owner, **({TRACEPARENT: record.traceparent} if record.traceparent else {})}


def _with_cause(made: Exception, error: Mapping[str, Any]) -> Exception:
    """Let a MemoryError, which Python raises without a word, say what we know of it, such as the limit."""
    if isinstance(made, MemoryError) and not made.args and error.get("message"):
        made.args = (str(error["message"]),)
    return made


def _others(worker: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return what a child sets itself: the worker's variables, but for those that we give it.

    A function is the team's own code, which the worker itself imports. Where tasks are kept from what the worker may
    (another user, a sandbox), it has what they have instead, and reaches no broker.
    """
    return {name: value for name, value in worker.items() if name not in given}
