"""What is kept of schedules in Redis: the schedules themselves, and how far each has come."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpuflow.audit.entries import record
from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import load_script
from gpuflow.errors import GPUFlowError, InvalidTemplate
from gpuflow.schedules.cron import Cron, parse_cron
from gpuflow.signatures import SignatureRefused, Signer

MOST_SCHEDULES: Final = 1000
#: Most bytes of one template, as JSON: large data belongs into a store.
MOST_TEMPLATE_BYTES: Final = 1 << 20
#: The year 10000, in Unix seconds.
_LAST_MOMENT: Final = 253_402_300_800.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A template and when it is submitted; `created_at` is in Unix seconds: what was due before is not made up for."""

    name: str
    cron: str
    zone: str = "UTC"
    owner: str = ""
    created_at: float = 0.0
    template: Mapping[str, Any] = field(default_factory=dict)

    def parsed(self) -> Cron:
        """Return its cron expression, read. Raises InvalidTemplate."""
        return parse_cron(self.cron, self.zone)

    def to_json(self, signature: str = "") -> str:
        """Return the record, which is without the template: that is read only when it is due."""
        part = {"cron": self.cron, "zone": self.zone, "owner": self.owner, "createdAt": self.created_at}
        return json.dumps({**part, "signature": signature} if signature else part)

    @classmethod
    def from_json(cls, name: str, text: str) -> Schedule:
        """Read a record, without its template. Raises ValueError, KeyError, TypeError, OverflowError."""
        data = json.loads(text)
        return cls(
            name=name,
            cron=str(data["cron"]),
            zone=str(data["zone"]),
            owner=str(data["owner"]),
            created_at=_moment(data["createdAt"]),
        )


@dataclass(frozen=True, kw_only=True)
class LastRun:
    """The last time at which a schedule was due, in Unix seconds, and what came of it."""

    due: float = 0.0
    pipeline: str = ""
    error: str = ""

    @classmethod
    def from_json(cls, text: str) -> LastRun:
        """Read what was noted. Raises ValueError, KeyError, TypeError, AttributeError, OverflowError."""
        data = json.loads(text)
        return cls(due=_moment(data["due"]), pipeline=str(data.get("pipeline", "")), error=str(data.get("error", "")))


def _signed_part(name: str, text: str, template: str) -> dict[str, Any]:
    """Return what the signature of a schedule covers: all of it. Raises ValueError."""
    record = {key: value for key, value in json.loads(text).items() if key != "signature"}
    return {"name": name, "record": record, "template": json.loads(template)}


def _moment(value: Any) -> float:
    """Return Unix seconds that a date can be made of. Raises ValueError, TypeError, OverflowError."""
    found = float(value)
    if not 0 <= found < _LAST_MOMENT:
        raise ValueError(f"{found} is no time")
    return found


class ScheduleStore:
    """The schedules of one fleet; `client` must decode responses. Every call raises redis errors."""

    def __init__(self, client: Any, keys: Keys, signer: Signer | None = None) -> None:
        self._client = client
        self._signer = signer
        self._keys = keys

    def now(self) -> float:
        """Return the time of the server: that of every beat."""
        seconds, micros = self._client.time()
        return float(seconds) + float(micros) / 1e6

    def put(self, schedule: Schedule, *, replace: bool = False) -> None:
        """Keep a schedule. Raises InvalidTemplate for a bad one, GPUFlowError where its name is taken."""
        if not _NAME.fullmatch(schedule.name):
            raise InvalidTemplate(
                f"schedule {schedule.name[:80]!r} cannot be named so; give up to 64 letters, digits, '.', '_' or '-'"
            )
        schedule.parsed()
        template = json.dumps(schedule.template)
        if len(template) > MOST_TEMPLATE_BYTES:
            raise InvalidTemplate(
                f"schedule {schedule.name!r} is too large ({len(template)} bytes); put its data into a store, as "
                "data.url"
            )
        answer = load_script("gpuflow.schedules", "put")(
            self._client,
            [self._keys.schedules, self._keys.schedule_templates],
            [schedule.name, schedule.to_json(self._signature(schedule)), template, int(replace), MOST_SCHEDULES],
        )
        if answer == "full":
            raise GPUFlowError(f"there are {MOST_SCHEDULES} schedules; remove one: gpuflow schedules remove NAME")
        if answer == "taken":
            raise GPUFlowError(
                f"schedule {schedule.name!r} is there already; give another --name, or --replace to replace it"
            )
        record(self._client, self._keys, "schedule.put", f"schedule:{schedule.name}", {"owner": schedule.owner})

    def _signature(self, schedule: Schedule) -> str:
        """Return the signature of a schedule; "" where nothing is signed."""
        if self._signer is None:
            return ""
        template = json.dumps(schedule.template)
        return self._signer.sign("schedule", _signed_part(schedule.name, schedule.to_json(), template))

    def refusal(self, name: str, text: str, template: str) -> SignatureRefused | None:
        """Return why a schedule is not to be submitted, by its record and template as they stand; None: it may be.

        Raises ValueError for texts that are no JSON.
        """
        if self._signer is None or not self._signer.requires:
            return None
        try:
            signature = json.loads(text).get("signature")
            self._signer.check("schedule", _signed_part(name, text, template), signature, is_timed=False)
        except SignatureRefused as error:
            return error
        return None

    def remove(self, name: str) -> bool:
        """Remove a schedule; say whether it was there. What it has submitted stays."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.hdel(self._keys.schedules, name)
            pipe.hdel(self._keys.schedule_templates, name)
            pipe.hdel(self._keys.schedule_runs, name)
            removed = bool(pipe.execute()[0])
        if removed:
            record(self._client, self._keys, "schedule.remove", f"schedule:{name}")
        return removed

    def texts(self) -> dict[str, str]:
        """Return the records of all schedules, unread, by name."""
        return dict(sorted(self._client.hgetall(self._keys.schedules).items()))

    def template_text(self, name: str, record: str) -> str | None:
        """Return the template of a schedule, unread; None where its record is another one by now, or none."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.hget(self._keys.schedules, name)
            pipe.hget(self._keys.schedule_templates, name)
            found, template = pipe.execute()
        return (template or "") if found == record else None

    def runs(self) -> dict[str, LastRun]:
        """Return how far each schedule has come; what cannot be read is left out, and comes anew with its next run."""
        found = {}
        for name, text in self._client.hgetall(self._keys.schedule_runs).items():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
                found[name] = LastRun.from_json(text)
        return found

    def note(self, name: str, run: LastRun) -> None:
        """Note how far a schedule has come, unless it was removed meanwhile."""
        text = json.dumps({"due": run.due, "pipeline": run.pipeline, "error": run.error})
        note = load_script("gpuflow.schedules", "note")
        note(self._client, [self._keys.schedules, self._keys.schedule_runs], [name, text])
