"""What merging saves and costs: many calls of few prompts through gpuflow, next to Celery without and with a lock.

    python benchmarks/merge.py [--quick] [--json]

Rows (a ratio above 1 means that ours is better):

* wall_time              seconds from the first call to the last answer of the load, next to plain Celery whose tasks
                         are executed by the same executor with the same model loaded
* wall_time_locked       the same next to a lock by arguments, as celery-singleton has it (merge_peer.py says what it
                         cannot do)
* generations, _locked   prompts that the executor has answered for the load
* right_answers          calls whose text is what a generation of their own prompt gave to the plain peer
* join_p50, _p99         microseconds of the server for a call that may be merged (join.lua), next to the publish of the
                         same task with ENABLE_TASK_MERGE=false; join_distinct: of calls of which none is merged
* throughput_all_distinct  calls per second when every prompt is another one; the peer is gpuflow with
                         ENABLE_TASK_MERGE=false. With _unbatched no two calls share a run either, which is the cost
                         where merging finds nothing at all (TASK_MERGE_MAX_BATCH_SIZE=1)

Several client processes send the calls, in one random order on all sides, and then wait for the answers. The sides take
turns on one broker. The model is a small random Llama, made for the run, in float32 on transformers; MODEL names the
folder of another one, TOKENS the length of each answer (64). The executor counts: each answer that it writes is one
generation.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

PLAIN = "Celery 5.7, the same executor"
LOCKED = "the same with a lock by arguments"
UNMERGED = "gpuflow with ENABLE_TASK_MERGE=false"
PUBLISH = "publish of the same task"
CLIENTS = 4
#: Sides that answer the load, in the order of their turns, and where their executor writes.
LOAD_SIDES = {"plain": "peer-results", "locked": "peer-results", "merged": "results"}
#: Sides that answer every prompt of calls that are all distinct, in the order of their turns.
DISTINCT_SIDES = ("unmerged", "merged", "unbatched")
#: One thread of torch on all sides: several spin while they wait for each other, and share the cores with all else.
ENGINE_ENV = {"OMP_NUM_THREADS": "1"}
MODEL = os.environ.get("MODEL", "")
TOKENS = int(os.environ.get("TOKENS", "64"))
SEED = 7


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    The load comes in `turns` parts. `rounds` and `distinct_calls` are of calls that are all distinct; `joins` are the
    calls whose Lua step is timed.
    """

    calls: int
    prompts: int
    turns: int
    tokens: int
    rounds: int
    distinct_calls: int
    joins: int


QUICK = Size(calls=400, prompts=40, turns=2, tokens=TOKENS, rounds=2, distinct_calls=80, joins=300)
FULL = Size(calls=10_000, prompts=1_000, turns=5, tokens=TOKENS, rounds=3, distinct_calls=400, joins=2_000)


class Clients:
    """The client processes."""

    def __init__(self, folder: Path, url: str) -> None:
        environment = {**os.environ, "REDIS_URL": url, "RESULTS_DIR": str(folder / "results")}
        environment["GPUFLOW_STATE_DIR"] = str(folder / "state")
        self._processes = []
        self._logs = [folder / f"client-{number}.log" for number in range(CLIENTS)]
        for path in self._logs:
            with path.open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, str(harness.HERE / "merge_client.py")],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            self._processes.append(process)

    def ready(self) -> None:
        """Wait until all of them have begun."""
        for process in self._processes:
            self._read(process)

    def round(self, side: str, calls: Sequence[dict[str, Any]]) -> tuple[float, list[str]]:
        """Return the seconds of one round, and the text of each call."""
        lines = [
            json.dumps({"side": side, "calls": calls[number::CLIENTS]}) + "\n" for number in range(len(self._processes))
        ]
        started = time.perf_counter()
        for process, line in zip(self._processes, lines, strict=True):
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        answers = [self._read(process) for process in self._processes]
        seconds = time.perf_counter() - started
        texts = [""] * len(calls)
        for number, found in enumerate(answers):
            texts[number::CLIENTS] = found
        return seconds, texts

    def stop(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _read(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            log = self._logs[self._processes.index(process)].read_text(errors="replace")
            raise SystemExit(f"a client process has ended:\n{log[-2000:]}")
        return json.loads(line)


def call(model: Path, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the spec of one call, the same on all sides. It is greedy, so gpuflow merges it by itself."""
    return {
        "taskType": "inference",
        "engine": "transformers",
        "model": {"source": {"type": "local", "identifier": str(model)}, "transformers": {"dtype": "float32"}},
        "data": {"type": "list", "items": [prompt]},
        "inference": {"temperature": 0.0, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True},
        "resources": {"hardware": {"gpu": {"count": 0}}},
        "resultTtlSeconds": 3600,
    }


def prompts(count: int, salt: str) -> list[str]:
    """Return distinct prompts, which no other round has."""
    things = ("car", "house", "lamp", "dog", "cat", "ship", "tree", "door")
    return [f"{salt}{number}: where is the {things[number % len(things)]}?" for number in range(count)]


def loads_of(size: Size, model: Path) -> list[list[dict[str, Any]]]:
    """Return the calls of the load in their order, in as many parts as there are turns: each prompt equally often."""
    choice, each = random.Random(SEED), size.calls // size.prompts
    loads = []
    for turn in range(size.turns):
        asked = [prompt for prompt in prompts(size.prompts // size.turns, f"load {turn} ") for _ in range(each)]
        choice.shuffle(asked)
        loads.append([call(model, prompt, size.tokens) for prompt in asked])
    return loads


def generations(folder: Path) -> int:
    """Return how many prompts the executor has answered, by the files that it has written.

    Several callers of one run have hard links to one file; a run of several calls has one file for each of them, and
    one for all.
    """
    found = set()
    for path in folder.rglob("responses.json"):
        if not path.is_symlink() and not (path.parent / "children").is_dir():
            found.add(path.stat().st_ino)
    return len(found)


def make_model(folder: Path) -> Path:
    """Return the folder of the model."""
    if MODEL:
        return Path(MODEL)
    sys.path.append(str(harness.HERE.parent))
    from tests.fixtures.tiny_model import make_tiny_model

    return make_tiny_model(folder / "model")


@contextmanager
def all_sides(folder: Path, model: Path) -> Iterator[Clients]:
    """Yield clients of both workers, which have loaded the model."""
    server, url = harness.start_broker(folder / "broker")
    os.environ["REDIS_URL"] = url
    import merge_peer

    from gpuflow import app

    our_env = {"HEARTBEAT_INTERVAL_SEC": "2", **ENGINE_ENV}
    peer_env = {"RESULTS_DIR": str(folder / "peer-results"), **ENGINE_ENV}
    workers = [
        harness.start_worker("gpuflow", url, folder, "--name", "bench", env=our_env),
        harness.start_worker("merge_peer", url, folder, "-P", "threads", env=peer_env),
    ]
    clients = Clients(folder, url)
    try:
        clients.ready()
        harness.ready(app)
        harness.ready(merge_peer.app)
        harness.progress("both workers load the model")
        hello = [call(model, f"hello {number}", 4) for number in range(CLIENTS)]
        with ThreadPoolExecutor(2) as pool:
            first = merge_peer.generate.delay(hello[0])
            pool.submit(first.get, timeout=300)
            clients.round("unmerged", hello)
        for side in ("plain", "locked", "merged", "unbatched"):
            clients.round(side, hello)
        yield clients
    finally:
        clients.stop()
        harness.stop(workers)
        server.stop()


def lua_microseconds(folder: Path, model: Path, size: Size) -> dict[str, list[float]]:
    """Return what the server says that each publish took, in microseconds: merged, all distinct, and without merging.

    No worker takes what is published here.
    """
    from redis import Redis

    from gpuflow.broker.scripts import broker_script
    from gpuflow.celery_app import GPUFlow
    from gpuflow.settings import Settings

    server, url = harness.start_broker(folder / "joins")
    client = Redis.from_url(url)
    steps = {broker_script(name).sha.encode() for name in ("join", "publish")}
    each = size.calls // size.prompts
    asked = {
        "publish": [prompt for prompt in prompts(size.joins // each, "publish ") for _ in range(each)],
        "join": [prompt for prompt in prompts(size.joins // each, "join ") for _ in range(each)],
        "distinct": prompts(size.joins, "distinct "),
    }
    found = {}
    try:
        client.config_set("slowlog-max-len", 100 * size.joins)
        for name, texts in asked.items():
            random.Random(SEED).shuffle(texts)
            changes = {"redis_url": url, "enable_task_merge": name != "publish"}
            changes |= {"task_merge_max_batch_size": 1} if name == "distinct" else {}
            app = GPUFlow("gpuflow", settings=Settings.load().model_copy(update=changes))
            app.send_task("gpuflow.inference", kwargs={"spec": call(model, f"first of {name}", size.tokens)})
            client.config_set("slowlog-log-slower-than", 0)
            client.slowlog_reset()
            for prompt in texts:
                app.send_task("gpuflow.inference", kwargs={"spec": call(model, prompt, size.tokens)})
            entries = client.slowlog_get(100 * size.joins)
            client.config_set("slowlog-log-slower-than", -1)
            found[name] = [float(one["duration"]) for one in entries if steps & set(one["command"].split(b" ")[:2])]
            app.redis.close()
            app.close()
    finally:
        client.close()
        server.stop()
    return found


def measure(size: Size, folder: Path) -> list[dict[str, Any]]:
    """Run everything and return the rows."""
    harness.progress("the model is made")
    model = make_model(folder)
    harness.progress("the Lua steps")
    costs = lua_microseconds(folder, model, size)
    seconds, made, right = (dict.fromkeys(LOAD_SIDES, 0.0) for _ in range(3))
    rates: dict[str, list[float]] = {side: [] for side in DISTINCT_SIDES}
    with all_sides(folder, model) as clients:
        for turn, load in enumerate(loads_of(size, model)):
            texts: dict[str, list[str]] = {}
            for side, results in LOAD_SIDES.items():
                harness.progress(f"the load, part {turn + 1} of {size.turns}: {side}")
                before = generations(folder / results)
                took, texts[side] = clients.round(side, load)
                seconds[side] += took
                made[side] += generations(folder / results) - before
                right[side] += _right(load, texts[side], texts["plain"])
        for number in range(size.rounds):
            harness.progress(f"all distinct: round {number + 1} of {size.rounds}")
            for side in DISTINCT_SIDES[number % 3 :] + DISTINCT_SIDES[: number % 3]:
                asked = prompts(size.distinct_calls, f"round {number} {side} ")
                took, _ = clients.round(side, [call(model, prompt, size.tokens) for prompt in asked])
                rates[side].append(size.distinct_calls / took)
    rate = {side: statistics.median(found) for side, found in rates.items()}
    row = harness.row
    return [
        row("wall_time", seconds["merged"], seconds["plain"], "s", more_is_better=False, peer_name=PLAIN),
        row("wall_time_locked", seconds["merged"], seconds["locked"], "s", more_is_better=False, peer_name=LOCKED),
        row("generations", made["merged"], made["plain"], "prompts", more_is_better=False, peer_name=PLAIN),
        row("generations_locked", made["merged"], made["locked"], "prompts", more_is_better=False, peer_name=LOCKED),
        row("right_answers", right["merged"], right["locked"], "calls", more_is_better=True, peer_name=LOCKED),
        *(
            row(
                f"{metric}_p{percent}",
                harness.percentile(costs[ours], percent),
                harness.percentile(costs["publish"], percent),
                "us",
                more_is_better=False,
                peer_name=PUBLISH,
            )
            for metric, ours in (("join", "join"), ("join_distinct", "distinct"))
            for percent in (50, 99)
        ),
        *(
            row(metric, rate[ours], rate["unmerged"], "calls/s", more_is_better=True, peer_name=UNMERGED)
            for metric, ours in (
                ("throughput_all_distinct", "merged"),
                ("throughput_all_distinct_unbatched", "unbatched"),
            )
        ),
    ]


def _right(load: Sequence[dict[str, Any]], texts: Sequence[str], direct: Sequence[str]) -> int:
    """Return how many calls have the text that a generation of their own prompt gave."""
    known: dict[str, set[str]] = {}
    for spec, text in zip(load, direct, strict=True):
        known.setdefault(spec["data"]["items"][0], set()).add(text)
    return sum(text in known[spec["data"]["items"][0]] for spec, text in zip(load, texts, strict=True))


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        rows = measure(QUICK if given.quick else FULL, Path(folder))
    harness.show("merge", rows, as_json=given.json)


if __name__ == "__main__":
    main()
