"""What fleet_scale.py measures with: the counters of the Redis server, and how fast that server is here.

The server counts every command, those inside a Lua step too. The one command by which a reading is made is left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import redis

#: Commands of one round of the speed loop, and how long it lasts in seconds.
_BATCH = 1000
_SPEED_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The server's counters at one moment, or what they grew by. Times in seconds, sizes in bytes."""

    seconds: float
    commands: float
    cpu_seconds: float
    sent_bytes: float
    received_bytes: float
    memory_bytes: float
    dataset_bytes: float
    connections: float
    by_command: Mapping[str, float] = field(default_factory=dict)

    def per(self, count: float) -> dict[str, float]:
        """Return commands by name, each divided by `count`; those that hardly come are left out."""
        shares = {name: calls / count for name, calls in self.by_command.items()}
        return {name: share for name, share in shares.items() if share > 0.02}


class Meter:
    """Reads the counters of one server."""

    def __init__(self, url: str) -> None:
        self.client: Any = redis.Redis.from_url(url, decode_responses=True)

    def read(self) -> Reading:
        """Return the counters now, by one command."""
        info = self.client.info("everything")
        main = [info.get(f"used_cpu_{kind}_main_thread", info[f"used_cpu_{kind}"]) for kind in ("user", "sys")]
        prefix = "cmdstat_"
        return Reading(
            seconds=time.monotonic(),
            commands=info["total_commands_processed"],
            cpu_seconds=sum(main),
            sent_bytes=info["total_net_output_bytes"],
            received_bytes=info["total_net_input_bytes"],
            memory_bytes=info["used_memory"],
            dataset_bytes=info["used_memory_dataset"],
            connections=info["connected_clients"],
            by_command={
                name.removeprefix(prefix): stats["calls"] for name, stats in info.items() if name.startswith(prefix)
            },
        )

    def since(self, before: Reading) -> Reading:
        """Return what the counters grew by, without the reading itself."""
        now = self.read()
        calls = {name: count - before.by_command.get(name, 0) for name, count in now.by_command.items()}
        calls["info"] = calls.get("info", 0) - 1
        return Reading(
            seconds=now.seconds - before.seconds,
            commands=now.commands - before.commands - 1,
            cpu_seconds=now.cpu_seconds - before.cpu_seconds,
            sent_bytes=now.sent_bytes - before.sent_bytes,
            received_bytes=now.received_bytes - before.received_bytes,
            memory_bytes=now.memory_bytes - before.memory_bytes,
            dataset_bytes=now.dataset_bytes - before.dataset_bytes,
            connections=now.connections - before.connections,
            by_command=calls,
        )

    def over(self, seconds: float) -> Reading:
        """Return what the counters grow by within so many seconds."""
        before = self.read()
        time.sleep(seconds)
        return self.since(before)

    def speed(self) -> dict[str, float]:
        """Return how many SET, and EVALSHA of a script with one SET, the server does in a second on its one core.

        One connection sends a thousand at once, packed beforehand, and counts the bytes of the answers.
        """
        sha = self.client.script_load("return redis.call('SET', KEYS[1], ARGV[1])")
        words = {"SET": ("SET", "bench:speed", "1"), "EVALSHA": ("EVALSHA", sha, 1, "bench:speed", "1")}
        pool = self.client.connection_pool
        connection = pool.get_connection()
        rates = {}
        try:
            for name, command in words.items():
                packed = b"".join(connection.pack_command(*command)) * _BATCH
                started, done = time.perf_counter(), 0
                while time.perf_counter() - started < _SPEED_SECONDS:
                    _exchange(connection._sock, packed, len(b"+OK\r\n") * _BATCH)
                    done += _BATCH
                rates[name] = done / (time.perf_counter() - started)
        finally:
            pool.release(connection)
        return rates

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


def _exchange(line: Any, packed: bytes, answer_bytes: int) -> None:
    line.sendall(packed)
    left = answer_bytes
    while left > 0:
        left -= len(line.recv(65_536))
