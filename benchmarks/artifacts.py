"""What the artifact stores cost, measured against the plainest way to move the same bytes, in the same run.

    python benchmarks/artifacts.py [--quick] [--json]

Rows (a ratio above 1 means that ours is better):

* upload_mb_per_second          an attempt of four equal files and a manifest, as a worker stores a model of several
                                shards (`upload_attempt` to a local store: digests, renames, fsyncs), next to `cp -r`
                                of the same folder, which has none of them: it only fills the page cache
* upload_one_file_mb_per_second the same bytes in one file (`put`), next to `cp`: one stream of SHA-256, on one core
* digest_mb_per_second          that SHA-256 alone, nothing stored, next to the same `cp`: the bound of any store that
                                takes the digest of one file
* upload_synced_mb_per_second   one file next to `cp` and `sync` of the copy: as safe on the disk, still without digest
* upload_digested_mb_per_second one file next to `cp` and `sha256sum` of the copy, which is not on the disk then
* http_mb_per_second            the http store's `get` from the results service, with digest and fsync, next to a plain
                                download of the same file (urllib, neither) from a static file server of uvicorn
* capped_mb_per_second          four transfers at once, two up and two down over http, under one cap of a process, next
                                to the cap itself: within a tenth of 1 is right, above or below

Ours and the peer take turns on a warm page cache, now the one first and now the other; each writes what is not there
yet, after a `sync`; the medians are compared, and the first round does not count.
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


def turns(rounds: int, size: int, at: Path, *, ours: Callable[[], object], peer: Callable[[], object]) -> list[float]:
    """Let both move `size` bytes to `at`, in turns, and return the medians of their megabytes per second."""
    moves, rates = (ours, peer), ([], [])
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            clear(at)
            os.sync()
            started = time.perf_counter()
            moves[which]()
            seconds = time.perf_counter() - started
            if number:  # the first round warms the caches
                rates[which].append(size / MEGABYTE / seconds)
    clear(at)
    return [statistics.median(found) for found in rates]


def clear(place: Path) -> None:
    """Remove a file or a folder."""
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)


def shell(command: str, *paths: Path) -> Callable[[], object]:
    """Return what runs a command, in which "$0", "$1" are the paths."""
    return lambda: subprocess.run(["sh", "-c", command, *paths], check=True)


def upload(folder: Path, source: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure the local store."""
    from gpuflow.artifacts.destination import upload_attempt
    from gpuflow.artifacts.partial import file_digest
    from gpuflow.artifacts.store import open_store
    from gpuflow.settings import Settings

    store, size = open_store(folder.as_uri(), settings=Settings()), source.stat().st_size
    shards, at = split(source, folder / "shards"), folder / "task-1"
    names = sorted(path.name for path in shards.iterdir())

    def several() -> None:
        upload_attempt(store, shards, at.name, 1, names)

    def one() -> None:
        store.put(source, at.name)

    def row(metric: str, ours: Callable[[], object], peer: Callable[[], object], peer_name: str) -> dict[str, Any]:
        rates = turns(rounds, size, at, ours=ours, peer=peer)
        return harness.row(metric, *rates, "MB/s", more_is_better=True, peer_name=peer_name)

    copy = shell('exec cp "$0" "$1"', source, at)
    yield row("upload_mb_per_second", several, shell('exec cp -r "$0" "$1"', shards, at), "cp -r of four files")
    yield row("upload_one_file_mb_per_second", one, copy, "cp")
    yield row("digest_mb_per_second", lambda: file_digest(source), copy, "cp")
    yield row("upload_synced_mb_per_second", one, shell('cp "$0" "$1"; sync "$1"', source, at), "cp and sync")
    digested = shell('cp "$0" "$1"; sha256sum "$1" > /dev/null', source, at)
    yield row("upload_digested_mb_per_second", one, digested, "cp and sha256sum")


def split(source: Path, folder: Path) -> Path:
    """Make a folder of four files, which together are the source, and a manifest."""
    folder.mkdir()
    with source.open("rb") as stream:
        for number in range(4):
            (folder / f"model-{number + 1}-of-4.bin").write_bytes(stream.read(source.stat().st_size // 4))
    (folder / "manifest.json").write_text("{}")
    return folder


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
        target = folder / "moved"
        ours, peer = turns(
            rounds,
            stored.size,
            target,
            ours=lambda: store.get("task-1/moved", target, sha256=stored.sha256),
            peer=lambda: plain_download(f"{static_url}/{source.name}", target),
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
    size, rounds = (128 << 20, 3) if arguments.quick else (512 << 20, 9)
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
