"""What the HTTP gateway costs, next to a bare FastAPI app with one Redis write, and to vLLM's own OpenAI server.

    python benchmarks/gateway.py [--quick] [--json] [--without-ttft]

Rows (a ratio above 1 means that ours is better):

* submit_rps       tasks submitted per second over 16 connections: ours checks the template, routes it, and writes
                   record, message and index in one step; the peer writes the body into a stream
* fanout_first     seconds from one event until each of 500 readers of its stream has it
* fanout_events    events per second that 500 readers of one stream get
* ttft_p50, _p95   seconds to the first text of a streaming chat of a served model, 16 clients at once; the peer is
                   vLLM's OpenAI server with the same model, arguments, prompts and sampling, in turns
* ttft_one_p50     the same for one client at a time

Each server is one process. The readers of ours share one look at the stream; each reader of the peer asks Redis by
itself. The rows of ttft need the environment vllm (`gpuflow env create vllm`) and load two models, a minute or more:
they are left out with --quick and --without-ttft.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gateway_first_token
import harness
import redis

CONNECTIONS: Final = 16
READERS: Final = 500
PEER: Final = "bare FastAPI, one XADD"
FAN_PEER: Final = "bare FastAPI, one XREAD loop a reader"
TOKEN: Final = "token-of-the-benchmark-0123456789"
_BODY: Final = json.dumps({"taskType": "echo", "echo": {"output": 1}}).encode()
_MARK: Final = b"mark-"


@dataclass(frozen=True)
class Server:
    """One of the two, and where it listens. `tasks` is the path of its tasks."""

    process: subprocess.Popen[str]
    port: int
    tasks: str

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return a request as it goes over the wire."""
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"{head}\r\n".encode() + body


async def answered(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer with a length; return its status and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, length = int(head.split(b" ", 2)[1]), 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return status, await reader.readexactly(length)


async def submit(server: Server, count: int) -> tuple[float, str]:
    """Submit `count` tasks; return how many a second, and the id of the last one."""
    request = server.request("POST", server.tasks, _BODY)
    left, last = count, ""

    async def client() -> None:
        nonlocal left, last
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        while left > 0:
            left -= 1
            writer.write(request)
            status, body = await answered(reader)
            if status != 201:
                raise SystemExit(f"a submit was answered {status}: {body[:500]!r}")
            last = json.loads(body)["id"]
        writer.close()
        await writer.wait_closed()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    return count / (time.perf_counter() - started), last


async def fan_out(server: Server, broker: Any, task: str, events: int) -> tuple[float, float]:
    """Return the seconds until every reader has the first event, and the events a second of all readers."""
    request = server.request("GET", f"{server.tasks}/{task}/events")
    opened = 0
    first_seen: list[float] = []
    all_seen: list[float] = []

    async def follow() -> None:
        nonlocal opened
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        await reader.readuntil(b"\r\n\r\n")
        opened += 1
        seen, tail, has_first = 0, b"", False
        while seen < events + 1:
            data = await reader.read(1 << 16)
            if not data:
                raise SystemExit("a stream of events ended early")
            text = tail + data
            seen += text.count(_MARK)
            cut = text.rfind(_MARK)
            tail = text[cut + len(_MARK) :][-len(_MARK) :] if cut >= 0 else text[-len(_MARK) :]
            if seen and not has_first:
                has_first = True
                first_seen.append(time.perf_counter())
        all_seen.append(time.perf_counter())
        writer.close()

    followers = [asyncio.create_task(follow()) for _ in range(READERS)]
    try:
        while opened < READERS:
            await asyncio.sleep(0.01)
            for task_ in followers:
                if task_.done():
                    task_.result()
        await asyncio.sleep(0.5)  # until all wait for what comes
        append(broker, task, 1)
        began = time.perf_counter()
        while len(first_seen) < READERS:
            await asyncio.sleep(0.001)
        first = max(first_seen) - began
        began = time.perf_counter()
        append(broker, task, events)
        await asyncio.gather(*followers)
        return first, READERS * events / (max(all_seen) - began)
    finally:
        for one in followers:
            one.cancel()
        await asyncio.gather(*followers, return_exceptions=True)


def append(broker: Any, task: str, count: int) -> None:
    """Append events to the stream of a task, as a worker does."""
    pipe = broker.pipeline(transaction=False)
    for number in range(count):
        pipe.xadd(f"events:{task}", {"event": json.dumps({"event": "log", "line": f"mark-{number:06d}"})})
    pipe.execute()


def start(folder: Path, name: str, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a server; its log is in the folder."""
    environment = {**os.environ, **env}
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)


def start_ours(folder: Path, url: str) -> Server:
    """Start the gateway."""
    env = {
        "REDIS_URL": url,
        "RESULTS_DIR": str(folder / "results"),
        "GPUFLOW_STATE_DIR": str(folder / "state"),
        "GPUFLOW_WORKER_TOKEN": TOKEN,
        "PYTHONUNBUFFERED": "1",
    }
    code = "from gpuflow.cli import main; main()"
    process = start(folder, "ours", [sys.executable, "-c", code, "gateway", "--port", "0"], env)
    assert process.stdout is not None
    first = process.stdout.readline()
    if not first.startswith("gateway: http://"):
        raise SystemExit(f"the gateway did not start: {(folder / 'ours.log').read_text()[-2000:]}")
    return Server(process, int(first.strip().rpartition(":")[2].rstrip("/")), "/api/v1/tasks")


def gateway(folder: Path, url: str) -> tuple[subprocess.Popen[str], int]:
    """Start the gateway; return it and its port."""
    server = start_ours(folder, url)
    return server.process, server.port


def start_peer(folder: Path, url: str) -> Server:
    """Start the bare app."""
    code = (
        "import socket, uvicorn\n"
        "from gateway_peer import app\n"
        "listening = socket.create_server(('127.0.0.1', 0), backlog=1024)\n"
        "print(listening.getsockname()[1], flush=True)\n"
        "uvicorn.Server(uvicorn.Config(app, log_level='warning')).run(sockets=[listening])\n"
    )
    path = os.pathsep.join([str(harness.HERE), os.environ.get("PYTHONPATH", "")])
    process = start(folder, "peer", [sys.executable, "-c", code], {"REDIS_URL": url, "PYTHONPATH": path})
    assert process.stdout is not None
    return Server(process, int(process.stdout.readline()), "/tasks")


async def measure(rounds: int, submits: int, fans: int, events: int, folder: Path) -> list[dict[str, Any]]:
    """Run everything and return the rows."""
    broker, url = harness.start_broker(folder / "broker")
    client: Any = redis.Redis.from_url(url, decode_responses=True)
    servers: dict[str, Server] = {}
    found: dict[str, dict[str, list[float]]] = {}
    try:
        servers = {"ours": start_ours(folder, url), "peer": start_peer(folder, url)}
        found = {name: {"rps": [], "first": [], "events": []} for name in servers}
        tasks = {name: (await submit(server, 50))[1] for name, server in servers.items()}
        for number in range(rounds):
            harness.progress(f"submits, round {number + 1} of {rounds}")
            for name, server in servers.items():
                found[name]["rps"].append((await submit(server, submits))[0])
        for number in range(fans):
            harness.progress(f"{READERS} readers, round {number + 1} of {fans}")
            for name, server in servers.items():
                _, tasks[name] = await submit(server, 1)
                first, rate = await fan_out(server, client, tasks[name], events)
                found[name]["first"].append(first)
                found[name]["events"].append(rate)
    finally:
        harness.stop([server.process for server in servers.values()])  # type: ignore[misc]
        client.close()
        broker.stop()
    median = {name: {what: statistics.median(values) for what, values in rows.items()} for name, rows in found.items()}
    ours, peer = median["ours"], median["peer"]
    return [
        harness.row("submit_rps", ours["rps"], peer["rps"], "tasks/s", more_is_better=True, peer_name=PEER),
        harness.row("fanout_first", ours["first"], peer["first"], "s", more_is_better=False, peer_name=FAN_PEER),
        harness.row(
            "fanout_events", ours["events"], peer["events"], "events/s", more_is_better=True, peer_name=FAN_PEER
        ),
    ]


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__, {"--without-ttft": "leave out the rows that need vLLM"})
    python = None if given.quick or given.without_ttft else gateway_first_token.python_of_vllm()
    sizes = (3, 400, 2, 20) if given.quick else (5, 2000, 5, 50)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        rows = asyncio.run(measure(*sizes, Path(folder)))
    if python is None:
        harness.progress("the rows of ttft are left out, which need vLLM and two loads of a model")
    else:
        with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
            rows += gateway_first_token.measure(gateway_first_token.Rounds(), python, gateway, TOKEN, Path(folder))
    harness.show("gateway", rows, as_json=given.json)


if __name__ == "__main__":
    main()
