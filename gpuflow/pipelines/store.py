"""Reads pipeline records and runs the Lua steps on them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import redis

from gpuflow.audit.actors import actor_here
from gpuflow.audit.entries import audit_preamble
from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import Script, load_script, script_text
from gpuflow.errors import UnknownTask
from gpuflow.pipelines.records import PipelineRecord, PipelineState, StageRecord
from gpuflow.signatures import SignatureRefused, Signer


def pipeline_script(name: str) -> Script:
    """Return a Lua step on pipelines, with what the steps share before it."""
    shared = (script_text("gpuflow.broker", "common"), audit_preamble(), script_text("gpuflow.pipelines", "common"))
    return load_script("gpuflow.pipelines", name, "".join(shared))


class PipelineObserver(Protocol):
    """Is told of the pipelines that this process has ended. Raises nothing."""

    def pipeline_ended(self, pipeline_id: str) -> None:
        """A pipeline has ended."""


class PipelineStore:
    """The pipelines of one fleet; `client` must decode responses. `observer` is told of what ends.

    `signer` checks that the stages of a pipeline are those that a holder of the key has submitted.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        events_maxlen: int,
        retention_seconds: int,
        observer: PipelineObserver | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.client: Any = client
        self.signer = signer
        self.observer = observer
        self.keys = keys
        self.events_maxlen = events_maxlen
        self.retention_seconds = retention_seconds

    def find(self, pipeline_id: str) -> PipelineRecord | None:
        """Return a pipeline with its stages, or None."""
        return self.find_many([pipeline_id])[0]

    def find_many(self, pipeline_ids: Sequence[str]) -> list[PipelineRecord | None]:
        """Return pipelines in the order of the ids, None where there is none, in one step."""
        pipe = self.client.pipeline()
        for pipeline_id in pipeline_ids:
            pipe.hgetall(self.keys.pipeline(pipeline_id))
            pipe.hgetall(self.keys.stages(pipeline_id))
        answers = pipe.execute()
        pairs = zip(answers[::2], answers[1::2], strict=True)
        return [PipelineRecord.from_hashes(raw, stages) if raw.get("state") else None for raw, stages in pairs]

    def get(self, pipeline_id: str) -> PipelineRecord:
        """Return a pipeline. Raises UnknownTask."""
        record = self.find(pipeline_id)
        if record is None:
            raise UnknownTask(f"no pipeline {pipeline_id!r}; `gpuflow status` lists those of this fleet")
        return record

    def refusal(self, record: PipelineRecord) -> SignatureRefused | None:
        """Return why the stages of a running pipeline are not to be published; None: they may be. Raises redis errors.

        Its workers sign what they publish for it, so what they make it of has to be signed.
        """
        if self.signer is None or not self.signer.requires:
            return None
        try:
            found = self.signer.check("pipeline", record.signed_part(), record.signature)
        except SignatureRefused as error:
            return error
        if self.client.exists(self.keys.used(found.id)):
            return SignatureRefused("replayed", "the pipeline has ended before; `gpuflow resume` signs it anew")
        return None

    def recent(self, limit: int = 50) -> list[PipelineRecord]:
        """Return the newest pipelines, newest first."""
        ids = self.client.zrevrange(self.keys.pipelines, 0, limit - 1)
        return [record for record in self.find_many(ids) if record is not None]

    def move_stage(self, pipeline_id: str, seen: StageRecord, moved: StageRecord) -> bool:
        """Replace the record of a stage if it is still as `seen`; False if somebody else moved it."""
        return bool(
            pipeline_script("stage_move")(
                self.client,
                [
                    self.keys.stages(pipeline_id),
                    self.keys.pipeline(pipeline_id),
                    self.keys.events(pipeline_id),
                ],
                [seen.name, str(seen.state), str(seen.epoch), moved.to_json(), self.events_maxlen],
            )
        )

    def end(
        self,
        pipeline_id: str,
        state: PipelineState,
        stage_names: Iterable[str],
        error: Mapping[str, Any] | None = None,
        epoch: int | None = None,
    ) -> bool:
        """End a running pipeline; False if it had ended before, or is no more in the round `epoch` (None: any)."""
        ended = pipeline_script("pipeline_end")(
            self.client,
            [
                self.keys.pipeline(pipeline_id),
                self.keys.stages(pipeline_id),
                self.keys.events(pipeline_id),
                self.keys.audit,
            ],
            [
                str(state),
                json.dumps(error) if error else "",
                self.events_maxlen,
                self.retention_seconds,
                "" if epoch is None else epoch,
                uuid.uuid4().hex,
                actor_here(),
                *stage_names,
            ],
        )
        if ended and self.observer is not None:
            self.observer.pipeline_ended(pipeline_id)
        return bool(ended)

    def resume(self, pipeline_id: str) -> str:
        """Begin a new round: `resumed`, `running` or `succeeded`. Raises UnknownTask.

        Raises SignatureRefused for one that was not signed by a holder of the key.
        """
        seen = self.get(pipeline_id)
        verdict, _ = pipeline_script("pipeline_resume")(
            self.client,
            [
                self.keys.pipeline(pipeline_id),
                self.keys.stages(pipeline_id),
                self.keys.events(pipeline_id),
                self.keys.audit,
            ],
            [self.events_maxlen, seen.epoch, actor_here(), pipeline_id, self._signed_anew(seen)],
        )
        if verdict == "unknown":
            raise UnknownTask(f"no pipeline {pipeline_id!r}; `gpuflow status` lists those of this fleet")
        return str(verdict)

    def _signed_anew(self, seen: PipelineRecord) -> str:
        """Return the signature of a pipeline's next round, if that of this one is good; "" to leave what it has."""
        if self.signer is None:
            return ""
        try:
            self.signer.check("pipeline", seen.signed_part(), seen.signature, is_timed=False)
        except SignatureRefused:
            if self.signer.requires:
                raise
            return ""
        return self.signer.sign("pipeline", replace(seen, epoch=seen.epoch + 1).signed_part())
