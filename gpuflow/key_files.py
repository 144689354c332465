"""Files with secret keys that an operator makes; a bad one is told of with the command that mends it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpuflow.errors import InvalidSettings


def read_key_file(path: Path, setting: str, *, private: bool = False) -> bytes:
    """Return what stands in a key file, without white space around it.

    With `private`, a file is refused that other users may read, that the group may change, or that belongs to a third
    user. Raises InvalidSettings.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read().strip()
    except OSError as error:
        raise InvalidSettings(
            f"{setting}: {path} cannot be read: {error.strerror}; make it by "
            f"`openssl rand -hex 32 > {path}` and let this user read it"
        ) from None
    bits = stat.S_IMODE(found.st_mode)
    if private and found.st_uid not in (0, os.geteuid()):
        raise InvalidSettings(f"{setting}: {path} belongs to another user, who can change it; chown it to this user")
    if private and bits & (stat.S_IWGRP | stat.S_IRWXO):
        raise InvalidSettings(f"{setting}: {path} has mode {bits:04o}: others can read or change it; chmod 600 {path}")
    return content


def require_length(secret: bytes, least_bytes: int, path: Path, setting: str) -> bytes:
    """Return a key that is long enough. Raises InvalidSettings."""
    if len(secret) < least_bytes:
        raise InvalidSettings(
            f"{setting}: {path} holds {len(secret)} bytes; a key has at least {least_bytes}: "
            f"`openssl rand -hex 32 > {path}`"
        )
    return secret
