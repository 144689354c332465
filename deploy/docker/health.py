"""Says by exit code 0 or 1 whether the service of this container is well: `health.py gateway|flower|beat|worker`.

`health.py worker-lives` is for who restarts what is not well: it says nothing against a worker whose broker is away.
"""

from __future__ import annotations

import os
import sys
import urllib.request

#: A beat that has not reconciled for so long is not well, in seconds.
BEAT_SECONDS = 90.0


def answers(url: str) -> bool:
    """Say whether a URL of this container answers with a success."""
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
        return bool(answer.status == 200)


def worker_beats() -> bool:
    """Say whether the broker has a heartbeat of a worker that runs on this host."""
    from gpuflow.celery_app import GPUFlow
    from gpuflow.fleet.registry import Fleet
    from gpuflow.settings import Settings

    app = GPUFlow("health", settings=Settings.load())
    host = os.uname().nodename
    return any(entry.is_there and entry.hostname == host for entry in Fleet(app.redis, app.keys).workers())


def worker_lives() -> bool:
    """Say whether a worker runs on this host, or that nobody can know."""
    try:
        return worker_beats()
    except Exception as error:  # noqa: BLE001 - the broker is away, or denies this
        print(f"not known: {error}", file=sys.stderr)
        return True


def beat_reconciles() -> bool:
    """Say whether a beat of the fleet has reconciled lately."""
    from gpuflow.broker.keys import RECONCILED_AT
    from gpuflow.celery_app import GPUFlow
    from gpuflow.settings import Settings

    app = GPUFlow("health", settings=Settings.load())
    seconds, _ = app.redis.time()
    return seconds - float(app.redis.hget(app.keys.metrics, RECONCILED_AT) or 0) < BEAT_SECONDS


CHECKS = {
    "gateway": lambda: answers(f"http://127.0.0.1:{os.environ.get('HEALTH_PORT', '8080')}/health"),
    "flower": lambda: answers(f"http://127.0.0.1:{os.environ.get('HEALTH_PORT', '5555')}/healthcheck"),
    "beat": beat_reconciles,
    "worker": worker_beats,
    "worker-lives": worker_lives,
}

if __name__ == "__main__":
    try:
        sys.exit(0 if CHECKS[sys.argv[1]]() else 1)
    except Exception as error:  # noqa: BLE001 - whatever it is, the service is not well
        print(f"{sys.argv[1:]}: {error}", file=sys.stderr)
        sys.exit(1)
