"""`tox -e celerys-own`: Celery's own integration tests on stock, and on gpuflow with every task in a child.

    python -m tests.celerys_own [-k EXPRESSION] [--out FOLDER] [-c N] [FILE ...]

Prints a table, writes `outcomes.json` into the folder with the logs, and ends with 1 where a test that passes on stock
fails on gpuflow, twice, and is not in known.toml, or is there and passes. Both ways run at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis

from gpuflow.broker.embedded import EmbeddedServer
from tests.celerys_own.source import unpacked

_HERE: Final = Path(__file__).resolve().parent
#: What concerns canvas, tasks, and what a worker tells; the others are of stock's own parts (docs/decisions/0096).
_FILES: Final = ("test_canvas.py", "test_group_chains.py", "test_tasks.py", "test_inspect.py")
#: No test of Celery's takes longer by its own marks.
_TEST_SECONDS: Final = 300
_RECEIVED: Final = re.compile(r"Task \S+\[\S+\] received")


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run the tests. `worker`: what its command line has after `celery`."""

    name: str
    worker: str
    patience: int = 1
    known: Collection[str] = ()


@contextmanager
def _server(folder: Path) -> Iterator[int]:
    """Run a server on loopback that asks for no password, as Celery's tests give none; its port."""
    with tempfile.TemporaryDirectory(prefix="gpuflow-") as state:
        server = EmbeddedServer(Path(state), fixed_password=secrets.token_urlsafe(32))
        url = server.start()
        try:
            with redis.Redis.from_url(url) as client:
                client.execute_command("ACL", "SETUSER", "default", "nopass")
                port = int(client.connection_pool.connection_kwargs["port"])
            yield port
        finally:
            server.stop()


def _environment(way: Way, tests: Path, folder: Path, port: int) -> dict[str, str]:
    """Return the variables of the tests, their worker and its children."""
    url = f"redis://127.0.0.1:{port}/0"
    own = (os.environ.get("PYTHONPATH", ""), str(_HERE / "side"), str(tests))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUFLOW_", "CELERY_"))}
    return {
        **kept,
        "CELERYS_OWN_FOLDER": str(folder),
        "CELERYS_OWN_KNOWN": "\n".join(way.known),
        "CELERYS_OWN_PATIENCE": str(way.patience),
        "CELERYS_OWN_WAY": way.name,
        "CELERYS_OWN_WORKER": way.worker,
        "PYTHONPATH": os.pathsep.join(filter(None, own)),
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": str(port),
        "REDIS_URL": url,
        "TASK_TOPIC": "celery",
        "TEST_BACKEND": url,
        "TEST_BROKER": url,
        "RESULTS_DIR": str(folder / "results"),
        **{f"GPUFLOW_{name.upper()}_DIR": str(folder / name) for name in ("cache", "lock", "state")},
    }


def _run(way: Way, tests: Path, folder: Path, chosen: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run the tests one way, and return the outcome of each."""
    folder.mkdir(parents=True, exist_ok=True)
    options = [f"--rootdir={tests}", f"--timeout={_TEST_SECONDS}", "-o", "python_classes=test_*", "-vv"]
    plugins = ["-p", "celery.contrib.pytest", "-p", "celerys_own_plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, *options, *chosen]
    with _server(folder) as port, (folder / f"{way.name}.log").open("wb") as log:
        subprocess.run(
            command,
            env=_environment(way, tests, folder, port),
            cwd=tests,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return _read(folder / f"{way.name}.jsonl")


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the outcomes; of several of one test the worst."""
    found: dict[str, dict[str, Any]] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        name = line.pop("test").removeprefix("t/integration/")
        if name not in found or line["outcome"] == "failed":
            found[name] = line
    return found


def _compare(
    stock: Mapping[str, Mapping[str, Any]],
    ours: Mapping[str, Mapping[str, Any]],
    known: Mapping[str, str],
    timing: Mapping[str, str],
) -> int:
    """Print the table and the figures; return the exit code."""
    outcomes = {name: _outcome(ours.get(name)) for name in stock}
    print(f"{'stock':<9}{'gpuflow':<18}test")
    for name, one in stock.items():
        print(f"{one['outcome']:<9}{outcomes[name]:<18}{name}")
    passed = _passed(stock)
    failed = [name for name in passed if not outcomes[name].startswith("passed")]
    mended = [name for name in known if outcomes.get(name) == "passed"]
    print(f"\n{len(stock)} tests, {len(passed)} pass on stock, {len(passed) - len(failed)} of these on gpuflow")
    reasons = {**timing, **known}
    for name in failed:
        print(f"\n{name}: {reasons.get(name, 'NOT KNOWN')}\n    {ours.get(name, {}).get('error', '')[:400]}")
    for name in mended:
        print(f"\n{name} passes; take it out of known.toml")
    return 1 if set(failed) - set(reasons) or mended or not passed else 0


def _outcome(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "not run"
    return f"{one['outcome']}, 2nd try" if one.get("again") else str(one["outcome"])


def _passed(outcomes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [name for name, one in outcomes.items() if one["outcome"] == "passed"]


def _children(folder: Path) -> str:
    """Say how many of the calls that the worker got ran in children."""
    log = (folder / "gpuflow-worker.log").read_text(errors="replace")
    started, received = log.count("event=task_started"), len(_RECEIVED.findall(log))
    return f"{received} calls came to gpuflow's worker, {started} runs of children"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.celerys_own", description=__doc__)
    parser.add_argument("files", nargs="*", default=list(_FILES), help="of t/integration; with ::, one test")
    parser.add_argument("-k", default="", help="as pytest has it")
    parser.add_argument("--out", type=Path, help="folder of the outcomes and the logs (default: a new one)")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "gpuflow-celerys-own")
    parser.add_argument("-c", type=int, default=2, help="children at once; some tests fill a worker with four calls")
    parser.add_argument("--patience", type=int, default=4, help="multiplies the waits of the tests on gpuflow")
    parser.add_argument("--only", choices=["stock", "gpuflow"], help="run one way, and compare with what is in --out")
    return parser.parse_args()


def main() -> int:
    """Run the tests, and compare."""
    given = _options()
    listed = tomllib.loads((_HERE / "known.toml").read_text())
    known = listed["known"]
    out = (given.out or Path(tempfile.mkdtemp(prefix="celerys-own-"))).resolve()
    tests = unpacked(given.cache.resolve())
    chosen = [f"t/integration/{name}" for name in given.files] + (["-k", given.k] if given.k else [])
    include = "--include celerys_own_children,t.integration.tasks"
    ways = {
        "stock": Way(name="stock", worker="-A celerys_own_stock worker -P prefork -c 1 -E -l INFO"),
        "gpuflow": Way(
            name="gpuflow",
            worker=f"-A gpuflow worker -l INFO --name own {include} -c {given.c}",
            patience=given.patience,
            known=known,
        ),
    }
    with ThreadPoolExecutor(len(ways)) as pool:
        wanted = [way for way in ways.values() if given.only in (None, way.name)]
        runs = [pool.submit(_run, way, tests, out, chosen) for way in wanted]
        for run in runs:
            run.result()
    stock, ours = (_read(out / f"{name}.jsonl") for name in ways)
    failed = [name for name in _passed(stock) if ours.get(name, {}).get("outcome") == "failed" and name not in known]
    if failed:  # as Celery itself repeats most of them, up to five times
        again = _run(ways["gpuflow"], tests, out / "again", [f"t/integration/{name}" for name in failed])
        ours |= {name: {**again[name], "again": True} for name in failed if name in again}
    table = [{"test": name, "stock": one, "gpuflow": ours.get(name)} for name, one in stock.items()]
    (out / "outcomes.json").write_text(json.dumps(table, indent=1))
    print(f"outcomes and logs: {out}\n{_children(out)}")
    return _compare(stock, ours, known, listed["timing"])


if __name__ == "__main__":
    sys.exit(main())
