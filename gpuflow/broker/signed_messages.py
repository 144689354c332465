"""Signatures of messages: all of a message is signed as it goes to the broker, but for the time that Redis stamps.

That is when it was queued first (`at`). What else it holds is signed, hints, delivery tag and unknown parts too, with
the queues in which it may wait and the owner of its task. Who gives a message another tag signs it anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kombu.utils.json import dumps

from gpuflow.broker.keys import Keys
from gpuflow.broker.messages import ETA_HEADER
from gpuflow.signatures import Signature, SignatureRefused, Signer

#: Header with the signature of a message.
SIGNATURE_HEADER: Final = "gpuflow_signature"
#: Headers that are signed with it: the queues in which it may wait, and whose task it is (left out without an owner).
QUEUES_HEADER: Final = "gpuflow_queues"
OWNER_HEADER: Final = "gpuflow_owner"


def with_signature(
    signer: Signer,
    message: Mapping[str, Any],
    queues: Sequence[str],
    *,
    hints: Mapping[str, Any] | None = None,
    owner: str | None = None,
) -> dict[str, Any]:
    """Return a message as it is to be written to the broker, signed. `hints` will stand before it.

    `owner` None: as it stands in the headers.
    """
    headers = {**(message.get("headers") or {}), QUEUES_HEADER: list(queues)}
    headers.pop(SIGNATURE_HEADER, None)
    if owner is not None:
        headers.pop(OWNER_HEADER, None)
        headers.update({OWNER_HEADER: owner} if owner else {})
    made = {**message, "headers": headers}
    document = _document({**(hints or {}), **json.loads(dumps(made))})
    token = signer.sign("message", document, not_before=_not_before(headers))
    return {**made, "headers": {**headers, SIGNATURE_HEADER: token}}


def checked(
    signer: Signer, raw: str, *, queue: str | None, task_id: str | None = None, is_timed: bool = True
) -> Signature:
    """Return the signature of a message that stood in `queue`. Raises SignatureRefused.

    `queue` None: of a message that a record holds. `task_id`: whose message it must be. With `is_timed` False it may
    be of whatever age.
    """
    whole = _read(raw)
    headers = whole["headers"]
    try:
        found = signer.check("message", _document(whole), headers.get(SIGNATURE_HEADER), is_timed=is_timed)
    except RecursionError:
        raise SignatureRefused("malformed", "the message nests too deep") from None
    if task_id is not None and headers.get("id") != task_id:
        raise SignatureRefused("forged", "the message that the record holds is one of another task")
    if queue is not None and queue not in (headers.get(QUEUES_HEADER) or ()):
        raise SignatureRefused("queue", f"the message was signed for other queues than {queue!a}")
    return found


def require_unused(client: Any, keys: Keys, signature: Signature) -> None:
    """Raise SignatureRefused for the signature of a message that was acknowledged; redis errors."""
    if client.exists(keys.used(signature.id)):
        raise SignatureRefused("replayed", "the message was acknowledged before: this is a copy of it")


def signed_anew(signer: Signer, raw: str, task_id: str, tag: str) -> str:
    """Return the text of a stored message with another delivery tag and a new signature. Raises SignatureRefused.

    Of whatever age it is: it gets a new life. A message without a signature stays as it is, where that is not refused.
    """
    try:
        checked(signer, raw, queue=None, task_id=task_id, is_timed=False)
    except SignatureRefused:
        if signer.requires:
            raise
        return raw
    whole = _read(raw)
    signature, former = whole["headers"][SIGNATURE_HEADER], whole["properties"]["delivery_tag"]
    whole["properties"]["delivery_tag"] = tag
    return raw.replace(json.dumps(former), json.dumps(tag), 1).replace(
        signature, signer.sign("message", _document(whole)), 1
    )


def signed_call(signer: Signer, digest: str, spec: str) -> str:
    """Return the spec of a call as the calls of its run hold it: JSON with a signature in it.

    A run executes what stands there, not what its message holds. A team's own task has no spec there, and runs by its
    message.
    """
    document = json.loads(spec)
    if not document:
        return spec
    token = signer.sign("call", {"digest": digest, "spec": document})
    return json.dumps({**document, SIGNATURE_HEADER: token}, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class StoredCall:
    """One call of a run: its spec, {} for one of a team's own task, and why it is not to be executed, if it is not."""

    spec: dict[str, Any]
    refused: SignatureRefused | None = None


def stored_call(signer: Signer | None, digest: str, text: str) -> StoredCall:
    """Return a call as it stands among the calls of its run. Raises ValueError for one that is no mapping."""
    spec = json.loads(text)
    if not isinstance(spec, dict):
        raise ValueError("the spec of the call is no mapping")
    token = spec.pop(SIGNATURE_HEADER, None)
    if signer is not None and signer.requires and spec:
        try:
            signer.check("call", {"digest": digest, "spec": spec}, token)
        except SignatureRefused as error:
            return StoredCall(spec=spec, refused=error)
    return StoredCall(spec=spec)


def _read(raw: str) -> dict[str, Any]:
    try:
        whole = json.loads(raw, object_pairs_hook=_with_each_name_once)
    except (ValueError, RecursionError):
        raise SignatureRefused("malformed", "the message is not JSON") from None
    parts = isinstance(whole, dict) and isinstance(whole.get("headers"), dict)
    if not parts or not isinstance(whole.get("properties"), dict):
        raise SignatureRefused("malformed", "the message has no headers or no properties")
    return dict(whole)


def _with_each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; what reads the text otherwise (Lua, for the hints) would see the other one of two."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise SignatureRefused("malformed", "the message has a name twice")
    return found


def _document(whole: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: part for name, part in whole.items() if name != "at"},
        "headers": {name: value for name, value in whole["headers"].items() if name != SIGNATURE_HEADER},
    }


def _not_before(headers: Mapping[str, Any]) -> float:
    """Return when a delayed message is due, in Unix seconds; 0 for one that may be taken at once."""
    eta = headers.get(ETA_HEADER)
    if not isinstance(eta, str):
        return 0.0
    at = datetime.fromisoformat(eta)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


__all__ = [
    "OWNER_HEADER",
    "QUEUES_HEADER",
    "SIGNATURE_HEADER",
    "StoredCall",
    "checked",
    "require_unused",
    "signed_anew",
    "signed_call",
    "stored_call",
    "with_signature",
]
