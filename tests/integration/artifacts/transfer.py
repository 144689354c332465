"""One transfer in a process of its own, to be killed, starved of disk, or measured. Prints one JSON object a line.

The order, as JSON in argv: action put|get, url, token, name, path, settings; `stop_at` bytes at which it tells
"stopped" and waits to be killed; `file_limit` bytes that a file may have; `warm_up` a small stored file to get first.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from gpuflow.artifacts.store import open_store
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings
from tests.support.memory import peak_bytes


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(order: dict[str, Any]) -> None:
    store = open_store(order["url"], settings=Settings(**order["settings"]), token=order["token"])
    path, over = Path(order["path"]), 0

    def progress(count: int) -> None:
        nonlocal over
        over += count
        if over >= order.get("stop_at", float("inf")):
            tell(stopped=over)
            sys.stdin.read()

    if warm_up := order.get("warm_up"):
        store.get(warm_up, path.with_name("warm-up"))
    if limit := order.get("file_limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the warm-up does not hide what comes (proc(5))
    before = peak_bytes("self")
    try:
        if order["action"] == "put":
            stored = store.put(path, order["name"], progress=progress)
        else:
            stored = store.get(order["name"], path, progress=progress)
    except ArtifactError as error:
        tell(error=str(error))
    else:
        tell(sha256=stored.sha256, size=stored.size, extra_bytes=peak_bytes("self") - before)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
