"""Whether a server that starts takes all of its append-only file.

Most servers replay transactions with the rights of their user `default`, and leave out what it may not do. Each Lua
step of ours is such a transaction. Redis 7.0.15 does so, Valkey 9.1.2 does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: From this Valkey on everything is replayed, whatever `default` may do. No such Redis is known.
_REPLAYS_ALL: Final = (9, 1, 2)
#: Writes as ours are: what `default` has to be allowed. KEY stands for one of our keys.
_REPLAYED: Final = ("EXEC", "SET KEY v", "HSET KEY f v", "XADD KEY * f v", "ZADD KEY 1 m", "LPUSH KEY v")
#: Users that `gpuflow broker-users` and `gpuflow workers create` make: they may not ask.
_OURS: Final = "gpuflow-"

MEND: Final = (
    "write `user default off resetpass ~* &* +@all` into its aclfile, then ACL LOAD (without a file: ACL SETUSER and "
    "that line): nobody can log in as `default`, which may do everything"
)


class CannotBeSeen(Exception):
    """The user may not ask, or the server cannot tell."""


def left_out(client: Any, server: Mapping[str, Any], key_prefix: str) -> str:
    """Return what the user `default` of a server may not do, in the server's words; empty when it takes everything.

    `server` is its INFO. Raises CannotBeSeen, and redis errors when it is away.
    """
    import redis

    if numbers_of(server.get("valkey_version", "0")) >= _REPLAYS_ALL:
        return ""
    user = str(client.connection_pool.connection_kwargs.get("username") or "default")
    if user == "default":
        return ""  # it may write what we write
    if user.startswith(_OURS):
        raise CannotBeSeen(f"{user} may not ask")
    try:
        for command in _REPLAYED:
            words = (f"{key_prefix}gpuflow.replay" if word == "KEY" else word for word in command.split())
            answer = client.execute_command("ACL", "DRYRUN", "default", *words)
            told = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer)
            if told != "OK":
                return told
    except redis.ResponseError as error:
        raise CannotBeSeen(str(error)) from None
    return ""


def numbers_of(version: object) -> tuple[int, ...]:
    """Return the first three numbers of a version, as many as there are."""
    return tuple(int(part) for part in str(version).split(".")[:3] if part.isdecimal())
