"""The work of recovery.py: a task that notes each of its starts, and lasts until it is released."""

from __future__ import annotations

import json
import os
import time

import redis


def starts_key(name: str) -> str:
    """Return the list of the starts of a task."""
    return f"bench:starts:{name}"


def release_key(name: str) -> str:
    """Return the key whose presence ends a task."""
    return f"bench:release:{name}"


def hold(url: str, name: str, at_most_seconds: float) -> None:
    """Note the start (process id, time), then last until released, at most `at_most_seconds`."""
    client = redis.Redis.from_url(url)
    try:
        client.rpush(starts_key(name), json.dumps([os.getpid(), time.time()]))
        deadline = time.monotonic() + at_most_seconds
        while time.monotonic() < deadline and not client.exists(release_key(name)):
            time.sleep(0.05)
    finally:
        client.close()
