"""Signatures of what decides what a worker runs: HMAC-SHA-256 by a key that only the fleet's own processes hold.

A signature is a text, `1.<key id>.<signed at, microseconds>.<valid until, seconds>.<HMAC>`. It covers these parts, the
kind of what is signed, the prefix of the fleet, and the document in its canonical form: no signature is one of
something else, of another fleet, or of another time. Whoever checks has the key too and could sign.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from gpuflow.errors import GPUFlowError, InvalidSettings
from gpuflow.key_files import read_key_file, require_length
from gpuflow.settings import Settings

#: `sign` signs and takes what is not signed, `require` signs and refuses it.
Mode = Literal["sign", "require"]
#: What is signed: a message, the template of a pipeline, one call of a merged run, a schedule, a served model.
Kind = Literal["message", "pipeline", "call", "schedule", "served"]
#: Why a signature is refused.
Reason = Literal["unsigned", "malformed", "unknown_key", "forged", "expired", "queue", "replayed"]

LEAST_KEY_BYTES: Final = 32
#: Most keys of a file: each is tried by its id alone, so more cost nothing but the reader's patience.
MOST_KEYS: Final = 16
_VERSION: Final = "1"
_SETTING: Final = "GPUFLOW_SIGNING_KEY_FILE"
#: What was used is remembered for so many seconds longer than its signature is valid: clocks of workers differ.
CLOCKS_SECONDS: Final = 86_400
#: Digits of a time in a signature: more are none.
_MOST_DIGITS: Final = 18


class SignatureRefused(GPUFlowError):
    """What is to be run is not signed by a holder of the fleet's key."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True, kw_only=True)
class SigningKey:
    """One key. `id` tells keys apart and nothing of the key."""

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """Return a digest of the key."""
        return hmac.digest(self.secret, b"gpuflow signing key", "sha256").hex()[:16]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A signature that was found good. Times are Unix seconds on the signer's clock."""

    key: str
    at: float
    until: float
    mac: str

    @property
    def id(self) -> str:
        """Return what marks it as used: 128 bits of it."""
        return self.mac[:32]


def canonical(document: Any) -> bytes:
    """Return the one text of what JSON can hold. Two different documents have different ones: keys are in order,
    numbers keep their kind (1 is not 1.0), and all that is not ASCII is escaped.
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


def read_keys(path: Path) -> tuple[SigningKey, ...]:
    """Return the keys of a file, one a line, the first being the one that signs. Raises InvalidSettings."""
    lines = [line.strip() for line in read_key_file(path, _SETTING, private=True).splitlines()]
    secrets = [line for line in lines if line and not line.startswith(b"#")]
    for secret in secrets or [b""]:
        require_length(secret, LEAST_KEY_BYTES, path, _SETTING)
    if len(secrets) > MOST_KEYS:
        raise InvalidSettings(f"{_SETTING}: {path} holds {len(secrets)} keys; keep at most {MOST_KEYS}")
    return tuple(SigningKey(secret=secret) for secret in secrets)


class Signer:
    """Signs with the first key, and takes signatures of all of them. `fleet` is the prefix of its keys in Redis."""

    def __init__(self, keys: tuple[SigningKey, ...], *, mode: Mode, fleet: str, seconds: float) -> None:
        self.mode: Mode = mode
        self.keys = keys
        self._by_id = {key.id: key.secret for key in keys}
        self._own = keys[0].id
        self._fleet = fleet
        self._seconds = seconds

    @property
    def requires(self) -> bool:
        """Whether what is not signed is refused."""
        return self.mode == "require"

    def public(self) -> dict[str, Any]:
        """Return what the registry shows of it, JSON-able."""
        return {"mode": self.mode, "key": self._own, "accepts": sorted(self._by_id)}

    def sign(self, kind: Kind, document: Any, *, not_before: float = 0.0) -> str:
        """Return a signature of a document as JSON holds it; its time counts from `not_before` where that is later."""
        micros = time.time_ns() // 1000
        until = int(max(micros / 1e6, not_before) + self._seconds)
        head = f"{_VERSION}.{self._own}.{micros}.{until}"
        return f"{head}.{self._mac(self._by_id[self._own], kind, head, document)}"

    def check(self, kind: Kind, document: Any, signature: object, *, is_timed: bool = True) -> Signature:
        """Return the signature of a document. Raises SignatureRefused.

        With `is_timed` False one whose time is over is taken, too: what it belongs to is checked otherwise.
        """
        what = "message" if kind == "message" else f"record ({kind})"
        if signature is None or signature == "":
            raise SignatureRefused("unsigned", f"the {what} is not signed; submit with {_SETTING} and GPUFLOW_SIGNING")
        parts = signature.split(".") if isinstance(signature, str) and len(signature) < 200 else []
        if len(parts) != 5 or parts[0] != _VERSION or not all(_is_count(part) for part in parts[2:4]):
            raise SignatureRefused(
                "malformed", f"the signature of the {what} has another form than this version writes"
            )
        _, key, micros, until, mac = parts
        secret = self._by_id.get(key)
        if secret is None:
            raise SignatureRefused(
                "unknown_key", f"the {what} is signed with key {key[:16]!a}, which is not in {_SETTING}"
            )
        wanted = self._mac(secret, kind, ".".join(parts[:4]), document)
        if not hmac.compare_digest(wanted.encode(), mac.encode("utf-8", "replace")):
            raise SignatureRefused(
                "forged",
                f"the signature of the {what} does not fit it: it was changed, or queued again without the key",
            )
        found = Signature(key=key, at=int(micros) / 1e6, until=float(until), mac=mac)
        if is_timed and time.time() > found.until:
            raise SignatureRefused(
                "expired",
                f"the signature of the {what} is valid no more (GPUFLOW_SIGNATURE_DAYS); "
                "`gpuflow retry` signs a task anew",
            )
        return found

    def _mac(self, secret: bytes, kind: Kind, head: str, document: Any) -> str:
        text = canonical({"document": document, "fleet": self._fleet, "head": head, "kind": kind})
        return hmac.digest(secret, text, "sha256").hex()


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


@lru_cache(maxsize=16)
def _signer(mode: Mode, path: str, fleet: str, days: float) -> Signer:
    return Signer(read_keys(Path(path)), mode=mode, fleet=fleet, seconds=days * 86_400)


def signer_from(options: Mapping[str, Any] | None, fleet: str) -> Signer | None:
    """Return the signer of `signing_options`; None where nothing is signed. Raises InvalidSettings."""
    if not options:
        return None
    return _signer(options["mode"], options["key_file"], fleet, options["days"])


def signing_options(settings: Settings) -> dict[str, Any]:
    """Return what the transport is told of signing, JSON-able and without the key; {} where nothing is signed."""
    if settings.signing == "off" or settings.signing_key_file is None:
        return {}
    return {"mode": settings.signing, "key_file": str(settings.signing_key_file), "days": settings.signature_days}


def signer_of(settings: Settings) -> Signer | None:
    """Return the signer of a process; None where nothing is signed. Raises InvalidSettings."""
    return signer_from(signing_options(settings), settings.key_prefix)


__all__ = [
    "CLOCKS_SECONDS",
    "Kind",
    "Mode",
    "Reason",
    "Signature",
    "SignatureRefused",
    "Signer",
    "SigningKey",
    "canonical",
    "read_keys",
    "signer_from",
    "signer_of",
    "signing_options",
]
