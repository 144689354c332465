"""Worker tokens from their making to their end: what is stored, and the broker's user, in an order that fails shut.

A token is stored before its user is made, and is void before its user goes. So a process that dies between two steps
leaves a worker that cannot log in, and the command can be given again. A lock keeps two changes apart; what a step
finds changed under it, it takes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import redis
from redis.exceptions import LockError

from gpuflow.tokens import broker_users
from gpuflow.tokens.broker_users import BrokerRefuses
from gpuflow.tokens.store import TokenRecord, TokenRefused, TokenStore
from gpuflow.tokens.texts import Kind, TokenText, new_token

#: A change that holds the lock longer is taken for dead, in seconds; others wait for it for so long.
LOCK_SECONDS: Final = 30.0
WAIT_SECONDS: Final = 10.0
_BUSY: Final = "another change of the fleet's tokens goes on; come again in a moment"


@dataclass(frozen=True, kw_only=True)
class Login:
    """What a worker is started with; `token` and `url` are shown once.

    `is_kept`: the server keeps its users in a file; else a beat makes them again after its restart.
    """

    record: TokenRecord
    token: TokenText
    url: str = field(repr=False)
    connections_cut: int = 0
    is_kept: bool = False

    def public(self) -> dict[str, Any]:
        """Return what is shown once, JSON-able."""
        return {**self.record.public(), "token": self.token.text, "redisUrl": self.url, "keptByServer": self.is_kept}


class WorkerTokens:
    """Makes, replaces and removes tokens of workers. `address` is that of the broker, `queues` the plain queues."""

    def __init__(self, client: redis.Redis, store: TokenStore, *, address: str, queues: Sequence[str]) -> None:
        self._client, self._store, self._address, self._queues = client, store, address, tuple(queues)

    def create(
        self, name: str, *, labels: Mapping[str, str], worker_type: str = "persistent", queues: Sequence[str] = ()
    ) -> Login:
        """Make a worker's token and its user. Raises TokenRefused, BrokerRefuses, redis errors."""
        with self._changing():
            record, token = self._store.create_worker_token(name, labels=labels, worker_type=worker_type, queues=queues)
            try:
                self._apply(record)
            except BrokerRefuses:
                self._store.forget(record.id)
                raise
            login = self._login(record, token)
        self._store.note("worker.create", f"worker:{name}", {"token_id": record.id, "type": worker_type})
        return login

    def rotate(self, name: str) -> Login:
        """Give a worker another token, and end its connections now. Raises as `create`."""
        with self._changing():
            former = self._known(name)
            token = new_token(Kind.WORKER, former.id)
            self._store.replace(former.id, token.digest)
            record = self._known(name)
            self._apply(record)
            count = broker_users.cut(self._client, record)
            login = self._login(record, token, connections_cut=count)
        self._store.note("worker.rotate", f"worker:{name}", {"token_id": record.id, "connections_cut": count})
        return login

    def delete(self, name: str) -> TokenRecord:
        """Remove a worker's token and user, and end its connections now. Raises as `create`."""
        with self._changing():
            record = self._known(name)
            self._store.replace(record.id, "")
            broker_users.delete(self._client, record)
            broker_users.save(self._client)
            self._store.forget(record.id)
        self._store.note("worker.delete", f"worker:{name}", {"token_id": record.id})
        return record

    def restore(self) -> list[str]:
        """Make the users again that the server has lost; return the names of their workers.

        Does nothing while another change goes on. Raises BrokerRefuses, redis errors.
        """
        records = [record for record in self._store.all(Kind.WORKER) if record.digest]
        if not records:
            return []
        there = broker_users.names(self._client)
        if all(broker_users.user_of(record) in there for record in records):
            return []
        made = []
        try:
            with self._changing(wait_seconds=0):
                for record in (found for one in records if (found := self._store.find(one.id)) and found.digest):
                    if broker_users.user_of(record) not in there:
                        self._apply(record)
                        made.append(record.name)
        except TokenRefused:
            return made
        return made

    def _login(self, record: TokenRecord, token: TokenText, *, connections_cut: int = 0) -> Login:
        return Login(
            record=record,
            token=token,
            url=broker_users.login_url(self._address, record, token.text),
            connections_cut=connections_cut,
            is_kept=broker_users.save(self._client),
        )

    def _apply(self, record: TokenRecord) -> None:
        """Make the user of a token as it is stored; take it back where that has changed meanwhile."""
        queues = (*self._queues, *record.queues)
        broker_users.apply(self._client, record, prefix=self._store.keys.prefix, queues=queues)
        now = self._store.find(record.id)
        if now is None or now.digest != record.digest:
            broker_users.delete(self._client, record)
            raise TokenRefused(f"the token of worker {record.name!r} was changed by another command; rotate it again")

    def _known(self, name: str) -> TokenRecord:
        record = self._store.find_worker(name)
        if record is None:
            raise TokenRefused(
                f"worker {name[:100]!r} has no token of its own; make one with `gpuflow workers create --name NAME`"
            )
        return record

    @contextmanager
    def _changing(self, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
        lock = self._client.lock(
            self._store.keys.token_lock,
            timeout=LOCK_SECONDS,
            blocking=bool(wait_seconds),
            blocking_timeout=wait_seconds or None,
        )
        if not lock.acquire():
            raise TokenRefused(_BUSY)
        try:
            yield
        finally:
            with suppress(LockError):  # it has expired; each step has looked whether what it changed is as it left it
                lock.release()
