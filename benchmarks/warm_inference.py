"""What a warm session costs: calls through gpuflow to a model that is loaded, next to vLLM's engine driven directly.

    python benchmarks/warm_inference.py [--quick] [--json]

Rows (a ratio above 1 means that ours is better):

* tokens_per_second   output tokens per second with 16 callers at once: `gpuflow.submit` to `get`, next to the same
                      prompts given to AsyncLLM in the same environment
* calls_per_second    the same in calls
* ttft_p50, _p99      seconds to the first token of a streaming call on an idle engine, one at a time: from `submit` to
                      the event, next to the engine's first output
* later_call          seconds of a call to the warm model; the peer is the first call, which loads it

Ours and the peer take turns, on the same prompts. Without the environment vllm (`gpuflow env create vllm`), and with
ENGINE=transformers, the engine on both sides is transformers, whose `generate` gets 16 prompts at once from the peer.
The model is the preset smollm2-135m-instruct, or a folder that MODEL names. With --quick both sides load at the same
time, so the first call is slower than it need be; the two loads take most of its 70 s. Few calls, each short, weigh
what is around the engine more than the full run does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import psutil

CALLERS = 16
IDLE_PERCENT = 15
MODEL = os.environ.get("MODEL", "")
PRESET = "smollm2-135m-instruct"
PEERS = {"vllm": "AsyncLLM driven directly", "transformers": "generate driven directly"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "vllm": {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 32},
    "transformers": {"dtype": "float32"},
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured. Seconds to settle: how long at most a side may wait for an idle machine."""

    rounds: int
    calls: int
    tokens: int
    singles: int
    settle_seconds: float
    together: bool


QUICK = Size(rounds=1, calls=16, tokens=32, singles=3, settle_seconds=1, together=True)
FULL = Size(rounds=4, calls=48, tokens=128, singles=15, settle_seconds=10, together=False)


class Direct:
    """The engine without gpuflow, in a process of its own."""

    def __init__(self, python: Path, engine: str, model: str, log: Path) -> None:
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(python), str(harness.HERE / "warm_direct.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._say({"engine": engine, "model": model, "arguments": ARGUMENTS[engine]})

    def _say(self, told: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(told), file=self._process.stdin, flush=True)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the engine that is driven directly has ended; see its log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def loaded(self) -> None:
        """Wait until the model is there."""
        self._read()

    def round(self, prompts: list[str], callers: int, tokens: int) -> dict[str, Any]:
        """Return seconds, tokens and the times to the first token of one round."""
        self._say({"prompts": prompts, "callers": callers, "sampling": sampling(tokens)})
        return self._read()

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


class Ours:
    """The same calls through gpuflow."""

    def __init__(self, app: Any, engine: str) -> None:
        self._app = app
        self._engine = engine

    def call(self, prompt: str, tokens: int, *, stream: bool = False) -> tuple[int, float]:
        """Return the output tokens of a call, and the seconds to its first token (0 where it does not stream)."""
        from gpuflow.client import submit

        spec = {
            "taskType": "inference",
            "engine": self._engine,
            "model": {"source": source(), self._engine: ARGUMENTS[self._engine]},
            "data": {"type": "list", "items": [prompt]},
            "inference": {**sampling(tokens), "stream": stream},
            "resources": {"hardware": {"gpu": {"count": 0}}},
        }
        started, first = time.perf_counter(), 0.0
        task = submit(spec, app=self._app)
        if stream:
            for event in task.events():
                if event.name == "text_delta":
                    first = time.perf_counter() - started
                    break
        return int(task.get(timeout=600)["usage"]["completion_tokens"]), first

    def round(self, prompts: list[str], callers: int, tokens: int) -> dict[str, Any]:
        """Return seconds and tokens of one round."""
        started = time.perf_counter()
        with ThreadPoolExecutor(callers) as pool:
            answers = list(pool.map(lambda prompt: self.call(prompt, tokens), prompts))
        return {"seconds": time.perf_counter() - started, "tokens": sum(count for count, _ in answers)}


def sampling(tokens: int) -> dict[str, Any]:
    """Return the sampling of all calls: as many tokens in each."""
    return {"temperature": 0.0, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}


def source() -> dict[str, str]:
    """Return the source of the model in a template."""
    return {"type": "local", "identifier": MODEL} if MODEL else {"type": "preset", "identifier": PRESET}


def folder_of_model(cache: Path) -> Path:
    """Return the folder of the model; it is there once a first call has brought it."""
    from executors.modeling.presets import prepared_folder
    from gpuflow.spec.presets import load_preset

    return Path(MODEL or prepared_folder(PRESET, load_preset("models", PRESET), str(cache)))


def settled(most_seconds: float) -> None:
    """Wait until the machine is idle: threads of an engine that has just answered still spin for a while."""
    deadline = time.monotonic() + most_seconds
    while psutil.cpu_percent(interval=0.2) > IDLE_PERCENT and time.monotonic() < deadline:
        pass


def prompts(count: int, salt: int) -> list[str]:
    """Return prompts that share no beginning, so that no prefix cache helps either side."""
    return [f"{salt * 1000 + number}. Write a short story about a ship that" for number in range(count)]


def engine_here() -> tuple[str, Path]:
    """Return the engine that is measured, and the Python that has it."""
    from gpuflow.environments import python_of
    from gpuflow.errors import GPUFlowError
    from gpuflow.settings import Settings

    wanted = os.environ.get("ENGINE", "")
    if wanted == "transformers":
        return wanted, Path(sys.executable)
    try:
        return "vllm", python_of(Settings.load(), "vllm")
    except GPUFlowError as error:
        if wanted:
            raise SystemExit(str(error)) from None
        harness.progress(f"{error}; measuring transformers")
        return "transformers", Path(sys.executable)


@contextmanager
def both_sides(size: Size, folder: Path) -> Iterator[tuple[Ours, Direct, str, float]]:
    """Yield both sides with their models loaded, the engine's name, and the seconds of the first call."""
    from gpuflow.settings import Settings

    engine, python = engine_here()
    server, url = harness.start_broker(folder / "broker")
    os.environ["REDIS_URL"] = url
    from gpuflow import app

    worker = harness.start_worker("gpuflow", url, folder, "--name", "bench", env={"HEARTBEAT_INTERVAL_SEC": "2"})
    direct: Direct | None = None
    model = folder_of_model(Settings.load().cache_dir)

    def begin() -> Direct:
        return Direct(python, engine, str(model), folder / "direct.log")

    try:
        if size.together and model.exists():
            harness.progress("both sides load the model")
            direct = begin()
        harness.ready(app)
        ours = Ours(app, engine)
        harness.progress("the first call loads the model")
        started = time.perf_counter()
        ours.call("Hello", 1)
        first_call = time.perf_counter() - started
        harness.progress("the engine that is driven directly loads it")
        direct = direct or begin()
        direct.loaded()
        yield ours, direct, engine, first_call
    finally:
        if direct is not None:
            direct.stop()
        harness.stop([worker])
        server.stop()


def measure(size: Size, folder: Path) -> list[dict[str, Any]]:
    """Run everything and return the rows."""
    rates: dict[str, list[float]] = {"ours": [], "peer": [], "ours_calls": [], "peer_calls": []}
    firsts: dict[str, list[float]] = {"ours": [], "peer": []}
    later = []
    with both_sides(size, folder) as (ours, direct, engine, first_call):
        ours.round(prompts(CALLERS, 0), CALLERS, 4)
        direct.round(prompts(CALLERS, 0), CALLERS, 4)
        for number in range(1, size.rounds + 1):
            harness.progress(f"round {number} of {size.rounds}")
            asked = prompts(size.calls, number)
            for name, side in (("ours", ours), ("peer", direct)):
                settled(size.settle_seconds)
                found = side.round(asked, CALLERS, size.tokens)  # type: ignore[attr-defined]
                rates[name].append(found["tokens"] / found["seconds"])
                rates[f"{name}_calls"].append(size.calls / found["seconds"])
            for prompt in prompts(size.singles, 100 + number):
                settled(size.settle_seconds)
                started = time.perf_counter()
                firsts["ours"].append(ours.call(prompt, 8, stream=True)[1])
                later.append(time.perf_counter() - started)
                settled(size.settle_seconds)
                firsts["peer"] += direct.round([prompt], 1, 8)["first"]
    median = {name: statistics.median(values) for name, values in rates.items()}
    row, peer = harness.row, PEERS[engine]
    return [
        *(
            row(f"{unit}_per_second", median[mine], median[theirs], f"{unit}/s", more_is_better=True, peer_name=peer)
            for unit, mine, theirs in (("tokens", "ours", "peer"), ("calls", "ours_calls", "peer_calls"))
        ),
        *(
            row(
                f"ttft_p{percent}",
                harness.percentile(firsts["ours"], percent),
                harness.percentile(firsts["peer"], percent),
                "s",
                more_is_better=False,
                peer_name=peer,
            )
            for percent in (50, 99)
        ),
        row("later_call", statistics.median(later), first_call, "s", more_is_better=False, peer_name="the first call"),
    ]


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        rows = measure(QUICK if given.quick else FULL, Path(folder))
    harness.show("warm_inference", rows, as_json=given.json)


if __name__ == "__main__":
    main()
