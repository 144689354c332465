"""What a warm session costs: calls through gpuflow to a model that is loaded, next to vLLM's engine driven directly.

    python benchmarks/warm_inference.py [--quick] [--json]

Rows (a ratio above 1 means that ours is better):

* tokens_per_second   output tokens per second with 16 callers at once: `gpuflow.submit` to `get`, next to the same
                      prompts given to AsyncLLM in the same environment
* calls_per_second    the same in calls
* ttft_p50, _p99      seconds to the first token of a streaming call on an idle engine, one at a time: from `submit` to
                      the event, next to the engine's first output
* later_call          seconds of a call to the warm model; the peer is the first call, which loads it

It needs the environment vllm (`gpuflow env create vllm`). Ours and the peer take turns, on the same prompts. The model
is the preset smollm2-135m-instruct, or a folder that MODEL names.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import psutil

CALLERS = 16
IDLE_PERCENT = 15
PEER = "AsyncLLM driven directly"
MODEL = os.environ.get("MODEL", "")
PRESET = "smollm2-135m-instruct"
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 32}


class Direct:
    """The engine without gpuflow, in a process of its own."""

    def __init__(self, python: Path, model: str, log: Path) -> None:
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(python), str(harness.HERE / "warm_direct.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._say({**ENGINE, "model": model, "disable_log_stats": True})
        self._read()

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

    def round(self, prompts: list[str], callers: int, tokens: int) -> dict[str, Any]:
        """Return seconds, tokens and the times to the first token of one round."""
        settled()
        self._say({"prompts": prompts, "callers": callers, "sampling": sampling(tokens)})
        return self._read()

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


class Ours:
    """The same calls through gpuflow."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def call(self, prompt: str, tokens: int, *, stream: bool = False) -> tuple[int, float]:
        """Return the output tokens of a call, and the seconds to its first token (0 where it does not stream)."""
        from gpuflow.client import submit

        spec = {
            "taskType": "inference",
            "engine": "vllm",
            "model": {"source": source(), "vllm": ENGINE},
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
        settled()
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


def folder_of_model(cache: Path) -> str:
    """Return the folder of the model, once a first call has brought it here."""
    from executors.modeling.presets import prepared_folder
    from gpuflow.spec.presets import load_preset

    return MODEL or str(prepared_folder(PRESET, load_preset("models", PRESET), str(cache)))


def settled() -> None:
    """Wait until the machine is idle: threads of an engine that has just answered still spin for a while."""
    deadline = time.monotonic() + 10
    while psutil.cpu_percent(interval=0.2) > IDLE_PERCENT and time.monotonic() < deadline:
        pass


def prompts(count: int, salt: int) -> list[str]:
    """Return prompts that share no beginning, so that no prefix cache helps either side."""
    return [f"{salt * 1000 + number}. Write a short story about a ship that" for number in range(count)]


def measure(rounds: int, calls: int, tokens: int, singles: int, folder: Path) -> list[dict[str, Any]]:
    """Run everything and return the rows."""
    from gpuflow.environments import python_of
    from gpuflow.errors import GPUFlowError
    from gpuflow.settings import Settings

    settings = Settings.load()
    try:
        python = python_of(settings, "vllm")
    except GPUFlowError as error:
        raise SystemExit(str(error)) from None
    server, url = harness.start_broker(folder / "broker")
    os.environ["REDIS_URL"] = url
    from gpuflow import app

    worker = harness.start_worker("gpuflow", url, folder, "--name", "bench", env={"HEARTBEAT_INTERVAL_SEC": "2"})
    direct = None
    try:
        harness.ready(app)
        ours = Ours(app)
        harness.progress("the first call loads the model")
        started = time.perf_counter()
        ours.call("Hello", 1)
        first_call = time.perf_counter() - started
        harness.progress("the engine that is driven directly loads it")
        direct = Direct(python, folder_of_model(settings.cache_dir), folder / "direct.log")
        ours.round(prompts(CALLERS, 0), CALLERS, 4)
        direct.round(prompts(CALLERS, 0), CALLERS, 4)
        rates: dict[str, list[float]] = {"ours": [], "peer": [], "ours_calls": [], "peer_calls": []}
        firsts: dict[str, list[float]] = {"ours": [], "peer": []}
        later = []
        for number in range(1, rounds + 1):
            harness.progress(f"round {number} of {rounds}")
            asked = prompts(calls, number)
            for name, found in (
                ("ours", ours.round(asked, CALLERS, tokens)),
                ("peer", direct.round(asked, CALLERS, tokens)),
            ):
                rates[name].append(found["tokens"] / found["seconds"])
                rates[f"{name}_calls"].append(calls / found["seconds"])
            for prompt in prompts(singles, 100 + number):
                settled()
                started = time.perf_counter()
                firsts["ours"].append(ours.call(prompt, 8, stream=True)[1])
                later.append(time.perf_counter() - started)
                firsts["peer"] += direct.round([prompt], 1, 8)["first"]
    finally:
        if direct is not None:
            direct.stop()
        harness.stop([worker])
        server.stop()
    median = {name: statistics.median(values) for name, values in rates.items()}
    row = harness.row
    return [
        *(
            row(f"{unit}_per_second", median[ours], median[peer], f"{unit}/s", more_is_better=True, peer_name=PEER)
            for unit, ours, peer in (("tokens", "ours", "peer"), ("calls", "ours_calls", "peer_calls"))
        ),
        *(
            row(
                f"ttft_p{percent}",
                harness.percentile(firsts["ours"], percent),
                harness.percentile(firsts["peer"], percent),
                "s",
                more_is_better=False,
                peer_name=PEER,
            )
            for percent in (50, 99)
        ),
        row("later_call", statistics.median(later), first_call, "s", more_is_better=False, peer_name="the first call"),
    ]


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__)
    sizes = (1, 16, 16, 5) if given.quick else (4, 48, 128, 15)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        rows = measure(*sizes, Path(folder))
    harness.show("warm_inference", rows, as_json=given.json)


if __name__ == "__main__":
    main()
