"""Sums what attempts have used, over the records that are kept, by owner, pipeline, model, worker or task type.

Reads the ids in one answer and their records page by page: what a sum costs grows with the records, its memory with the
ids, the names and the runs of merged calls. For owners and pipelines, the use of such a run is
divided evenly among its callers.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import load_script
from gpuflow.ledger.records import AttemptEntry, Usage

By = Literal["owner", "pipeline", "model", "worker", "type"]

#: Records of one round trip; each comes with the entries of its attempts.
PAGE: Final = 500
_FIELD_OF: Final = {"owner": "owner", "pipeline": "pipeline", "type": "task_type"}


@dataclass(frozen=True, kw_only=True)
class UsageRow:
    """What one owner, pipeline, ... has used; `tasks` without the runs of merged calls. The name may be ""."""

    name: str
    tasks: int
    attempts: int
    usage: Usage

    def public(self) -> dict[str, Any]:
        """Return the row, JSON-able."""
        return {"name": self.name, "tasks": self.tasks, "attempts": self.attempts, **self.usage.public()}


class _Sums:
    """The sums so far."""

    def __init__(self) -> None:
        self.used: dict[str, Usage] = defaultdict(Usage)
        self.tasks: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()

    def rows(self) -> list[UsageRow]:
        found = [
            UsageRow(name=name, tasks=self.tasks[name], attempts=self.attempts[name], usage=self.used[name])
            for name in {*self.used, *self.tasks, *self.attempts}
        ]
        return sorted(found, key=lambda row: (-row.usage.gpu_seconds, -row.usage.seconds, row.name))


def usage_rows(client: Any, keys: Keys, by: By, since: float = 0.0) -> list[UsageRow]:
    """Return what attempts that have ended since then (Unix seconds) have used, the most GPU-seconds first.

    `client` must decode responses. Raises redis errors.
    """
    sums = _Sums()
    callers: dict[str, Counter[str]] = defaultdict(Counter)
    runs: dict[str, tuple[str, Usage, int]] = {}
    for task_id, record, attempts in _records(client, keys, with_spec=by == "model"):
        ended = [entry for entry in attempts if entry.ended_at >= since]
        if record["run"]:
            if by in ("owner", "pipeline"):
                callers[record["run"]][_name(by, record)] += 1
            continue  # its attempts are copies of those of the run
        if not ended:
            continue
        is_run = record["merge_tokens"] is not None
        if by == "worker":
            for worker in {entry.worker for entry in ended}:
                sums.tasks[worker] += not is_run
            for entry in ended:
                sums.attempts[entry.worker] += 1
                sums.used[entry.worker] += entry.usage
            continue
        used = sum((entry.usage for entry in ended), Usage())
        name = _name(by, record)
        if is_run and by in ("owner", "pipeline"):
            runs[task_id] = (name, used, len(ended))
            continue
        sums.tasks[name] += not is_run
        sums.attempts[name] += len(ended)
        sums.used[name] += used
    _divide(runs, callers, sums)
    return sums.rows()


def _divide(runs: Mapping[str, tuple[str, Usage, int]], callers: Mapping[str, Counter[str]], sums: _Sums) -> None:
    """Add the use of runs to those for whom they were made, or to the name of the run where none is known."""
    for run_id, (own_name, used, attempts) in runs.items():
        names = callers.get(run_id) or Counter({own_name: 0})
        total = max(1, names.total())
        for name, count in names.items():
            sums.tasks[name] += count
            sums.used[name] += used.times(count / total if count else 1.0)
        sums.attempts[max(names, key=lambda name: (names[name], name))] += attempts


def _records(
    client: Any, keys: Keys, *, with_spec: bool
) -> Iterator[tuple[str, dict[str, str | None], list[AttemptEntry]]]:
    """Yield each record that is kept and counts, with the fields that are needed and its attempts."""
    fields = ["run", "owner", "pipeline", "task_type", "merge_tokens", *(["spec"] if with_spec else [])]
    read = load_script("gpuflow.ledger", "usage")
    # One answer for all ids: pages by rank would pass over records when others are removed meanwhile.
    known = client.zrange(keys.tasks, 0, -1)
    for first in range(0, len(known), PAGE):
        ids = known[first : first + PAGE]
        of_tasks = [*map(keys.task, ids), *map(keys.attempts, ids)]
        for place, values, entries in read(client, of_tasks, fields):
            record = dict(zip(fields, values, strict=True))
            yield ids[place - 1], record, [AttemptEntry.from_json(one) for one in entries]


def _name(by: By, record: Mapping[str, str | None]) -> str:
    if by == "model":
        return model_name(json.loads(record["spec"] or "{}"))
    return record[_FIELD_OF[by]] or ""


def model_name(spec: Mapping[str, Any]) -> str:
    """Return how people call the model of a spec: its identifier, its path or its URL; "" for none."""
    model = spec.get("model")
    source = model.get("source") if isinstance(model, Mapping) else None
    if not isinstance(source, Mapping):
        return ""
    return str(next((source[name] for name in ("identifier", "path", "url") if source.get(name)), ""))
