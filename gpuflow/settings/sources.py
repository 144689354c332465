"""Where the values of settings come from: the environment, then `gpuflow.toml`, then the default.

Called by `gpuflow.settings.model` alone. This file finds raw values and remembers their source; it knows the
names of the settings only as a mapping that is given to it, and judges no value.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from gpuflow.errors import InvalidSettings

#: Name of the settings file, looked for in the current folder unless GPUFLOW_CONFIG names another.
CONFIG_FILE_NAME: Final = "gpuflow.toml"
CONFIG_FILE_VARIABLE: Final = "GPUFLOW_CONFIG"
MASK: Final = "***"


@dataclass(frozen=True, kw_only=True)
class RawValue:
    """A value as it was found; `source` reads well after "from", a relative path is relative to `folder`."""

    value: Any
    source: str
    folder: Path


def mask_url(url: str) -> str:
    """Return the URL with its password replaced by ***; a URL without one comes back as it is."""
    url = re.sub(r"([?&]password=)[^&#]*", rf"\g<1>{MASK}", url)
    try:
        parts = urlsplit(url)
    except ValueError:
        return MASK
    if "@" not in parts.netloc:
        return url
    credentials, _, host = parts.netloc.rpartition("@")
    user, colon, _ = credentials.partition(":")
    shown = f"{user}:{MASK}" if colon else MASK
    return urlunsplit(parts._replace(netloc=f"{shown}@{host}"))


def unix_socket_url(url: str) -> str:
    """Return the address of a Unix socket as redis-py reads it; kombu's spelling `redis+socket:///...` is taken too.

    Raises ValueError when it names no absolute path.
    """
    parts = urlsplit(url)
    if parts.hostname or not parts.path.strip("/"):
        raise ValueError("the URL of a Unix socket names an absolute path, such as unix:///run/redis.sock?db=0")
    query = re.sub(r"(^|&)virtual_host=", r"\g<1>db=", parts.query)
    return f"unix://{parts.netloc}{parts.path}" + (f"?{query}" if query else "")


def store_url(url: str) -> str:
    """Return the URL of an artifact store without its last slash. Raises ValueError for one that names no store."""
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError("the URL has a user, a query or a fragment; tokens and keys have settings of their own")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError("a folder is named by its absolute path")
    elif parts.scheme not in ("http", "https", "s3") or not parts.hostname:
        raise ValueError("the URL must begin with file:///, http://, https:// or s3://")
    return url.rstrip("/") if parts.path.strip("/") else url


def executor_places(item: RawValue) -> Any:
    """Return the entries of GPUFLOW_EXECUTORS with their files (`owner.name=./file.py:Class`) as absolute paths."""
    entries = item.value.split(",") if isinstance(item.value, str) else item.value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return item.value
    return tuple(_absolute_place(entry.strip(), item.folder) for entry in entries if entry.strip())


def _absolute_place(entry: str, folder: Path) -> str:
    task_type, separator, place = entry.partition("=")
    file, colon, name = place.strip().rpartition(":")
    if not file.endswith(".py"):
        return entry
    return f"{task_type}{separator}{folder / Path(file).expanduser()}{colon}{name}"


def config_file(env: Mapping[str, str], cwd: Path) -> Path | None:
    """Return the settings file in use, or None. Raises InvalidSettings when GPUFLOW_CONFIG names none."""
    named = env.get(CONFIG_FILE_VARIABLE, "").strip()
    if named:
        path = cwd / Path(named).expanduser()
        if not path.is_file():
            raise InvalidSettings(f"{CONFIG_FILE_VARIABLE} names {named!r}, which is not a file; create it or unset it")
        return path
    path = cwd / CONFIG_FILE_NAME
    return path if path.is_file() else None


def from_environment(env: Mapping[str, str], names: Mapping[str, str], cwd: Path) -> dict[str, RawValue]:
    """Return the values set in the environment, by setting name. An empty variable counts as unset.

    `names` maps a setting's name to its environment variable.
    """
    return {
        name: RawValue(value=env[variable].strip(), source=f"environment variable {variable}", folder=cwd)
        for name, variable in names.items()
        if env.get(variable, "").strip()
    }


def from_file(path: Path, names: Mapping[str, str]) -> tuple[dict[str, RawValue], list[str]]:
    """Read a settings file: its values by setting name, and the mistakes in its keys, one line each.

    A key is a setting's name (`lease_seconds`) or its environment variable (`GPUFLOW_LEASE_SEC`). Raises
    InvalidSettings when the file cannot be read or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise InvalidSettings(f"cannot read {path}: {error.strerror}; mend its permissions") from error
    except UnicodeDecodeError as error:
        raise InvalidSettings(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidSettings(f"{path} is not valid TOML: {error}") from error
    by_key = {**{name: name for name in names}, **{variable: name for name, variable in names.items()}}
    values: dict[str, RawValue] = {}
    mistakes: list[str] = []
    for key, value in document.items():
        source = f"{path.name}:{_line_of(text, key)}"
        name = by_key.get(key)
        if name is None:
            mistakes.append(f"{source}: unknown setting {key!r}{_did_you_mean(key, list(by_key))}")
        elif name in values:
            mistakes.append(f"{source}: {key!r} sets {name} again (first at {values[name].source}); keep one")
        else:
            values[name] = RawValue(value=value, source=source, folder=path.parent)
    return values, mistakes


def check_host(entry: str) -> str:
    """Return an entry of GPUFLOW_ALLOW_HOSTS. Raises ValueError for one that can name nothing."""
    try:
        ipaddress.ip_network(entry, strict=False)
    except ValueError:
        if any(mark in entry for mark in "/:@ "):
            raise ValueError(f"{entry!r} is no name, glob or network; no port or URL is given here") from None
    return entry


def _did_you_mean(key: str, known: list[str]) -> str:
    same = [name for name in known if name.lower() == key.lower()]
    near = same or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return "; `gpuflow doctor` lists every setting"


def _line_of(text: str, key: str) -> int:
    pattern = re.compile(rf"""\s*(?:\[\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((n for n, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)
