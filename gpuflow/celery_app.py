"""The Celery app of gpuflow, found by `celery -A gpuflow`.

A Celery subclass: its connections use the leased transport, its results pass the ledger's fence, and its `send_task`
routes every call to the queue of its requirement, so canvas, `apply_async` and other people's code pass through it
too. Configuration is read when it is first needed, so that importing this module connects to nothing.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import redis
from celery import Celery, Task, signals
from celery.bin.base import CeleryOption, CLIContext
from celery.utils import uuid
from celery.utils.imports import symbol_by_name
from click import Choice, ClickException, get_current_context
from kombu.exceptions import OperationalError
from kombu.utils.json import loads
from redis.exceptions import RedisError

from gpuflow.broker.connection import socket_url
from gpuflow.broker.keys import Keys
from gpuflow.broker.merged_calls import RECORDED_HEADER, read_message, request_of
from gpuflow.broker.priorities import DEFAULT_PRIORITY, PRIORITY_STEPS, SEPARATOR
from gpuflow.broker.signed_messages import checked
from gpuflow.broker.transport import RECORD_HEADER
from gpuflow.errors import BrokerUnavailable, InvalidSettings, InvalidTemplate
from gpuflow.functions.batching import one_of
from gpuflow.functions.calls import FUNCTION_HEADER, TEMPLATED, TEMPLATED_WITHOUT_RESOURCES
from gpuflow.functions.warm_classes import is_warm_class, tasks_of
from gpuflow.importing import end_quickly, load
from gpuflow.ledger.backend import Attempts, LedgerBackend
from gpuflow.ledger.eventlog import EventLog
from gpuflow.ledger.joining import joining_here
from gpuflow.ledger.ledger import Ledger, RecordPart
from gpuflow.ledger.records import SCHEMA_HEADER
from gpuflow.ledger.states import TaskState
from gpuflow.merge.completion import Merger
from gpuflow.merge.store import MergeStore
from gpuflow.pipelines.controller import RECONCILE_TASK, PipelineController
from gpuflow.pipelines.store import PipelineStore
from gpuflow.process_guard import guard_process
from gpuflow.routing.families import CONTROL_QUEUE, SPEC_OPTION, SUPERVISED_TASKS
from gpuflow.routing.resources import says_devices
from gpuflow.settings import Settings
from gpuflow.signatures import SignatureRefused, Signer, signer_of, signing_options
from gpuflow.submission import (
    demand_header,
    function_header,
    plain_call_header,
    submission_header,
    templated_call,
    with_large_arguments,
)
from gpuflow.task import check_options, dispatched
from gpuflow.traces.context import TRACEPARENT
from gpuflow.traces.recording import Submission, Traces, begin_traces
from gpuflow.typed_arguments import TypedArguments

#: An answer that has not come in so many seconds, or in a quarter of a lease, does not come: the line is dead.
ANSWER_SECONDS: Final = 30.0
LEAST_ANSWER_SECONDS: Final = 3.0
#: Beat looks at the app's schedule this often at least.
BEAT_SECONDS: Final = 30
#: Modules whose Celery tasks every worker has.
TASK_MODULES = ("tasks.supervised", "tasks.pipelines", "tasks.maintenance")


class GPUFlow(Celery):  # type: ignore[misc]
    """A Celery app whose tasks are routed to GPUs by what they ask for."""

    amqp_cls = "gpuflow.broker.connection:LeasedAMQP"
    task_cls = "gpuflow.task:GPUTask"

    def __init__(self, *args: Any, settings: Settings | None = None, **kwargs: Any) -> None:
        self._given_settings = settings
        self.attempts = Attempts()
        self._traces_lock = threading.Lock()
        #: Says of an error of a publish whether it is to be tried again now; a worker sets it (worker/pool.py).
        self.publishes_again: Callable[[Exception], bool] = lambda error: False
        #: Whether a call is the retry of a run that this thread works on, which goes back to its queue by that;
        #: likewise.
        self.requeues_run: Callable[[str, Any, Any, Mapping[str, Any]], bool] = lambda *call: False
        super().__init__(*args, **kwargs)
        self.add_defaults(self._defaults)
        self.user_options["worker"].update(worker_options())
        self.user_options["preload"].add(_pages_option())
        self.steps["worker"].add("gpuflow.worker.bootsteps:Machine")
        self.steps["worker"].add("gpuflow.worker.bootsteps:Upkeep")
        self.steps["consumer"].add("gpuflow.worker.bootsteps:Presence")
        self.steps["consumer"].add("gpuflow.worker.bootsteps:Subscriptions")

    @cached_property
    def Worker(self) -> Any:  # noqa: N802  (Celery's name)
        """The worker class: Celery's, with the node name made from `--name`."""
        load("gpuflow.worker.bootsteps")
        return self.subclass_with_self(load("gpuflow.worker.main").Worker)

    @cached_property
    def settings(self) -> Settings:
        """All settings, read once. Raises InvalidSettings."""
        return self._given_settings or Settings.load()

    @cached_property
    def keys(self) -> Keys:
        """Key names under the configured prefix."""
        return Keys(self.settings.key_prefix)

    @cached_property
    def redis(self) -> redis.Redis:
        """A decoding Redis client. Raises BrokerUnavailable without an address."""
        return redis.Redis.from_url(
            self.broker_address(),
            decode_responses=True,
            health_check_interval=30,
            socket_connect_timeout=5,
            socket_timeout=max(LEAST_ANSWER_SECONDS, min(ANSWER_SECONDS, self.settings.lease_seconds / 4)),
        )

    @cached_property
    def ledger(self) -> Ledger:
        """The task records."""
        return Ledger(
            self.redis,
            self.keys,
            events_maxlen=self.settings.events_maxlen,
            events_max_bytes=self.settings.events_max_bytes,
            retention_seconds=int(self.settings.retention_days * 86_400),
            observer=self.traces,
            signer=self.signer,
        )

    @cached_property
    def signer(self) -> Signer | None:
        """What signs messages and checks signatures; None without GPUFLOW_SIGNING. Raises InvalidSettings."""
        return signer_of(self.settings)

    @cached_property
    def traces(self) -> Traces | None:
        """What makes spans of tasks and pipelines; None without GPUFLOW_TRACES."""
        with self._traces_lock:
            if "traces" in self.__dict__:  # another thread was faster
                return self.__dict__["traces"]  # type: ignore[no-any-return]
            self.__dict__["traces"] = made = begin_traces(self.settings, lambda: self.redis, self.keys)
            return made

    @cached_property
    def event_log(self) -> EventLog:
        """The event streams."""
        return EventLog(self.redis, self.keys)

    @cached_property
    def pipelines(self) -> PipelineStore:
        """The pipeline records."""
        return PipelineStore(
            self.redis,
            self.keys,
            events_maxlen=self.settings.events_maxlen,
            retention_seconds=int(self.settings.retention_days * 86_400),
            observer=self.traces,
            signer=self.signer,
        )

    @cached_property
    def pipeline_controller(self) -> PipelineController:
        """What brings pipelines forward."""
        return PipelineController(self, self.pipelines, self.ledger)

    @cached_property
    def merger(self) -> Merger:
        """What ends merged calls."""
        ledger = self.ledger
        store = MergeStore(self.redis, self.keys, ledger.events_maxlen, ledger.retention_seconds, self.signer)
        return Merger(self, store)

    def cancel_task(self, task_id: str, reason: str = "cancelled by a user") -> str:
        """Cancel a task: `cancelled`, `requested` or `final`. Raises UnknownTask.

        One that waits ends at once, for Celery too (its chord is counted); one that runs is stopped by its worker,
        which is told now and asks by itself every second. One that was merged into a run leaves it, and the run goes
        on for its other callers; without any it is stopped.
        """
        verdict, state = self.ledger.cancel(task_id, reason)
        return self._after_cancel({task_id: (verdict, state)}, reason)[task_id]

    def cancel_tasks(self, task_ids: Sequence[str], reason: str = "cancelled by a user") -> dict[str, str]:
        """Cancel some hundred tasks in one round trip; the answer for each as `cancel_task`, or `unknown`.

        What else hears of it, Celery and the pipelines, is told after that; a pipeline once for all of its tasks.
        """
        ids = list(dict.fromkeys(task_ids))
        return self._after_cancel(dict(zip(ids, self.ledger.cancel_many(ids, reason), strict=True)), reason)

    def end_unwanted(self, task_ids: Sequence[str]) -> int:
        """End those that a user has cancelled while they ran, and whose workers were lost before they stopped them.

        Any worker that can run such a task ends it, too; there may be none. Return how many. Raises redis errors.
        """
        reason = "cancelled by a user"
        answers = dict(zip(task_ids, self.ledger.cancel_many(task_ids, reason, again=True), strict=True))
        verdicts = self._after_cancel({one: answer for one, answer in answers.items() if answer[0] != "left"}, reason)
        return sum(verdict == "cancelled" for verdict in verdicts.values())

    def _after_cancel(self, answers: Mapping[str, tuple[str, str]], reason: str) -> dict[str, str]:
        """Tell workers, Celery and pipelines of cancelled tasks, given the answers of the ledger."""
        verdicts = {}
        for task_id, (verdict, state) in answers.items():
            untold = verdict == "final" and state == "CANCELLED" and self._is_untold(task_id)
            verdicts[task_id] = "cancelled" if untold else verdict
            if verdicts[task_id] == "requested":
                self.control.broadcast("gpuflow_cancel", arguments={"task_id": task_id})
        self.tell_cancelled([task_id for task_id, verdict in verdicts.items() if verdict == "cancelled"], reason)
        requested = [task_id for task_id, verdict in verdicts.items() if verdict == "requested"]
        self._follow_cancel(self.ledger.parts(requested))
        return verdicts

    def tell_cancelled(self, task_ids: Sequence[str], reason: str = "cancelled by a user") -> int:
        """Tell Celery, runs and pipelines of tasks that are cancelled; return of how many. It may be done again.

        Of what was queued again since then nobody is told. Those of which Celery keeps an entry and no more are told in
        one round trip.
        """
        found = zip(task_ids, self.ledger.parts(task_ids), strict=True)
        cancelled = {task_id: part for task_id, part in found if part.state == TaskState.CANCELLED}
        entries: dict[str, str] = {}
        for task_id, part in cancelled.items():
            request = self._request_of(task_id, part.message)
            entry = self.backend.revoked_entry(task_id, reason, request)
            if entry is None:
                self.backend.mark_as_revoked(task_id, reason, request=request)
            else:
                entries[task_id] = entry
        self.ledger.tell_cancelled(entries, int(self.backend.expires or 0))
        self._follow_cancel(cancelled.values())
        self.ledger.told(task_ids)
        return len(cancelled)

    def _follow_cancel(self, parts: Iterable[RecordPart]) -> None:
        """Stop runs that have lost their last caller, and reconcile the pipelines, each once."""
        known = list(parts)
        for run in {part.run for part in known if part.run}:
            if self.ledger.is_to_be_cancelled(run):
                self.control.broadcast("gpuflow_cancel", arguments={"task_id": run})
        for pipeline in {part.pipeline for part in known if part.pipeline}:
            self.send_task(RECONCILE_TASK, args=(pipeline,), queue=CONTROL_QUEUE, ignore_result=True)

    def _is_untold(self, task_id: str) -> bool:
        """Whether a cancel was done by a step whose answer was lost, so that Celery has not been told of it.

        Of a task that ran its worker may be telling just now.
        """
        record, request = self.ledger.find(task_id), self._request_of(task_id, self.ledger.parts([task_id])[0].message)
        if record is None or request is None or request.ignore_result:
            return False
        now = float(self.redis.time()[0])
        if record.attempt and now - (record.finished_at or now) < 2 * self.settings.lease_seconds:
            return False
        return not self.redis.exists(self.keys.celery_result(task_id))

    def _request_of(self, task_id: str, message: str) -> Any:
        """Return the Celery request of a task's stored message, so that its chord can be counted.

        None where there is no message, or none that can be read. Its links are called, and signed, by this process: so
        it must be signed itself.
        """
        try:
            if message and self.signer is not None and self.signer.requires:
                checked(self.signer, message, queue=None, task_id=task_id, is_timed=False)
            return request_of(read_message(message)[0]) if message else None
        except (ValueError, SignatureRefused):
            return None

    def signed_spec(self, task_id: str) -> Mapping[str, Any] | None:
        """Return the spec of a task as its signed message has it; None where signatures are not required.

        For what acts on a record, which others may write. Raises SignatureRefused.
        """
        if self.signer is None or not self.signer.requires:
            return None
        message = self.ledger.parts([task_id])[0].message
        checked(self.signer, message, queue=None, task_id=task_id, is_timed=False)
        spec = loads(base64.b64decode(json.loads(message)["body"]))[1].get("spec")
        return spec if isinstance(spec, Mapping) else {}

    def broker_address(self) -> str:
        """Return REDIS_URL, or the address of this user's running embedded server. Raises BrokerUnavailable."""
        if self.settings.redis_url:
            return self.settings.redis_url
        from gpuflow.broker.embedded import EmbeddedServer

        url = EmbeddedServer.running(self.settings.state_dir)
        if url is None:
            raise BrokerUnavailable(
                "REDIS_URL is not set and no embedded server runs; set REDIS_URL=redis://host:6379/0, "
                "or start a local cluster with `gpuflow up`"
            )
        return url

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send a task: Celery's own, with routing by what it asks for, and a record for supervised tasks.

        Raises InvalidTemplate for a supervised task whose spec is not valid; nothing is sent then.
        """
        kwargs = dict(kwargs or {})
        options.setdefault("priority", None)
        submission = None
        if name in SUPERVISED_TASKS:
            prepared = submission_header(self, name, args, kwargs, options)
            submission = prepared.submission
            args, kwargs = (), prepared.kwargs
            options["task_id"] = prepared.task_id
            options.update(queue=prepared.queue, argsrepr="()", kwargsrepr=prepared.summary)
            options["headers"] = {
                **(options.get("headers") or {}),
                RECORD_HEADER: prepared.header,
                SCHEMA_HEADER: int(prepared.header["fields"]["schema"]),
                **({TRACEPARENT: submission.traceparent} if submission.traceparent else {}),
            }
        elif SPEC_OPTION in options:
            is_said = says_devices(options[SPEC_OPTION].get("resources"))
            kind = TEMPLATED if is_said else TEMPLATED_WITHOUT_RESOURCES
            call_by = templated_call(self, name, args, kwargs, options)
            submission, args, kwargs, options["queue"] = call_by.submission, call_by.args, call_by.kwargs, call_by.queue
            options["headers"] = {
                **(options.get("headers") or {}),
                RECORD_HEADER: call_by.header,
                RECORDED_HEADER: 1,
                SCHEMA_HEADER: int(call_by.header["fields"]["schema"]),
                FUNCTION_HEADER: kind,
                **({TRACEPARENT: submission.traceparent} if submission.traceparent else {}),
            }
        else:
            options["task_id"] = options.get("task_id") or uuid()  # the same at each try
            if self.requeues_run(name, args, kwargs, options):
                return self.AsyncResult(options["task_id"])
            demand = demand_header(self, name, options)
            if demand is not None:
                options["queue"] = demand["queue"]
            call = plain_call_header(self, name, args, kwargs, options, demand)
            function = function_header(self, name, options, demand) if call is None else None
            if call is not None:
                options["headers"] = {**(options.get("headers") or {}), RECORD_HEADER: call, RECORDED_HEADER: 1}
            elif function is not None:
                args, kwargs = with_large_arguments(self, name, args, kwargs, function)
                ours = {RECORD_HEADER: function, RECORDED_HEADER: 1, FUNCTION_HEADER: 1}
                options["headers"] = {**(options.get("headers") or {}), **ours}
            elif demand is not None:
                options["headers"] = {**(options.get("headers") or {}), RECORD_HEADER: demand}
        if options["priority"] is None:
            options["priority"] = DEFAULT_PRIORITY
        while True:
            try:
                sent = super().send_task(name, args, kwargs, **options)
                self._note_submitted(submission)
                return sent
            except (RedisError, OperationalError) as error:
                join = joining_here()
                if join is not None:
                    join.refuse(error)
                if join is not None or not self.publishes_again(error):
                    raise

    def _note_submitted(self, submission: Submission | None) -> None:
        if submission is not None and submission.span is not None and self.traces is not None:
            self.traces.submitted(submission)

    def task(self, *args: Any, **options: Any) -> Any:
        """Make a task of a function, as Celery does, or tasks of the methods of a class that stays loaded.

        Raises InvalidTemplate for options that cannot be had together.
        """
        if args and is_warm_class(args[0], Task):
            return tasks_of(self, args[0], options)
        made = super().task(*args, **options)
        if args:
            return made
        return lambda target: tasks_of(self, target, options) if is_warm_class(target, Task) else made(target)

    def _task_from_fun(self, fun: Any, name: str | None = None, base: Any = None, **options: Any) -> Any:
        """Make a task of a function, with what every task of the app has, whatever class the team gives it."""
        if options.get("batch") is not None:
            if options.get("bind") or options.get("pydantic"):
                raise InvalidTemplate("batch: the function is given many calls; bind and pydantic are of one")
            options = {"typing": False, **options, "batched": staticmethod(fun)}
            fun = one_of(fun, name or fun.__name__)
        task = super()._task_from_fun(fun, name=name, base=dispatched(base or self.Task), **options)
        check_options(task)
        if task._dump_pydantic_arguments is not None and task.typed_arguments is None:
            task.typed_arguments = TypedArguments(fun, bound=bool(options.get("bind")), options=options)
        return task

    def register_task(self, task: Any, **options: Any) -> Any:
        """Register a task of a class, likewise."""
        made = task() if isinstance(task, type) else task
        kind: type = type(made)
        made.__class__ = dispatched(kind)
        check_options(made)
        return super().register_task(made, **options)

    def _get_backend(self) -> Any:
        return LedgerBackend(app=self, url=self.conf.result_backend)

    def _defaults(self) -> dict[str, Any]:
        try:
            settings = self.settings
        except InvalidSettings as error:
            raise _of_the_command(error) from None
        url = self.broker_address()
        socket = socket_url(url)
        retention_seconds = int(settings.retention_days * 86_400)
        return {
            "broker_url": f"redis+{socket}" if socket else url,
            "result_backend": socket or url,
            "include": TASK_MODULES,
            "task_serializer": "json",
            "result_serializer": "json",
            "event_serializer": "json",
            "accept_content": ["json"],
            "result_accept_content": ["json"],
            "result_extended": True,
            "result_expires": retention_seconds,
            "result_chord_expires": max(retention_seconds, 30 * 86_400),
            "result_backend_transport_options": {"global_keyprefix": settings.key_prefix},
            "task_default_queue": settings.task_topic,
            "task_default_priority": DEFAULT_PRIORITY,
            "task_acks_late": True,
            "task_send_sent_event": True,
            "worker_send_task_events": True,
            "worker_prefetch_multiplier": 1,
            "worker_pool": "gpuflow.worker.pool:SupervisorPool",
            "worker_consumer": "gpuflow.worker.consumer:Consumer",
            "broker_channel_error_retry": True,
            "worker_concurrency": 64,
            "worker_cancel_long_running_tasks_on_connection_loss": False,
            "worker_enable_prefetch_count_reduction": False,  # it does nothing here, and says so at each outage
            "broker_connection_retry_on_startup": True,
            "broker_connection_max_retries": None,  # Celery gives up after 100, and the worker ends
            "broker_transport_options": {
                "global_keyprefix": settings.key_prefix,
                "lease_seconds": settings.lease_seconds,
                "signing": signing_options(settings) if self.signer is not None else {},
                "priority_steps": list(PRIORITY_STEPS),
                "sep": SEPARATOR,
                "socket_keepalive": True,
                "max_connections": 200,
            },
            "beat_scheduler": "gpuflow.schedules.celery_schedule:Scheduler",
            "redbeat_redis_url": url,
            "redbeat_redis_options": {"socket_timeout": ANSWER_SECONDS, "socket_connect_timeout": ANSWER_SECONDS},
            # Of a beat that was killed, the lock ends after five times this.
            "beat_max_loop_interval": BEAT_SECONDS,
            "redbeat_key_prefix": f"{settings.key_prefix}redbeat:",
            "timezone": "UTC",
        }


def worker_options() -> list[CeleryOption]:
    """Return the options that `celery -A gpuflow worker` has beyond Celery's own."""
    return [
        CeleryOption(
            ("--label",),
            multiple=True,
            metavar="K=V",
            help="A label of this worker (repeatable).",
            help_group="gpuflow",
        ),
        CeleryOption(
            ("--cost",),
            type=float,
            default=None,
            help="What an hour of this machine costs (GPUFLOW_COST_PER_HOUR); of machines that fit, the cheapest is "
            "woken first.",
            help_group="gpuflow",
        ),
        CeleryOption(("--ephemeral",), is_flag=True, help="Run one job, then exit.", help_group="gpuflow"),
        CeleryOption(
            ("--name",),
            metavar="ID",
            help="Worker id; Celery's node name is made from it.",
            help_group="gpuflow",
        ),
        CeleryOption(
            ("--gpus",),
            metavar="LIST",
            help="Serve with these GPUs only: indices or UUIDs, by commas.",
            help_group="gpuflow",
        ),
        CeleryOption(
            ("--executors",),
            metavar="LIST",
            help="Serve these task types only, by commas.",
            help_group="gpuflow",
        ),
        CeleryOption(
            ("--worker-token-file",),
            metavar="FILE",
            help="File that holds the worker's token.",
            help_group="gpuflow",
        ),
        CeleryOption(
            ("--isolate",),
            type=Choice(["none", "bubblewrap"]),
            help="What a task sees of this machine (default: GPUFLOW_ISOLATE).",
            help_group="gpuflow",
        ),
        CeleryOption(
            ("--spot-notices",),
            type=Choice(["none", "aws"]),
            help="Drain when the provider takes this machine away (default: GPUFLOW_SPOT_NOTICES).",
            help_group="gpuflow",
        ),
        CeleryOption(
            ("--max-jobs",),
            type=int,
            metavar="N",
            help="Most child processes at once (default: what fits).",
            help_group="gpuflow",
        ),
    ]


class CannotStart(ClickException):
    """A command of `celery -A gpuflow` cannot start with these settings; shown without a traceback, exit code 2."""

    exit_code = 2


def _of_the_command(error: InvalidSettings) -> Exception:
    """Return what ends a command of Celery in a line, where one runs, else the error."""
    context = get_current_context(silent=True)
    is_celery = context is not None and context.find_object(CLIContext) is not None
    return CannotStart(str(error)) if is_celery else error


def _pages_option() -> CeleryOption:
    """Return the option of `celery -A gpuflow flower`. Celery has no options of plug-in commands, only of all commands;
    of every other one it is hidden and without effect.
    """
    return CeleryOption(
        ("--fleet-pages/--no-fleet-pages",),
        default=True,
        hidden=True,
        expose_value=False,
        callback=_on_command,
    )


def _on_command(ctx: Any, param: Any, wanted: bool) -> None:
    """Add the pages of the fleet, and the roles of its users, to Flower before it begins."""
    if ctx.command.name == "flower" and not ctx.resilient_parsing and isinstance(ctx.obj.app, GPUFlow):
        symbol_by_name("gpuflow.monitor.installing:install")(ctx.obj.app, with_pages=wanted)


def _on_beat(sender: Any, **_: Any) -> None:
    """Start the duties of a beat process of ours; other apps' beats are left alone."""
    if isinstance(sender.app, GPUFlow):
        guard_process(sender.app.settings.umask_bits)
        end_quickly()
        symbol_by_name("gpuflow.upkeep.duties:start")(sender.app)
        symbol_by_name("gpuflow.schedules.duty:start")(sender.app)


signals.beat_init.connect(_on_beat)
signals.beat_embedded_init.connect(_on_beat)

app = GPUFlow("gpuflow")

__all__ = ["TASK_MODULES", "GPUFlow", "app", "worker_options"]
