"""The tokens of a fleet in Redis: their digests, never their texts. Every write is one step, and may be sent again.

`TokenStore.check` is one round trip, and goes by the server's clock. Worker tokens are also users of the broker, which
`workers` keeps in step with what is stored here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import redis

from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import Script, load_script
from gpuflow.errors import GPUFlowError
from gpuflow.tokens.changes import Change, note_change
from gpuflow.tokens.rights import Grant, Role
from gpuflow.tokens.texts import Kind, TokenText, new_token, same_digest

#: Longest owner or label, in characters, and the longest validity, in seconds (100 years).
MOST_TEXT: Final = 200
MOST_SECONDS: Final = 100 * 365 * 86_400
#: Name of a worker: what `--name` of a worker takes, up to 100 characters.
WORKER_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)
#: Name of a plain Celery queue that a worker may serve: with a colon it could be a key of another fleet.
QUEUE_NAME: Final = re.compile(r"[!-9;-~]{1,200}", re.ASCII)
#: How long the id of a removed worker token is known, in seconds: an old file of the server may bring its user back.
DELETED_SECONDS: Final = 90 * 86_400
WORKER_TYPES: Final = ("persistent", "ephemeral")


class TokenRefused(GPUFlowError):
    """A token cannot be made or changed like that."""


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """One token as it is stored. Times are Unix seconds on the server's clock; `digest` '' is a void token."""

    id: str
    kind: Kind
    digest: str = field(default="", repr=False)
    role: Role = Role.VIEWER
    owner: str | None = None
    label: str = ""
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    worker_type: str = "persistent"
    queues: tuple[str, ...] = ()
    created_at: float = 0.0
    expires_at: float | None = None
    rotated_at: float | None = None
    #: Fingerprint of its user of the broker, as it was made last (`broker_users.fingerprint`).
    made: str = ""

    @classmethod
    def from_hash(cls, raw: Mapping[str, str]) -> TokenRecord:
        """Read a token from its Redis hash. Raises ValueError, KeyError for one that gpuflow did not write."""
        return cls(
            id=raw["id"],
            kind=Kind(raw["kind"]),
            digest=raw.get("hash", ""),
            role=Role(raw.get("role") or Role.VIEWER),
            owner=raw.get("owner"),
            label=raw.get("label", ""),
            name=raw.get("name", ""),
            labels=json.loads(raw.get("labels") or "{}"),
            worker_type=raw.get("type", "persistent"),
            queues=tuple(json.loads(raw.get("queues") or "[]")),
            created_at=float(raw.get("created_at") or 0),
            expires_at=float(raw["expires_at"]) if raw.get("expires_at") else None,
            rotated_at=float(raw["rotated_at"]) if raw.get("rotated_at") else None,
            made=raw.get("made", ""),
        )

    def grant(self) -> Grant:
        """Return what the token stands for."""
        if self.kind is Kind.WORKER:
            return Grant(role=Role.VIEWER, worker=self.name, token_id=self.id, digest=self.digest)
        return Grant(role=self.role, owner=self.owner, token_id=self.id, digest=self.digest)

    def public(self) -> dict[str, Any]:
        """Return what an administrator sees, JSON-able: no digest."""
        shared = {"id": self.id, "createdAt": self.created_at}
        if self.kind is Kind.WORKER:
            return {
                **shared,
                "name": self.name,
                "labels": dict(self.labels),
                "type": self.worker_type,
                "queues": list(self.queues),
                "rotatedAt": self.rotated_at,
                "void": not self.digest,
            }
        return {
            **shared, "role": str(self.role), "owner": self.owner, "label": self.label, "expiresAt": self.expires_at,
        }  # fmt: skip


class TokenStore:
    """Reads and writes tokens; `client` must decode responses."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client: Any = client
        self.keys = keys

    def create_user_token(
        self,
        role: Role,
        *,
        owner: str | None,
        label: str = "",
        valid_seconds: float | None = None,
    ) -> tuple[TokenRecord, TokenText]:
        """Make a token of a person; its text is nowhere else. `owner` None: it is of no owner, and sees all.

        Raises TokenRefused, redis errors.
        """
        for what, text in (("owner", owner), ("label", label)):
            if text is not None and (len(text) > MOST_TEXT or not text.isprintable()):
                raise TokenRefused(f"the {what} of a token is up to {MOST_TEXT} printable characters; shorten it")
        if owner == "":
            raise TokenRefused("the owner of a token is not empty; name one, or let the token see all owners")
        if valid_seconds is not None and not 0 < valid_seconds <= MOST_SECONDS:
            raise TokenRefused("a token is valid for more than 0 s and at most 100 years; give another time")
        token = new_token(Kind.USER)
        fields = {"role": str(role), "label": label, **({} if owner is None else {"owner": owner})}
        self._create(token, "", fields, valid_seconds)
        self.note("token.create", f"token:{token.id}", {"role": str(role), "owner": owner, "label": label})
        return self._stored(token.id), token

    def create_worker_token(
        self, name: str, *, labels: Mapping[str, str], worker_type: str, queues: Sequence[str] = ()
    ) -> tuple[TokenRecord, TokenText]:
        """Make a token of a worker, without its user of the broker. Raises TokenRefused, redis errors."""
        if not WORKER_NAME.fullmatch(name):
            raise TokenRefused(f"{name[:100]!r} cannot name a worker; use up to 100 letters, digits, '.', '_' and '-'")
        if worker_type not in WORKER_TYPES:
            raise TokenRefused(f"{worker_type[:40]!r} is no type of worker; give {' or '.join(WORKER_TYPES)}")
        for queue in queues:
            if not QUEUE_NAME.fullmatch(queue):
                raise TokenRefused(
                    f"{queue[:100]!a} cannot name a queue here; use up to 200 visible characters of ASCII without ':'"
                )
        for text in (part for pair in labels.items() for part in pair):
            if len(text) > MOST_TEXT or not text.isprintable():
                raise TokenRefused(
                    f"names and values of labels are up to {MOST_TEXT} printable characters; shorten them"
                )
        token = new_token(Kind.WORKER)
        fields = {
            "name": name,
            "labels": json.dumps(dict(labels)),
            "type": worker_type,
            "queues": json.dumps(list(queues)),
        }
        if self._create(token, name, fields, None) != "created":
            raise TokenRefused(
                f"worker {name!r} has a token; replace it with `gpuflow workers rotate-token {name}`, or remove it "
                f"with `gpuflow workers delete {name}`"
            )
        return self._stored(token.id), token

    def check(self, token: TokenText) -> Grant | None:
        """Return what a token stands for; None for one that is unknown, void or has expired. One round trip."""
        (raw,) = self._valid([token.id])
        if not raw or raw.get("kind") != token.kind or not same_digest(raw.get("hash", ""), token.digest):
            return None
        return TokenRecord.from_hash(raw).grant()

    def still_valid(self, grants: Sequence[Grant]) -> list[bool]:
        """Say of each grant whether its token is valid still. One round trip."""
        found = self._valid([grant.token_id for grant in grants])
        return [same_digest(raw.get("hash", ""), grant.digest) for raw, grant in zip(found, grants, strict=True)]

    def find(self, token_id: str) -> TokenRecord | None:
        """Return a token by its id, void and expired ones too."""
        raw = self._client.hgetall(self.keys.token(token_id))
        return TokenRecord.from_hash(raw) if raw.get("kind") else None

    def find_worker(self, name: str) -> TokenRecord | None:
        """Return the token of the worker of a name."""
        token_id = self._client.hget(self.keys.token_workers, name)
        return self.find(str(token_id)) if token_id else None

    def all(self, kind: Kind) -> list[TokenRecord]:
        """Return the tokens of a kind, the oldest first."""
        ids = self._client.zrange(self.keys.tokens, 0, -1)
        pipe = self._client.pipeline(transaction=False)
        for token_id in ids:
            pipe.hgetall(self.keys.token(token_id))
        return [TokenRecord.from_hash(raw) for raw in pipe.execute() if raw.get("kind") == kind]

    def replace(self, token_id: str, digest: str) -> bool:
        """Give a worker token another digest; '' makes it void. False where there is none."""
        return bool(_step("replace")(self._client, [self.keys.token(token_id)], [digest]) == "replaced")

    def keep_made(self, token_id: str, digest: str, made: str) -> bool:
        """Write down the fingerprint of a worker's user; False where the token has another digest by now."""
        return bool(_step("made")(self._client, [self.keys.token(token_id)], [digest, made]))

    def forget(self, token_id: str) -> bool:
        """Remove a token; False where there is none. The id of one of a worker is known for DELETED_SECONDS more."""
        keys = [self.keys.token(token_id), self.keys.tokens, self.keys.token_workers, self.keys.tokens_deleted]
        return bool(_step("forget")(self._client, keys, [token_id, DELETED_SECONDS]))

    def deleted(self) -> list[str]:
        """Return the ids of worker tokens that were removed in the last DELETED_SECONDS."""
        return [str(token_id) for token_id in self._client.zrange(self.keys.tokens_deleted, 0, -1)]

    def revoke_user_token(self, token_id: str) -> bool:
        """Remove the token of a person; False where there is none."""
        found = self.find(token_id)
        if found is None or found.kind is not Kind.USER:
            return False
        self.forget(token_id)
        self.note("token.revoke", f"token:{token_id}", {"role": str(found.role), "owner": found.owner})
        return True

    def note(self, action: str, target: str, detail: Mapping[str, Any]) -> None:
        """Write down what was changed, by who acts in this context (`audit.actors`)."""
        note_change(self._client, self.keys, Change(action=action, target=target, detail=detail))

    def _create(self, token: TokenText, name: str, fields: Mapping[str, str], valid_seconds: float | None) -> str:
        keys = [self.keys.token(token.id), self.keys.tokens, self.keys.token_workers]
        pairs = [part for item in {"kind": str(token.kind), **fields}.items() for part in item]
        until = "" if valid_seconds is None else valid_seconds
        return str(_step("create")(self._client, keys, [token.id, token.digest, name, until, *pairs]))

    def _valid(self, token_ids: Sequence[str]) -> list[dict[str, str]]:
        found: Any = _step("find")(self._client, [self.keys.token(token_id) for token_id in token_ids], [])
        return [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in found]

    def _stored(self, token_id: str) -> TokenRecord:
        found = self.find(token_id)
        if found is None:
            raise TokenRefused("the new token was removed by somebody else just now; make another")
        return found


def _step(name: str) -> Script:
    return load_script("gpuflow.tokens", name)
