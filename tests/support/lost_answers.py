"""The calls of Lua steps, and each sent once more as by a client whose answer was lost."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from redis.client import NEVER_DECODE

from gpuflow.broker.scripts import Script

#: Answers of steps that change nothing: such a call, sent again, is one that came later.
_WORDS: Final = "refused lost live avoid newer final present young superseded behind running succeeded"
_NOTHING: Final = {0, None, *_WORDS.split()}
#: A key of its own, to look at a dump.
_SCRATCH: Final = "scratch"
#: Name, dump and remaining time of every key, in one answer.
_ALL: Final = """
local flat = {}
for _, name in ipairs(redis.call('KEYS', '*')) do
  flat[#flat + 1], flat[#flat + 2], flat[#flat + 3] = name, redis.call('DUMP', name), redis.call('PTTL', name)
end
return flat
"""
_READERS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "hash": lambda client, key: client.hgetall(key),
    "list": lambda client, key: client.lrange(key, 0, -1),
    "set": lambda client, key: client.smembers(key),
    "stream": lambda client, key: client.xrange(key),
    "string": lambda client, key: client.get(key),
    "zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
}


@dataclass(frozen=True)
class Call:
    """One call of a Lua step, to the byte."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[Any, ...]

    def send(self, client: Any) -> Any:
        """Send it, and return the answer."""
        return self.script(client, self.keys, self.args)


class Calls:
    """The last call of each caller that had an effect. A caller does nothing else before it has its answer."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._last: dict[Hashable, Call] = {}
        self._newest: Call | None = None

    @contextmanager
    def of(self, caller: Hashable) -> Iterator[None]:
        """Note the last call of this block as that of `caller`."""
        made: list[tuple[Call, Any]] = []
        real = Script.__call__

        def noting(script: Script, client: Any, keys: Any, args: Any) -> Any:
            answer = real(script, client, keys, args)
            made.append((Call(script, tuple(keys), tuple(args)), answer))
            return answer

        try:
            with patch.object(Script, "__call__", noting):
                yield
        finally:  # one who stops between two steps has taken the first of them
            self.over(caller)
            if made:
                self._newest, answer = made[-1]
                if answer == [] or (answer[0] if isinstance(answer, list) else answer) not in _NOTHING:
                    self._last[caller] = self._newest

    def over(self, caller: Hashable) -> None:
        """Note that the caller is gone, or has its answer."""
        self._last.pop(caller, None)

    def again(self) -> Any:
        """Send the newest call again, and return the answer; nothing changes by it."""
        assert self._newest is not None
        return self._send_again(self._newest)

    def repeat(self, ago: int) -> None:
        """Send again what one caller asked last; 0 is he who asked last of all. Nothing changes by it."""
        if self._last:
            self._send_again([*self._last.values()][-1 - ago % len(self._last)])

    def _send_again(self, call: Call) -> Any:
        before = self._everything()
        answer = call.send(self.client)
        after = self._everything()
        doubtful = {key for key, _ in before.items() ^ after.items()}
        changed = {key for key in doubtful if not self._is_the_same(before.get(key), after.get(key))}
        assert not changed, f"sent again, {call.args} changed {sorted(changed)}"
        return answer

    def _is_the_same(self, one: tuple[bytes, bool] | None, other: tuple[bytes, bool] | None) -> bool:
        """Whether two dumps hold the same: a hash that the server is resizing has another order each time."""
        if one is None or other is None or one[1] != other[1]:
            return False
        contents = []
        for dump, _ in (one, other):
            self.client.restore(_SCRATCH, 0, dump, replace=True)
            contents.append(_READERS[self.client.type(_SCRATCH)](self.client, _SCRATCH))
            self.client.delete(_SCRATCH)
        return bool(contents[0] == contents[1])

    def _everything(self) -> dict[str, tuple[bytes, bool]]:
        flat = self.client.execute_command("EVAL", _ALL, 0, **{NEVER_DECODE: True})
        return {
            name.decode(): (dump, ttl > 0) for name, dump, ttl in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        }
