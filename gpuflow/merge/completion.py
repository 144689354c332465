"""Ends merged calls: when a run has ended, each of its callers gets the end of its own call.

Called by whoever ends a run (its worker, through the result backend), and again by whoever finds callers left over.
Every step is compared and set, so it may be begun anew at any point, and by two at once. The run's message is
acknowledged after this; a worker that dies before has it redelivered.

A caller that nothing follows on is told here: Celery's result is stored, and its event is sent. One with links, a
chain, a chord or notices gets its own message published to the control queue in the step that makes it final; there
it is an ordinary Celery task that returns what its record says.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from celery.app.task import Context
from kombu.utils.json import dumps

from gpuflow.broker.merged_calls import arguments, control_message, hints_text, read_message, request_of, run_message
from gpuflow.broker.signed_messages import (
    QUEUES_HEADER,
    StoredCall,
    checked,
    require_unused,
    signed_anew,
    signed_call,
    with_signature,
)
from gpuflow.broker.wire import portable
from gpuflow.ledger.ledger import MAX_LOSSES
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.retries import Again, decide
from gpuflow.ledger.states import TaskState
from gpuflow.logs import get_logger
from gpuflow.merge.ends import VALUE, CallEnd, call_ends, is_single
from gpuflow.merge.folders import call_folder, link_results
from gpuflow.merge.store import CallerEnd, Completion, MergeStore
from gpuflow.protocol import whole_text
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.signatures import SignatureRefused, Signer

log = get_logger("gpuflow.merge")

#: Callers completed in one step.
PAGE: Final = 100
#: Lost workers that a call which is tried by itself may cost at most.
LOSSES_LEFT: Final = 2
#: Fields of a run's record that the next run of one of its calls has, too.
_OF_THE_NEXT_RUN: Final = (
    "schema", "name", "owner", "task_type", "queue", "requirement", "alternatives", "fallback_seconds", "priority",
    "result_ttl", "traceparent",
)  # fmt: skip
_RUNS: Final = uuid.UUID("5d1c2b5e-3a0f-5c39-9a5f-0c9f2b7a6e11")


@dataclass(frozen=True, kw_only=True)
class _Caller:
    """A caller as it is stored: its Celery message, and what follows on it."""

    id: str
    message: Mapping[str, Any]

    @property
    def request(self) -> Context:
        """The request that Celery would make of its message."""
        return request_of(self.message)

    @property
    def is_plain(self) -> bool:
        """Whether nothing follows on its success but a stored result, as far as its message can be read."""
        try:
            _, kwargs, embed = arguments(self.message)
            spec = kwargs.get("spec") or {}
            return not any(embed.values()) and not spec.get("notify")
        except (ValueError, TypeError, KeyError, AttributeError):
            return False


class Merger:
    """Completes the merged calls of one app's fleet."""

    def __init__(self, app: Any, store: MergeStore) -> None:
        self.app = app
        self.store = store

    def complete(self, run_id: str, *, of_caller: str = "") -> bool:
        """Give every caller of a run its end; False for a run that has not ended, or that is gone.

        `of_caller` is the digest of a caller that asks after the run was closed. Calls that use its result while this
        goes on are completed, too: nobody else would close the run if they left. Raises redis errors.
        """
        run = self.app.ledger.find(run_id)
        if run is None or not run.state.final:
            return False
        settings = self.app.settings
        while True:
            calls = self.store.calls(run_id)
            ends = call_ends(run, sorted({*calls, *filter(None, [of_caller])}))
            for digest, end in ends.items():
                self._end_call(run, digest, end, calls.get(digest))
            closed = self.store.close(
                run_id,
                {digest: _result_bytes(end) for digest, end in ends.items()},
                max_results=settings.merge_max_results,
                max_bytes=settings.merge_max_result_bytes,
            )
            if closed:
                return True

    def _end_call(self, run: TaskRecord, digest: str, end: CallEnd, call: StoredCall | None) -> None:
        """Complete the callers of one call, or let it be tried again; `call` is None for a run that was closed.

        A call whose signature is refused is not tried again, nor is one of a run whose message is.
        """
        decision = self._decide(run, end, None if call is None else call.spec)
        if call is not None and isinstance(decision, Again):
            raw = self.store.client.hgetall(self.store.keys.task(run.id))
            refused = call.refused or self._refusal(run.id, raw.get("message", ""))
            if refused is None:
                self._regroup(run, raw, digest, call.spec, decision.delay_seconds, is_failure=end.is_failure)
                return
            error = {"type": type(refused).__name__, "message": str(refused), "retryable": False}
            decision = CallEnd(state=TaskState.FAILED, error=error)
        if isinstance(decision, CallEnd):
            self._complete_call(run, digest, decision, is_reused=call is None)

    def fetch(self, caller: TaskRecord) -> None:
        """Bring a caller, whose message has come for its end, as far as it can be brought now. Raises redis errors."""
        if caller.run is None:
            return
        if self.app.ledger.find(caller.run) is None:
            self.release(caller.id)
        else:
            self.complete(caller.run, of_caller=caller.call or "")

    def release(self, caller_id: str) -> bool:
        """Let a caller run by itself whose run is gone; False if its run is there, or it has ended."""
        tag = str(uuid.uuid4())
        try:
            signed = self._signed_for_itself(caller_id, tag)
        except SignatureRefused as error:  # a worker refuses its message, and ends it
            log.warning("caller_is_not_signed", task=caller_id, reason=error.reason, cause=str(error))
            signed = ()
        return self.store.release(caller_id, tag, signed)

    def _signed_for_itself(self, caller_id: str, tag: str) -> tuple[str, ...]:
        """Return the message of a caller, and the same with a new tag and signature; () where nothing is signed.

        Raises SignatureRefused. Nobody has asked for a new life: what was used, or is too old, gets none.
        """
        signer, store = self.store.signer, self.store
        stored = None if signer is None else store.client.hget(store.keys.task(caller_id), "message")
        if signer is None or not stored:
            return ()
        if signer.requires:
            require_unused(store.client, store.keys, checked(signer, stored, queue=None, task_id=caller_id))
        return stored, signed_anew(signer, stored, caller_id, tag)

    def _decide(self, run: TaskRecord, end: CallEnd, spec: Mapping[str, Any] | None) -> CallEnd | Again:
        """Return the end of a call, or when it is tried again by itself."""
        if end.is_alone and spec is not None:
            return Again(delay_seconds=0.0)
        if not end.is_failure:
            return end
        error = dict(end.error or {})
        if spec is None:  # of a run that was closed before: there is nothing to try again
            error["retryable"] = False
        decision = decide(error, run.failures, (spec or {}).get("retry"))
        return decision if isinstance(decision, Again) else CallEnd(state=decision.state, error=decision.error)

    def _complete_call(self, run: TaskRecord, digest: str, end: CallEnd, *, is_reused: bool) -> None:
        total = 0
        while True:  # each caller leaves the set, whatever comes of it
            page = self.store.callers(run.id, digest, PAGE)
            if page:
                callers = self._read(page)
                completions = [self._completion(run, digest, end, caller) for caller in callers]
                untold = self.store.complete(
                    run.id, digest, end.state, completions, error=end.error, manifest=end.manifest or run.manifest or ""
                )
                if self.app.traces is not None:
                    self.app.traces.calls_ended([caller.id for caller in callers], run.id)
                self._tell([caller for caller in callers if caller.id in untold], is_plain_task=not run.spec)
                self.store.told(run.id, digest, sorted(untold))
                total += len(callers)
            if len(page) < PAGE:  # whoever joins a run that has ended brings its own message
                break
        if end.result is not None:
            self._count_saved(end.result, total if is_reused else total - 1)

    def _read(self, ids: Sequence[str]) -> list[_Caller]:
        pipe = self.store.client.pipeline(transaction=False)
        for caller_id in ids:
            pipe.hget(self.store.keys.task(caller_id), "message")
        return [
            _Caller(id=caller_id, message=_stored(text, caller_id, self.store.signer))
            for caller_id, text in zip(ids, pipe.execute(), strict=True)
        ]

    def _completion(self, run: TaskRecord, digest: str, end: CallEnd, caller: _Caller) -> Completion:
        result = "" if end.result is None else self._own_result(run, digest, end.result, caller.id)
        is_told_here = not caller.message or (end.state is TaskState.SUCCEEDED and caller.is_plain)
        message = "" if is_told_here else dumps(self._for_control(caller.message))
        return Completion(caller=caller.id, result=result, message=message)

    def _for_control(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a caller's message as it fetches the end of its call."""
        made = control_message(message, CONTROL_QUEUE)
        return made if self.store.signer is None else with_signature(self.store.signer, made, [CONTROL_QUEUE])

    def _refusal(self, run_id: str, message: str) -> SignatureRefused | None:
        """Return why the stored message of a run is not to be made a new one of; None: it may be.

        A run is acknowledged after its callers have their ends: no caller of one that is used waits to be tried again.
        """
        signer = self.store.signer
        if signer is None or not signer.requires:
            return None
        try:
            require_unused(self.store.client, self.store.keys, checked(signer, message, queue=None, task_id=run_id))
        except SignatureRefused as error:
            return error
        return None

    def _own_result(self, run: TaskRecord, digest: str, result: Mapping[str, Any], caller_id: str) -> str:
        """Return the result of a call as JSON, with the caller's own folder in place of the run's where it has one."""
        text = json.dumps(result, ensure_ascii=False)
        if not run.spec:  # a team's own task, which has no folder
            return text
        results_dir, single = self.app.settings.results_dir, is_single(run)
        own = link_results(results_dir, run.id, run.attempt, digest, caller_id, single=single)
        if own is None:
            return text
        shared = call_folder(results_dir, run.id, run.attempt, digest, single=single)
        for of_run, of_caller in ((str(shared), str(own)), (shared.as_uri(), own.as_uri())):
            text = text.replace(json.dumps(of_run)[1:-1], json.dumps(of_caller)[1:-1])
        return text

    def _tell(self, callers: Sequence[_Caller], *, is_plain_task: bool) -> None:
        """Store Celery's result of callers that have succeeded and on which nothing follows, and send their events."""
        if not callers:
            return
        ends = self.store.ends([caller.id for caller in callers])
        told = [(caller, ends[caller.id]) for caller in callers if caller.message and caller.id in ends]
        pipe = self.store.client.pipeline(transaction=False)
        for caller, end in told:
            request = caller.request
            if request.ignore_result:
                continue
            key = self.store.keys.celery_result(caller.id)
            result = (end.result or {}).get(VALUE) if is_plain_task else end.result
            text = self.app.backend.meta("SUCCESS", result, request)
            pipe.setex(key, self.store.retention_seconds, text)
            pipe.publish(key, text)
        pipe.execute()
        self._send_events({caller.id: end for caller, end in told})

    def _send_events(self, ends: Mapping[str, CallerEnd]) -> None:
        """Let Flower see the end of calls that no worker has received: all of them in one message."""
        if not ends or not self.app.conf.worker_send_task_events:
            return
        try:
            with self.app.events.default_dispatcher() as dispatcher:
                dispatcher.buffer_group, dispatcher.buffer_limit = frozenset({"task"}), len(ends) + 1
                for caller_id, end in ends.items():
                    dispatcher.send("task-succeeded", uuid=caller_id, result="", runtime=end.runtime_seconds)
                dispatcher.flush(errors=False)
        except Exception as error:  # noqa: BLE001  (an event that nobody sees ends no call)
            log.info("events_not_sent", cause=str(error))

    def _regroup(
        self,
        run: TaskRecord,
        raw: Mapping[str, str],
        digest: str,
        spec: Mapping[str, Any],
        delay_seconds: float,
        *,
        is_failure: bool,
    ) -> None:
        """Let one call be answered by a run of its own; `raw` is the record of its run as it was checked."""
        message, hints = read_message(raw["message"])
        new_run = str(uuid.uuid5(_RUNS, f"{run.id}/{digest}"))
        made = run_message(message, new_run, {"spec": portable(spec)} if spec else None)
        signer, text = self.store.signer, whole_text(json.dumps(spec, ensure_ascii=False))
        if signer is not None:
            queues = message["headers"].get(QUEUES_HEADER) or [str(raw.get("queue") or "")]
            made = with_signature(signer, made, queues, hints=hints)
        kept = {name: raw[name] for name in _OF_THE_NEXT_RUN if name in raw}
        fields = {
            **kept,
            "state": str(TaskState.QUEUED),
            "attempt": "0",
            "spec": text,
            "merge_tokens": "0",
            "merge_batch": "",
            "failures": str(run.failures + 1 if is_failure else 0),
            # A call that takes its workers down is not to take down as many again.
            "losses": str(min(run.losses, MAX_LOSSES - LOSSES_LEFT)),
        }
        total = 0
        while page := self.store.callers(run.id, digest, PAGE):
            moved, state = self.store.regroup(
                run.id,
                digest,
                new_run,
                message=dumps(made),
                tag=made["properties"]["delivery_tag"],
                hints=hints_text(hints),
                message_list=raw["list"],
                spec=text if signer is None else signed_call(signer, digest, text),
                fields=fields,
                delay_seconds=delay_seconds,
                callers=page,
            )
            total += moved
            if state and TaskState(state).final:  # it was faster than this
                self.complete(new_run, of_caller=digest)
        if total:
            log.info(
                "calls_regrouped", run=run.id, new_run=new_run, callers=total, delay_seconds=round(delay_seconds, 1)
            )

    def _count_saved(self, result: Mapping[str, Any], saved: int) -> None:
        """Count what `saved` callers did not have to generate."""
        usage = result.get("usage") or {}
        tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else 0
        if saved > 0:
            self.store.add_counts(
                {"saved_generations": saved, "saved_tokens": saved * (tokens if isinstance(tokens, int) else 0)}
            )


def _stored(text: str | None, caller_id: str, signer: Signer | None = None) -> dict[str, Any]:
    """Return a caller's stored message; {} where there is none that can be read, and is signed where it has to be.

    It holds up no other caller.
    """
    if not text:
        return {}
    try:
        if signer is not None and signer.requires:
            checked(signer, text, queue=None, task_id=caller_id, is_timed=False)
        return read_message(text)[0]
    except (ValueError, SignatureRefused) as error:
        log.warning("message_not_readable", task=caller_id, cause=str(error))
        return {}


def _result_bytes(end: CallEnd) -> int:
    """Return the bytes of a result that may be used again; 0 for none."""
    if end.state is not TaskState.SUCCEEDED or end.result is None:
        return 0
    return max(1, len(json.dumps(end.result)))


__all__ = ["PAGE", "Merger"]
