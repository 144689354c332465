"""What must not be seen, and how it is hidden: every spelling of a secret's value becomes `***`. Pure.

Anyone may call it. It knows texts, names and task specs; not where a secret comes from (`worker.secret_sources`), nor
where a text goes to. Two means, used together: values that are known, in each of their usual spellings (plain,
URL-encoded, base64 at any alignment, hex, escaped as JSON or Python writes it), and shapes that are always secret (the
user part of a URL, an Authorization header).
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, quote_plus, unquote, urlsplit

MASK: Final = "***"
#: Shortest value that is looked for when somebody has declared it a secret, in characters.
LEAST_DECLARED: Final = 4
#: Shortest value that is looked for because its name or its place says that it is a secret, in characters.
LEAST_INFERRED: Final = 6
#: A shorter piece of base64 is found in texts by chance.
_LEAST_BASE64: Final = 6
#: A line of a secret of several lines (a key in PEM) is looked for by itself from this length on, in characters.
_LEAST_LINE: Final = 8

_VARIABLE: Final = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|(?:API|ACCESS|SECRET|PRIVATE|AUTH)?_?KEY|CREDENTIALS?|AUTH)$",
    re.IGNORECASE,
)
_FIELD: Final = re.compile(
    r"(?:^|_)(?:(?:hub|access|auth|api|bearer)_?token|api_?key|(?:secret|access|private)_?(?:access_?)?key|password|passwd|"
    r"secret|credentials?|authorization)$|^token$",
    re.IGNORECASE,
)
#: What stands for the password where the token is the user.
_NO_PASSWORDS: Final = frozenset({"x-oauth-basic", "x"})
_PLAIN_HEADERS: Final = frozenset({"content-type", "accept", "accept-language", "content-encoding", "user-agent"})
_SECRET_HEADER: Final = re.compile(
    r"^(?:proxy-)?authorization$|^cookie$|(?:^|[-_])(?:token|key|secret|password|credentials?|auth)$|api[-_]?key", re.I
)
#: With these schemes a user without a password may be a token; elsewhere it is a container, or `git`.
_WEB: Final = ("http://", "https://")
#: Parts of a spec that are the user's data: never searched for names and URLs.
_DATA_FIELDS: Final = frozenset({"items", "prompts", "preferences", "messages", "rows", "echo"})

#: The length of a scheme is bounded: without a bound, the time would grow with the square of a run of letters.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}://[^\s\"'<>\\]+")
_USER_PART: Final = re.compile(r"(?<=://)[^\s/?#\"'<>\\]+@")
_HEADER: Final = re.compile(
    r"""((?:proxy-)?authorization|x-(?:api-key|auth-token|worker-token|amz-security-token))(\\*["']?\s*[:=]\s*\\*["']?)"""
    r"""(?:(?:basic|bearer|token|digest|negotiate|apikey)\s+)?[^\s"',;}\\]+""",
    re.IGNORECASE,
)
_BEARER: Final = re.compile(r"\b(bearer\s+)(?=\S*\d)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_QUERY: Final = re.compile(
    r"([?&](?:[\w.-]*(?:token|signature|password|secret|api_?key|credential)|sig|key)=)[^&#\s\"'<>\\]+", re.IGNORECASE
)
_TOKEN: Final = re.compile(r"\b(?:hf_|ghp_|glpat-|sk-)[A-Za-z0-9_-]{20,}")


def is_secret_variable(name: str) -> bool:
    """Say whether the value of an environment variable of this name is to be hidden: `HF_TOKEN`, `DB_PASSWORD`."""
    return _VARIABLE.search(name) is not None


def mask_shapes(text: str) -> str:
    """Return the text without user parts of URLs, Authorization headers, signed queries and hub tokens."""
    if "://" in text:
        text = _QUERY.sub(rf"\g<1>{MASK}", _USER_PART.sub(f"{MASK}@", text))
    text = _HEADER.sub(rf"\g<1>\g<2>{MASK}", text)
    return _TOKEN.sub(MASK, _BEARER.sub(rf"\g<1>{MASK}", text))


class Redactor:
    """Hides known values. Immutable; safe to use from several threads."""

    def __init__(self, declared: Iterable[str] = (), inferred: Iterable[str] = ()) -> None:
        self._values = {value for value in declared if len(value) >= LEAST_DECLARED}
        self._values |= {value for value in inferred if len(value) >= LEAST_INFERRED}
        needles = {spelling for value in self._values for spelling in spellings(value)}
        self._needles = sorted(needles, key=lambda needle: (-len(needle), needle))

    def values(self, text: str) -> str:
        """Return the text with every spelling of a known value replaced."""
        for needle in self._needles:
            if needle in text:
                text = text.replace(needle, MASK)
        return text

    def text(self, text: str) -> str:
        """Return the text with known values and secret shapes replaced: for messages, logs and errors."""
        return mask_shapes(self.values(text))

    def line(self, line: bytes) -> bytes:
        """Return a line of a log, in whatever encoding it is, as `text` does."""
        return self.text(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def data(self, value: Any, *, shapes: bool = True) -> Any:
        """Return JSON-like data with its texts, keys too, as `text` returns them, or `values` without `shapes`."""
        if isinstance(value, str):
            return self.text(value) if shapes else self.values(value)
        if isinstance(value, Mapping):
            return {self.data(key, shapes=shapes): self.data(item, shapes=shapes) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(item, shapes=shapes) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool) and str(value) in self._values:
            return MASK
        return value


def spellings(value: str) -> set[str]:
    """Return the texts in which a value may appear: itself, and as the usual encodings write it."""
    raw = value.encode("utf-8", "surrogateescape")
    found = {value, raw.hex(), raw.hex().upper(), repr(value)[1:-1]}
    for ascii_only in (True, False):
        once = json.dumps(value, ensure_ascii=ascii_only)[1:-1]
        found |= {once, once.replace("/", "\\/"), json.dumps(once, ensure_ascii=ascii_only)[1:-1]}
    for encoded in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
        found |= {encoded, re.sub(r"%[0-9A-F]{2}", lambda code: code[0].lower(), encoded)}
    found |= set(_base64_spellings(raw))
    if "\n" in value:
        found |= {line.strip() for line in value.splitlines() if len(line.strip()) >= _LEAST_LINE}
    return found


def _base64_spellings(raw: bytes) -> Iterator[str]:
    """Yield what stands in any base64 text that holds the bytes, wherever they begin in it."""
    for before in range(3):
        text = base64.b64encode(b"\0" * before + raw).decode()
        core = text[math.ceil(before * 8 / 6) : (before + len(raw)) * 8 // 6]
        for spelling in (core, text if not before else core):
            if len(spelling) >= _LEAST_BASE64:
                yield spelling
                yield spelling.replace("+", "-").replace("/", "_")


def url_secrets(text: str) -> Iterator[str]:
    """Yield the password of every URL in a text, or its user where that is all it has; as written and as meant."""
    for found in _URL.finditer(text):
        try:
            user, _, password = urlsplit(found[0]).netloc.rpartition("@")[0].partition(":")
        except ValueError:
            continue
        part = user if password in ("", *_NO_PASSWORDS) else password
        yield from {part, unquote(part)} - {""}


def secrets_in_environment(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of an environment that are secret by the name of their variable, or as part of a URL."""
    for name, value in environment.items():
        if is_secret_variable(name) and not _is_path(value):
            yield value
        if "://" in value:
            yield from url_secrets(value)


def _is_path(value: str) -> bool:
    try:
        return value.startswith("/") and Path(value).exists()
    except (OSError, ValueError):
        return False


def secrets_in_spec(spec: Any) -> Iterator[str]:
    """Yield what a user has written into a task spec as plain text and is secret by its name or place.

    Headers, fields such as `api_key`, variables of `env` with a secret name, and the user parts of URLs. Data (items,
    prompts) is not searched, and `${...}` has no value yet.
    """
    for field, name, value in _places(spec):
        if "${" in value:
            continue
        if field == "headers":
            yield value
            yield value.partition(" ")[2]
        elif field == "secret":
            yield value
        if name != "notify" and "://" in value:
            yield from url_secrets(value)


def written_secrets(spec: Any) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and the kind (`header`, `variable`, `field`, `url`) of what looks like a secret in plain text.

    What is said by `${...}` is not; nor are paths, and values so short that they could not be hidden.
    """
    yield from _written(spec, (), "")


def _written(value: Any, path: tuple[str | int, ...], parent: str) -> Iterator[tuple[tuple[str | int, ...], str]]:
    name = str(path[-1]) if path and isinstance(path[-1], str) else ""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if str(key) not in _DATA_FIELDS and str(key) != "columns":
                yield from _written(item, (*path, str(key)), name)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _written(item, (*path, number), parent)
    elif isinstance(value, str) and "${" not in value:
        if len(value) >= LEAST_INFERRED and not _is_path(value) and (kind := _written_kind(parent, name)):
            yield path, kind
        elif "://" in value and any(_urls_with_secrets(value)):
            yield path, "url"


def _written_kind(parent: str, name: str) -> str:
    if parent == "headers":
        return "header" if _SECRET_HEADER.search(name) else ""
    if parent == "env":
        return "variable" if is_secret_variable(name) else ""
    return "field" if _FIELD.search(_snake(name)) else ""


def _urls_with_secrets(text: str) -> Iterator[bool]:
    for found in _URL.finditer(text):
        with contextlib.suppress(ValueError):
            user, _, password = urlsplit(found[0]).netloc.rpartition("@")[0].partition(":")
            yield bool(password) or (found[0].startswith(_WEB) and len(user) >= LEAST_INFERRED)


def _places(value: Any, name: str = "", kind: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, text) of every text outside of data; the kind is `headers`, `secret` or empty."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if str(key) not in _DATA_FIELDS:
                yield from _places(item, str(key), _kind(name, str(key)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _places(item, name, kind)
    elif isinstance(value, str):
        yield kind, name, value


def _kind(parent: str, name: str) -> str:
    if parent == "headers":
        return "" if name.lower() in _PLAIN_HEADERS else "headers"
    secret = is_secret_variable(name) if parent == "env" else _FIELD.search(_snake(name)) is not None
    return "secret" if secret else ""


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)


def public_spec(spec: Any) -> Any:
    """Return a task spec as others may see it: headers, secret fields, secret variables and URLs without secrets."""
    return _public(spec, "", "")


def _public(value: Any, name: str, kind: str) -> Any:
    if isinstance(value, Mapping):
        shown = {
            key: _shapes_masked(item) if key in _DATA_FIELDS else _public(item, str(key), _kind(name, str(key)))
            for key, item in value.items()
        }
        is_hook = name == "notify" or (name == "destination" and shown.get("type") == "callback")
        if is_hook and isinstance(shown.get("url"), str):
            shown["url"] = _host_of(shown["url"])
        return shown
    if isinstance(value, list | tuple):
        return [_public(item, name, kind) for item in value]
    if isinstance(value, str):
        return MASK if kind and "${" not in value else mask_shapes(value)
    return MASK if kind and value is not None and not isinstance(value, bool) else value


def _shapes_masked(value: Any) -> Any:
    return _NOTHING.data(value)


def _host_of(url: str) -> str:
    """Return a URL without what follows its host: the path of a web hook is often its key."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*://[^/?#]*)(.*)", url, re.DOTALL)
    return f"{found[1]}/{MASK}" if found and found[2] not in ("", "/") else url


#: Knows no value, so it hides shapes alone.
_NOTHING: Final = Redactor()


class Known:
    """The redactors of this process, for texts that belong to no single task, such as a worker's log lines."""

    def __init__(self) -> None:
        self._redactors: tuple[Redactor, ...] = ()
        self._lock = threading.Lock()

    def add(self, redactor: Redactor) -> None:
        """Hide the values of a redactor from now on."""
        with self._lock:
            self._redactors = (*self._redactors, redactor)

    def remove(self, redactor: Redactor) -> None:
        """Forget a redactor."""
        with self._lock:
            self._redactors = tuple(one for one in self._redactors if one is not redactor)

    def text(self, text: str) -> str:
        """Return the text without the values of any redactor, and without secret shapes."""
        for redactor in self._redactors:
            text = redactor.values(text)
        return mask_shapes(text)


#: What this process hides in its own log lines and error records.
known: Final = Known()
