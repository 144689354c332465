"""Time to the first token of a streaming chat: through the gateway, and through vLLM's own OpenAI server.

Called by gateway.py. Both have the model loaded (`gpuflow serve` keeps ours so), with the same arguments of the engine,
and get the same prompts with the same sampling in turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import harness
from warm_inference import ARGUMENTS, folder_of_model, prompts, settled, source

CLIENTS: Final = 16
TOKENS: Final = 32
MODEL_NAME: Final = "warm"
PEER: Final = "vLLM's OpenAI server"
_LOAD_SECONDS: Final = 600.0
#: Idle threads spin no longer than those of a session do (executors/modeling/libraries.py): on shared cores that alone
#: would make a difference of several times, and it is the servers that are compared.
_ENGINE_ENV: Final = {
    "GOMP_SPINCOUNT": "1000",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


#: Starts the gateway of a broker, given the folder of the run and the broker's address; returns it and its port.
StartGateway: TypeAlias = Callable[[Path, str], tuple[subprocess.Popen[str], int]]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How much is measured: rounds of CLIENTS clients with `calls` each, and `singles` calls one at a time."""

    rounds: int = 4
    calls: int = 3
    singles: int = 10


def python_of_vllm() -> Path:
    """Return the Python that has vLLM. Ends with exit code 2 where the environment is not there."""
    from gpuflow.environments import python_of
    from gpuflow.errors import GPUFlowError
    from gpuflow.settings import Settings

    try:
        return python_of(Settings.load(), "vllm")
    except GPUFlowError as error:
        print(f"ttft: {error}; `--without-ttft` leaves these rows out", file=sys.stderr)
        raise SystemExit(2) from None


async def first_token(port: int, token: str, prompt: str) -> float:
    """Ask for a streamed chat, read all of it, and return the seconds to its first text."""
    body = json.dumps(
        {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    started, first = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    status = await reader.readline()
    while line := await reader.readline():
        if not first and line.startswith(b"data: {") and _text_of(json.loads(line[len(b"data: ") :])):
            first = time.perf_counter() - started
    writer.close()
    if not first:
        raise SystemExit(f"a chat brought no text; it was answered {status.decode().strip()!r}")
    return first


def _text_of(chunk: Mapping[str, Any]) -> str:
    return "".join(str(choice["delta"].get("content") or "") for choice in chunk.get("choices", []))


async def all_at_once(port: int, token: str, asked: list[str]) -> list[float]:
    """Return the seconds to the first token of all prompts, asked by CLIENTS clients, each one after the other."""
    waiting = iter(asked)

    async def client() -> list[float]:
        return [await first_token(port, token, prompt) for prompt in waiting]

    return [seconds for found in await asyncio.gather(*(client() for _ in range(CLIENTS))) for seconds in found]


def start_vllm(python: Path, model: Path, token: str, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start vLLM's server of a model; return it, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ARGUMENTS["vllm"]
    options = [
        *("--model", str(model), "--served-model-name", MODEL_NAME, "--api-key", token),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", arguments["dtype"], "--enforce-eager"),
        *("--max-model-len", str(arguments["max_model_len"]), "--max-num-seqs", str(arguments["max_num_seqs"])),
        "--disable-log-stats",
    ]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *options]
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **_ENGINE_ENV}, cwd=folder, stdout=log, stderr=log)
    return process, port


def wait_for_vllm(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + _LOAD_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"vLLM's server has ended: {log.read_text(errors='replace')[-2000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"vLLM's server does not answer after {_LOAD_SECONDS:g} s; see its log")


def serve_ours(url: str, folder: Path) -> None:
    """Have the model served by one replica, and wait until it is loaded."""
    engine = [f"--set=model.vllm.{name}={json.dumps(value)}" for name, value in ARGUMENTS["vllm"].items()]
    model = str(source()["identifier"])
    command = ["serve", model, "--name", MODEL_NAME, "--engine", "vllm", "--accelerators", "cpu", *engine, "--wait"]
    code = "from gpuflow.cli import main; main()"
    environment = {**os.environ, "REDIS_URL": url, "GPUFLOW_STATE_DIR": str(folder / "state")}
    done = subprocess.run([sys.executable, "-c", code, *command], env=environment, cwd=folder, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the model is not served; `gpuflow serve` ended with {done.returncode}")


@contextmanager
def both_sides(python: Path, start_gateway: StartGateway, token: str, folder: Path) -> Iterator[dict[str, int]]:
    """Yield the ports of both servers, whose models are loaded."""
    from gpuflow.settings import Settings

    broker, url = harness.start_broker(folder / "broker")
    os.environ["REDIS_URL"] = url
    worker = harness.start_worker(
        "gpuflow", url, folder, "--name", "bench", "-c", "64", env={"HEARTBEAT_INTERVAL_SEC": "2"}
    )
    started: list[subprocess.Popen[Any]] = [worker]
    try:
        gateway, ours = start_gateway(folder, url)
        started.append(gateway)
        harness.progress("a replica loads the model")
        serve_ours(url, folder)
        harness.progress("vLLM's server loads it")
        process, peer = start_vllm(python, folder_of_model(Settings.load().cache_dir), token, folder)
        started.append(process)
        wait_for_vllm(process, peer, folder / "vllm.log")
        yield {"ours": ours, "peer": peer}
    finally:
        harness.stop(started)
        broker.stop()


def measure(size: Rounds, python: Path, start_gateway: StartGateway, token: str, folder: Path) -> list[dict[str, Any]]:
    """Run it and return the rows. `token` is that of the gateway, `python` the one that has vLLM."""
    many: dict[str, list[float]] = {"ours": [], "peer": []}
    single: dict[str, list[float]] = {"ours": [], "peer": []}
    with both_sides(python, start_gateway, token, folder) as ports:
        for port in ports.values():
            asyncio.run(all_at_once(port, token, prompts(CLIENTS, 0)))
        for number in range(1, size.rounds + 1):
            harness.progress(f"first tokens, round {number} of {size.rounds}")
            asked = prompts(CLIENTS * size.calls, number)
            order = list(ports) if number % 2 else list(ports)[::-1]
            for name in order:
                settled(5)
                many[name] += asyncio.run(all_at_once(ports[name], token, asked))
        harness.progress("first tokens of one client")
        for prompt in prompts(size.singles, 100):
            for name, port in ports.items():
                settled(2)
                single[name].append(asyncio.run(first_token(port, token, prompt)))
    return [
        harness.row(
            metric,
            harness.percentile(found["ours"], percent),
            harness.percentile(found["peer"], percent),
            "s",
            more_is_better=False,
            peer_name=PEER,
        )
        for metric, found, percent in (
            ("ttft_p50", many, 50), ("ttft_p95", many, 95), ("ttft_one_p50", single, 50)
        )
    ]  # fmt: skip
