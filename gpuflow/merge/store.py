"""The runs of merged calls in Redis:

Who waits for them, and the Lua steps that complete, regroup, close and release.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from gpuflow.audit.entries import audit_preamble
from gpuflow.broker.keys import Keys
from gpuflow.broker.merged_calls import CALLER_PRIORITY
from gpuflow.broker.priorities import list_key
from gpuflow.broker.scripts import Script, load_script, script_text
from gpuflow.broker.signed_messages import StoredCall, stored_call
from gpuflow.broker.sweeper import BELL_SECONDS
from gpuflow.ledger.states import TaskState, lua_preamble
from gpuflow.routing.families import CONTROL_QUEUE
from gpuflow.signatures import Signer


def merge_script(name: str) -> Script:
    """Return a Lua step of the merge layer, with what broker and ledger share before it."""
    broker, ledger = (script_text(package, "common") for package in ("gpuflow.broker", "gpuflow.ledger"))
    shared = (lua_preamble(), broker, audit_preamble(), ledger)
    return load_script("gpuflow.merge", name, "".join(shared))


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What one caller gets: its result as JSON ("" for none), and its message for the control queue.

    Without a message whoever completes it tells Celery.
    """

    caller: str
    result: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class CallerEnd:
    """The committed success of a caller, and how long it took."""

    result: Any
    runtime_seconds: float


class MergeStore:
    """The runs of one fleet; `client` must decode responses."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        events_maxlen: int,
        retention_seconds: int,
        signer: Signer | None = None,
    ) -> None:
        self.client: Any = client
        self.signer = signer
        self.keys = keys
        self.events_maxlen = events_maxlen
        self.retention_seconds = retention_seconds

    @property
    def control_list(self) -> str:
        """The list of the control queue for callers, with the prefix: what joins pipelines goes before them."""
        return self.keys.prefix + list_key(CONTROL_QUEUE, CALLER_PRIORITY)

    def calls(self, run_id: str) -> dict[str, StoredCall]:
        """Return the different calls of a run by their digests. Those of a run that has begun stay the same.

        What was checked is what is returned: it is read once.
        """
        raw = self.client.hgetall(self.keys.merge_calls(run_id))
        return {digest: stored_call(self.signer, digest, raw[digest]) for digest in sorted(raw)}

    def callers(self, run_id: str, digest: str, count: int) -> list[str]:
        """Return up to `count` callers of one call that have not been told of its end, in no order."""
        return list(self.client.srandmember(self.keys.merge_callers(run_id, digest), count) or ())

    def waited_for(self, run_id: str, digests: Sequence[str]) -> list[str]:
        """Return those of a run's calls for which somebody waits."""
        pipe = self.client.pipeline(transaction=False)
        for digest in digests:
            pipe.exists(self.keys.merge_callers(run_id, digest))
        return [digest for digest, waits in zip(digests, pipe.execute(), strict=True) if waits]

    def complete(
        self,
        run_id: str,
        digest: str,
        state: TaskState,
        completions: Sequence[Completion],
        *,
        error: Mapping[str, Any] | None = None,
        manifest: str = "",
    ) -> set[str]:
        """Give callers the end of their call; return the ids of those whom the caller of this tells (complete.lua)."""
        keys = self.keys
        args: list[Any] = [
            run_id,
            self.events_maxlen,
            self.retention_seconds,
            BELL_SECONDS,
            str(state),
            "" if error is None else json.dumps(error, ensure_ascii=False),
            manifest,
            "1" if self.signer is not None else "",
        ]
        for one in completions:
            args += [one.caller, one.result, one.message]
        untold = merge_script("complete")(
            self.client,
            [
                keys.task(run_id),
                keys.merge_callers(run_id, digest),
                keys.dead,
                keys.unfinished,
                keys.ready,
                self.control_list,
            ],
            args,
        )
        return set(untold)

    def ends(self, callers: Sequence[str]) -> dict[str, CallerEnd]:
        """Return the success of each caller that has a record: its id -> result."""
        pipe = self.client.pipeline(transaction=False)
        for caller in callers:
            pipe.hmget(self.keys.task(caller), "result", "created_at", "finished_at")
        found = {}
        for caller, (result, created_at, finished_at) in zip(callers, pipe.execute(), strict=True):
            if finished_at is not None:
                seconds = float(finished_at) - float(created_at or finished_at)
                found[caller] = CallerEnd(result=json.loads(result) if result else None, runtime_seconds=seconds)
        return found

    def told(self, run_id: str, digest: str, callers: Sequence[str]) -> None:
        """Note that these callers know of their end."""
        if callers:
            self.client.srem(self.keys.merge_callers(run_id, digest), *callers)

    def regroup(
        self,
        run_id: str,
        digest: str,
        new_run: str,
        *,
        message: str,
        tag: str,
        hints: str,
        message_list: str,
        spec: str,
        fields: Mapping[str, str],
        delay_seconds: float,
        callers: Sequence[str],
    ) -> tuple[int, str]:
        """Move callers of one call to a run of its own; return how many that were, and its state (regroup.lua)."""
        keys = self.keys
        moved, state = merge_script("regroup")(
            self.client,
            [
                keys.task(run_id),
                keys.merge_callers(run_id, digest),
                keys.ready,
                keys.tasks,
                keys.unfinished,
                keys.delayed,
                keys.parked,
                keys.merge,
            ],
            [
                run_id,
                new_run,
                digest,
                message,
                hints,
                message_list,
                spec,
                json.dumps(fields),
                delay_seconds,
                BELL_SECONDS,
                tag,
                self.events_maxlen,
                *callers,
            ],
        )
        return int(moved), str(state)

    def close(self, run_id: str, result_bytes: Mapping[str, int], *, max_results: int, max_bytes: int) -> bool:
        """Forget by what a run was joined that has ended; False while callers are left (close.lua)."""
        keys = self.keys
        pairs = [part for item in result_bytes.items() for part in item]
        done = merge_script("close")(
            self.client,
            [keys.task(run_id), keys.ready, keys.merge_results, keys.merge, keys.merge_sizes],
            [run_id, max_results, max_bytes, *pairs],
        )
        return bool(done)

    def release(self, caller_id: str, tag: str, signed: Sequence[str] = ()) -> bool:
        """Let a caller run by itself whose run is gone; False if its run is there, or it has ended (release.lua).

        `tag` is the new delivery tag of its message; `signed` its stored message, and the same with that tag, signed.
        """
        keys = self.keys
        done = merge_script("release")(
            self.client,
            [keys.task(caller_id), keys.events(caller_id), keys.ready, keys.merge],
            [caller_id, self.events_maxlen, BELL_SECONDS, tag, *signed],
        )
        return bool(done)

    def counts(self) -> dict[str, int]:
        """Return the counts of merged calls: `calls`, `new` (runs), `coalesced`, `batched`, `hit`, `regrouped`, ..."""
        raw = self.client.hgetall(self.keys.merge)
        return {name: int(value) for name, value in sorted(raw.items())}

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add to the counts."""
        pipe = self.client.pipeline(transaction=False)
        for name, count in counts.items():
            if count:
                pipe.hincrby(self.keys.merge, name, count)
        pipe.execute()
