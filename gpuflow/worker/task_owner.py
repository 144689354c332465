"""Whose task a delivery is, and which other tasks are of the same owner. Asked by the supervisor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from gpuflow.broker.signed_messages import OWNER_HEADER
from gpuflow.ledger.records import TaskRecord
from gpuflow.worker.runtime import Runtime

#: What begins the name of an owner; a task without a record is nobody's, and shares with nobody.
OWNER: Final = "owner "
#: Records that are read in one round trip; each holds a spec.
_RECORDS_AT_ONCE: Final = 64


class TaskOwner:
    """The owner of one task; `until_told` asks the server until it answers."""

    def __init__(self, runtime: Runtime, request: Any, until_told: Callable[[Callable[[], Any]], Any]) -> None:
        self._runtime = runtime
        self._request = request
        self._until_told = until_told
        self._ledger = runtime.app.ledger

    def name(self) -> str:
        """Return whose task this is."""
        signed = self._signed()
        if signed is not None:
            return f"{OWNER}{signed}"
        record = next(iter(self._until_told(lambda: self._ledger.find_many([self._request.id]))), None)
        return f"{OWNER}{record.owner}" if record is not None else f"task {self._request.id}"

    def of_the_same(self, others: Sequence[str], wanted: Callable[[], bool]) -> set[str]:
        """Return those of other tasks that are of the same owner as this one.

        A broker that is away is waited for as long as the preparation is wanted: nothing has failed.
        """

        def find(ids: Sequence[str]) -> list[TaskRecord | None]:
            return self._ledger.find_many(ids) if wanted() else []

        mine = next(iter(self._until_told(lambda: find([self._request.id]))), None)
        if mine is None:
            return set()
        signed = self._signed()
        owner = mine.owner if signed is None else signed
        found: set[str] = set()
        for start in range(0, len(others), _RECORDS_AT_ONCE):
            some = others[start : start + _RECORDS_AT_ONCE]
            records = self._until_told(partial(find, some))
            found.update(record.id for record in records if record is not None and record.owner == owner)
        return found

    def _signed(self) -> str | None:
        """Return whose task this is by its signed message; None where nothing is signed, and its record says it."""
        signer = self._runtime.app.signer
        return str(self._request.get(OWNER_HEADER) or "") if signer is not None and signer.requires else None
