"""Loads the .lua files and runs them. A script is one atomic step; its keys and states are documented on its top.

`Script(client)` sends EVALSHA and, when the server does not know the script (after a restart), loads it and sends
EVALSHA again: a loaded script is never evicted, one that came by EVAL may be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.exceptions import NoScriptError


class Script:
    """One Lua step: its text, its digest, and how to run it on a client."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, client: redis.Redis, keys: Sequence[str], args: Sequence[str | bytes | int | float]) -> Any:
        """Run the step. Raises redis errors as they are."""
        try:
            return client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            self.load(client)
            return client.evalsha(self.sha, len(keys), *keys, *args)

    def many(
        self, client: redis.Redis, calls: Sequence[tuple[Sequence[str], Sequence[str | bytes | int | float]]]
    ) -> list[Any]:
        """Run the step for each of `calls` (keys, args) in one round trip; each is a step of its own.

        Sent again where the server does not know the script, so it must be idempotent. Raises the first redis error.
        """
        try:
            return self._sent(client, calls)
        except NoScriptError:
            self.load(client)
            return self._sent(client, calls)

    def _sent(self, client: redis.Redis, calls: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> list[Any]:
        pipe = client.pipeline(transaction=False)
        for keys, args in calls:
            pipe.evalsha(self.sha, len(keys), *keys, *args)
        return list(pipe.execute())

    def load(self, client: redis.Redis) -> None:
        """Make the script known to the server. Raises redis errors."""
        client.script_load(self.text)


@cache
def script_text(package: str, name: str) -> str:
    """Return the text of `<package>/lua/<name>.lua`."""
    return resources.files(package).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


@cache
def load_script(package: str, name: str, preamble: str = "") -> Script:
    """Return the script `<package>/lua/<name>.lua`, with `preamble` (shared Lua definitions) before it."""
    return Script(preamble + script_text(package, name))


def broker_script(name: str) -> Script:
    """Return a Lua step of the broker, with what the steps share before it."""
    return load_script("gpuflow.broker", name, script_text("gpuflow.broker", "common"))
