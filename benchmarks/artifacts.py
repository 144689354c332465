"""What the artifact stores cost, measured against the plainest way to move the same bytes, in the same run.

    python benchmarks/artifacts.py [--quick] [--json]

Rows (a ratio above 1 means that ours is better):

* upload_mb_per_second          the local store's `put`, with digest, rename and fsync, next to plain `cp`, which has
                                none of them: it only fills the page cache
* upload_synced_mb_per_second   the same next to `cp` and `sync` of the copy: as safe on the disk, still without digest
* upload_digested_mb_per_second the same next to `cp` and `sha256sum` of the copy: the digest is what bounds ours
* http_mb_per_second            the http store's `get` from the results service, with digest and fsync, next to a plain
                                download of the same file (urllib, neither) from a static file server of uvicorn
* capped_mb_per_second          four transfers at once, two up and two down over http, under one cap of a process, next
                                to the cap itself: within a tenth of 1 is right, above or below

Ours and the peer take turns on a warm page cache, each writes a new file, and the medians are compared.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness

MEGABYTE = 1_000_000
CAP_BYTES_PER_SECOND = 40_000_000
TOKEN = "benchmark-token"
SERVER = """
import asyncio, os, socket, sys
import uvicorn
kind, folder = sys.argv[1:]
if kind == "static":
    from starlette.applications import Starlette
    from starlette.staticfiles import StaticFiles
    app = Starlette()
    app.mount("/", StaticFiles(directory=folder))
else:
    from gpuflow.gateway.app import create_app
    from gpuflow.settings import Settings
    app = create_app(Settings(results_dir=folder, worker_token=os.environ["GPUFLOW_WORKER_TOKEN"]))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve([listener]))
"""


def turns(rounds: int, size: int, *, ours: Callable[[Path], object], peer: Callable[[Path], object], at: Path) -> Any:
    """Let both write the file `at`, in turns, and return the medians of their megabytes per second."""
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for found, move in zip(rates, (ours, peer), strict=True):
            at.unlink(missing_ok=True)
            os.sync()
            started = time.perf_counter()
            move(at)
            seconds = time.perf_counter() - started
            assert at.stat().st_size == size
            if number:  # the first round warms the caches
                found.append(size / MEGABYTE / seconds)
    at.unlink()
    return [statistics.median(found) for found in rates]


def upload(folder: Path, source: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure the local store."""
    from gpuflow.artifacts.store import open_store
    from gpuflow.settings import Settings

    store = open_store(folder.as_uri(), settings=Settings())
    for metric, peer_name, tail in (
        ("upload_mb_per_second", "cp", ""),
        ("upload_synced_mb_per_second", "cp and sync", '; sync "$1"'),
        ("upload_digested_mb_per_second", "cp and sha256sum", '; sha256sum "$1" > /dev/null'),
    ):
        command = f'cp "$0" "$1"{tail}'
        ours, peer = turns(
            rounds,
            source.stat().st_size,
            ours=lambda target: store.put(source, target.name),
            peer=lambda target, command=command: subprocess.run(["sh", "-c", command, source, target], check=True),
            at=folder / "moved",
        )
        yield harness.row(metric, ours, peer, "MB/s", more_is_better=True, peer_name=peer_name)


def serve(kind: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a server in a process of its own; return it and its URL."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, kind, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GPUFLOW_WORKER_TOKEN": TOKEN},
    )
    assert server.stdout is not None
    return server, f"http://127.0.0.1:{int(server.stdout.readline())}"


def plain_download(url: str, target: Path) -> None:
    """Fetch a file as a script would."""
    with urllib.request.urlopen(url) as answer, target.open("wb") as file:
        shutil.copyfileobj(answer, file, 1 << 20)


def http(folder: Path, source: Path, rounds: int) -> dict[str, Any]:
    """Measure the http store."""
    from gpuflow.artifacts.store import open_store
    from gpuflow.settings import Settings

    results = folder / "results"
    results.mkdir()
    service, service_url = serve("service", results)
    static, static_url = serve("static", source.parent)
    try:
        store = open_store(f"{service_url}/api/v1/results", settings=Settings(), token=TOKEN)
        stored = store.put(source, "task-1/moved")
        ours, peer = turns(
            rounds,
            stored.size,
            ours=lambda target: store.get("task-1/moved", target, sha256=stored.sha256),
            peer=lambda target: plain_download(f"{static_url}/{source.name}", target),
            at=folder / "moved",
        )
    finally:
        for server in (service, static):
            server.terminate()
            server.wait(timeout=30)
    return harness.row("http_mb_per_second", ours, peer, "MB/s", more_is_better=True, peer_name="uvicorn, static files")


def capped(folder: Path, seconds: int) -> dict[str, Any]:
    """Measure what several transfers at once make of a cap."""
    from gpuflow.artifacts.store import open_store
    from gpuflow.settings import Settings

    size = CAP_BYTES_PER_SECOND * seconds // 4
    results = folder / "capped"
    results.mkdir()
    source = folder / "capped.bin"
    source.write_bytes(os.urandom(size))
    service, url = serve("service", results)
    try:
        free = open_store(f"{url}/api/v1/results", settings=Settings(), token=TOKEN)
        for number in range(2):
            free.put(source, f"task-1/{number}")
        settings = Settings(worker_network_bandwidth_bytes_per_second=CAP_BYTES_PER_SECOND)
        paced = open_store(f"{url}/api/v1/results", settings=settings, token=TOKEN)
        started = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            for number in range(2):
                pool.submit(paced.put, source, f"task-2/{number}")
                pool.submit(paced.get, f"task-1/{number}", folder / f"capped-{number}")
        rate = 4 * size / MEGABYTE / (time.perf_counter() - started)
    finally:
        service.terminate()
        service.wait(timeout=30)
    return harness.row(
        "capped_mb_per_second", rate, CAP_BYTES_PER_SECOND / MEGABYTE, "MB/s", more_is_better=True, peer_name="the cap"
    )


def main() -> None:
    """Measure all rows."""
    arguments = harness.options(__doc__ or "")
    size, rounds = (128 << 20, 3) if arguments.quick else (512 << 20, 7)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-") as name:
        folder = Path(name)
        source = folder / "source" / "artifact.bin"
        source.parent.mkdir()
        with source.open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
        rows = [
            *upload(folder, source, rounds),
            http(folder, source, rounds),
            capped(folder, 2 if arguments.quick else 10),
        ]
    harness.show("artifacts", rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
