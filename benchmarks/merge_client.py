"""One of the client processes of merge.py: sends the calls that it is given to one side, and waits for all answers.

Reads one JSON object for each round, with `side` and `calls` (specs), and answers with one line: the text of each call.
Every side is used in the same way, by Celery's own interface: `apply_async`, then `AsyncResult.get`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import merge_peer

#: How long one answer may take, in seconds.
ANSWER_SECONDS = 900
#: Settings of gpuflow by the name of its side.
GPUFLOW_SIDES: Mapping[str, Mapping[str, Any]] = {
    "merged": {},
    "unbatched": {"task_merge_max_batch_size": 1},
    "unmerged": {"enable_task_merge": False},
}


def senders() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return for each side what sends one call and returns its AsyncResult."""
    from gpuflow.celery_app import GPUFlow
    from gpuflow.settings import Settings

    settings = Settings.load()
    found: dict[str, Callable[[dict[str, Any]], Any]] = {
        "plain": lambda spec: merge_peer.generate.apply_async((spec,)),
        "locked": lambda spec: merge_peer.generate_once.apply_async((spec,)),
    }
    for side, changes in GPUFLOW_SIDES.items():
        app = GPUFlow("gpuflow", settings=settings.model_copy(update=dict(changes)))
        found[side] = lambda spec, app=app: app.send_task("gpuflow.inference", kwargs={"spec": spec})
    return found


def main() -> None:
    """Serve rounds until the end of the input."""
    send = senders()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        results = [send[given["side"]](spec) for spec in given["calls"]]
        texts = [result.get(timeout=ANSWER_SECONDS)["items"][0]["output"] for result in results]
        print(json.dumps(texts), flush=True)


if __name__ == "__main__":
    main()
