"""Worker tokens from their making to their end: what is stored, and the broker's user, in an order that fails shut.

A token is stored before its user is made, and nobody logs in as that user before the token is replaced or removed. So a
server that refuses has changed nothing, and a process that dies between two steps leaves a worker that cannot log in,
and the command can be given again. A lock keeps two changes apart; what a step finds changed under it, it takes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import redis
from redis.exceptions import LockError

from gpuflow.logs import get_logger
from gpuflow.tokens import broker_users
from gpuflow.tokens.broker_users import BrokerRefuses, Described, UsersNotSaved
from gpuflow.tokens.separation import ONLY_FLEET, missing_wall, wrong_database
from gpuflow.tokens.store import TokenRecord, TokenRefused, TokenStore
from gpuflow.tokens.texts import Kind, TokenText, new_token

#: A change that holds the lock longer is taken for dead, in seconds; others wait for it for so long.
LOCK_SECONDS: Final = 30.0
WAIT_SECONDS: Final = 10.0
_BUSY: Final = "another change of the fleet's tokens goes on; come again in a moment"
_OPEN: Final = (
    "the broker lets in whoever gives no password, so tokens of workers keep nobody out; give it one (`requirepass`, "
    f"or `ACL SETUSER default resetpass >PASSWORD`), or where nobody else reaches its port {ONLY_FLEET}"
)
_NOT_SAVED: Final = (
    "the broker has not written its file of users ({cause}): after its restart the former ones are back until beat "
    "mends them; see its log, and send `ACL SAVE`"
)

log = get_logger("gpuflow.tokens")


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
    warnings: tuple[str, ...] = ()

    def public(self) -> dict[str, Any]:
        """Return what is shown once, JSON-able."""
        return {
            **self.record.public(),
            "token": self.token.text,
            "redisUrl": self.url,
            "keptByServer": self.is_kept,
            "warnings": list(self.warnings),
        }


class WorkerTokens:
    """Makes, replaces and removes tokens of workers. `address` is that of the broker, `queues` the plain queues."""

    def __init__(self, client: redis.Redis, store: TokenStore, *, address: str, queues: Sequence[str]) -> None:
        self._client, self._store, self._address, self._queues = client, store, address, tuple(queues)

    def create(
        self,
        name: str,
        *,
        labels: Mapping[str, str],
        worker_type: str = "persistent",
        queues: Sequence[str] = (),
        only_fleet: bool = False,
    ) -> Login:
        """Make a worker's token and its user. Raises TokenRefused, BrokerRefuses, redis errors.

        `only_fleet`: the operator says that no other fleet is on the server, and that its port is not open to others.
        """
        warnings = self._refuse_or_warn(only_fleet)
        with self._changing():
            record, token = self._store.create_worker_token(name, labels=labels, worker_type=worker_type, queues=queues)
            try:
                self._apply(record)
            except BrokerRefuses:
                self._store.forget(record.id)
                raise
            login = self._login(record, token, warnings=warnings)
        self._store.note("worker.create", f"worker:{name}", {"token_id": record.id, "type": worker_type})
        return login

    def rotate(self, name: str) -> Login:
        """Give a worker another token, and end its connections now. Raises as `create`."""
        with self._changing():
            former = self._known(name)
            token = new_token(Kind.WORKER, former.id)
            count = broker_users.shut(self._client, former)
            self._store.replace(former.id, token.digest)
            record = self._known(name)
            self._apply(record)
            login = self._login(record, token, connections_cut=count)
        self._store.note("worker.rotate", f"worker:{name}", {"token_id": record.id, "connections_cut": count})
        return login

    def delete(self, name: str) -> tuple[str, ...]:
        """Remove a worker's token and user, end its connections now, and return warnings. Raises as `create`."""
        with self._changing():
            record = self._known(name)
            broker_users.shut(self._client, record)
            self._store.replace(record.id, "")
            broker_users.delete(self._client, record.id)
            _, warnings = self._save()
            self._store.forget(record.id)
        self._store.note("worker.delete", f"worker:{name}", {"token_id": record.id})
        return warnings

    def restore(self) -> list[str]:
        """Make users of the server again that are not as they were made; return the names of their workers.

        The server may have lost them, or have them from an older file: with a former password, with other rights, or
        though their token is void or removed. Does nothing while another change goes on. Raises BrokerRefuses, redis
        errors.
        """
        if not self._differing() and not self._left_over():
            return []
        mended = []
        try:
            with self._changing(wait_seconds=0):
                for token_id in self._left_over():
                    broker_users.delete(self._client, token_id)
                for record, there in self._differing():
                    if there is not None and not broker_users.takes_only(there, record):
                        broker_users.shut(self._client, record)
                    self._apply(record)
                    mended.append(record.name)
                with suppress(UsersNotSaved):
                    broker_users.save(self._client)
        except TokenRefused:
            return mended
        return mended

    def _differing(self) -> list[tuple[TokenRecord, Described | None]]:
        """Return the workers whose user is not as it was made, and what the server says of it."""
        records = [record for record in self._store.all(Kind.WORKER) if record.digest]
        found = zip(records, broker_users.described(self._client, records), strict=True)
        return [(one, there) for one, there in found if there is None or self._fingerprint(one, there) != one.made]

    def _left_over(self) -> list[str]:
        """Return the ids of void and removed tokens that have a user of the server."""
        void = [record.id for record in self._store.all(Kind.WORKER) if not record.digest]
        ids = [*void, *self._store.deleted()]
        if not ids:
            return []
        names = broker_users.names(self._client)
        return [token_id for token_id in ids if broker_users.user_of_id(token_id) in names]

    def _refuse_or_warn(self, only_fleet: bool) -> tuple[str, ...]:
        """Return what a worker's login does not keep out here. Raises TokenRefused where it is no wall at all."""
        prefix = self._store.keys.prefix
        if wrong := wrong_database(prefix, broker_users.database_of(self._client)):
            raise TokenRefused(wrong)
        lacks = [missing_wall(prefix), _OPEN if broker_users.is_open(self._client) else ""]
        found = tuple(lack for lack in lacks if lack)
        if found and not only_fleet:
            raise TokenRefused(found[0])
        return found[-1:] if lacks[-1] else ()

    def _save(self) -> tuple[bool, tuple[str, ...]]:
        """Let the server write its users down. Return whether it keeps them, and what is to be told."""
        try:
            return broker_users.save(self._client), ()
        except UsersNotSaved as error:
            log.error("broker_users_not_saved", cause=str(error))
            return False, (_NOT_SAVED.format(cause=error),)

    def _login(
        self, record: TokenRecord, token: TokenText, *, connections_cut: int = 0, warnings: tuple[str, ...] = ()
    ) -> Login:
        is_kept, not_saved = self._save()
        return Login(
            record=record,
            token=token,
            url=broker_users.login_url(self._address, record, token.text),
            connections_cut=connections_cut,
            is_kept=is_kept,
            warnings=(*warnings, *not_saved),
        )

    def _apply(self, record: TokenRecord) -> None:
        """Make the user of a token as it is stored; take it back where that has changed meanwhile."""
        broker_users.apply(self._client, record, self._rules(record))
        (there,) = broker_users.described(self._client, [record])
        made = "" if there is None else self._fingerprint(record, there)
        if not self._store.keep_made(record.id, record.digest, made):
            broker_users.delete(self._client, record.id)
            raise TokenRefused(f"the token of worker {record.name!r} was changed by another command; rotate it again")

    def _rules(self, record: TokenRecord) -> list[str]:
        return broker_users.rules(
            record,
            prefix=self._store.keys.prefix,
            database=broker_users.database_of(self._client),
            queues=(*self._queues, *record.queues),
        )

    def _fingerprint(self, record: TokenRecord, there: Described) -> str:
        return broker_users.fingerprint(self._rules(record), there)

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
