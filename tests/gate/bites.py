"""Shows that the gate still bites: breaks the product on purpose, one way at a time, and expects red tests.

python -m tests.gate.bites [--only NAME] [--json]

Each bite gets a copy of the checkout. The tests that should catch it run there without the mutation (green) and with
it (red); each test that failed then runs by itself as often as in the second pass of the gate (tests/gate/suite.py).
Tests that all pass each time would be forgiven as FLAKY. Waits that never come true take what TEST_PATIENCE says.

Exit code: 0 every bite is caught and none is forgiven; 1 one is not; 2 a bite is out of date: the text that it replaces
is not found exactly once, its tests are red without the mutation, or the product was not imported from the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.gate.suite import ALONE

ROOT: Final = Path(__file__).resolve().parents[2]
#: Written into the copy as sitecustomize.py: each Python process notes from where it imports the product.
_WITNESS: Final = """
import importlib.machinery, json, sys

class Witness:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("gpuflow", "tasks", "executors"):
            found = importlib.machinery.PathFinder.find_spec(name)
            with open({notes!r}, "a") as file:
                file.write(json.dumps([name, found and found.origin, sys.orig_argv]) + "\\n")

sys.meta_path.insert(0, Witness)
"""


class OutOfDate(Exception):
    """A bite does not fit the product or its tests any more."""


@dataclass(frozen=True, kw_only=True)
class Bite:
    """One way to break the product: `old`, which stands exactly once in `file`, becomes `new`.

    `tests` are the files or node ids that should catch it; `on_a_fleet`: they start workers and children, which have to
    import the mutated product, too; `broken_promise`: one has to raise BrokenPromise, so that the gate never forgives.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    on_a_fleet: bool = True
    broken_promise: bool = False


BITES: Final = (
    Bite(
        name="no lease renewal",
        file="gpuflow/broker/lua/renew.lua",
        old="    redis.call('ZADD', KEYS[1], ends, ARGV[i])\n",
        new="    local _ = ends\n",
        tests=("tests/chaos/test_broker_cuts.py::test_a_task_of_five_leases_runs_once",),
    ),
    Bite(
        name="commit without its fence",
        file="gpuflow/ledger/lua/commit.lua",
        old="if ARGV[2] ~= '' and (attempt or '0') ~= ARGV[2] then return 0 end\n",
        new="if ARGV[2] ~= '' then attempt, token = ARGV[2], ARGV[3] end\n",
        tests=("tests/integration/test_commit_fence.py",),
        on_a_fleet=False,
    ),
    Bite(
        name="GPU locks not taken",
        file="gpuflow/fleet/gpu_directory.py",
        old="fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)\n",
        new="pass\n",
        tests=(
            "tests/unit/fleet/test_gpu_locks.py::test_all_or_nothing",
            "tests/integration/test_gpu_locks_of_processes.py::test_no_gpu_is_ever_held_twice[1]",
        ),
        on_a_fleet=False,
    ),
    Bite(
        name="cancel leaves the child",
        file="gpuflow/worker/attempt.py",
        old="            notice_seconds = ",
        new="            if reason == 'cancelled':\n                return\n            notice_seconds = ",
        tests=(
            "tests/integration/test_supervision.py"
            "::test_cancel_while_it_runs_ends_the_whole_tree_even_if_it_ignores_sigterm",
        ),
    ),
    Bite(
        name="join triggers nothing",
        file="tasks/pipelines.py",
        old="    return _reconcile(self, pipeline_id)\n",
        new='    return "RUNNING"\n',
        tests=("tests/integration/test_pipelines.py::test_the_join_completes_while_the_only_worker_is_busy",),
    ),
    Bite(
        name="secret not redacted",
        file="gpuflow/worker/attempt.py",
        old="hidden = self.redactor.line(line)\n",
        new="hidden = line\n",
        tests=("tests/integration/test_secrets.py::test_with_secrets_by_name_no_canary_is_in_redis_at_all",),
    ),
)


@dataclass(frozen=True)
class Red:
    """A test that failed under a mutation; `passed_alone`: how often it then passed by itself."""

    node_id: str
    error: str
    broken_promise: bool
    passed_alone: int


@dataclass(frozen=True)
class Row:
    """What came of a bite: how many tests passed without it, those that failed with it, and its fault, if any."""

    bite: Bite
    passed: int
    red: list[Red]
    fault: str


def main(arguments: Sequence[str]) -> int:
    """Try the bites and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gate.bites", description="Break the product; expect red.")
    parser.add_argument("--only", choices=[bite.name for bite in BITES], help="try this one only")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the copy is removed, too
    rows, out_of_date = [], False
    for bite in BITES:
        if options.only in (None, bite.name):
            try:
                print(f"{bite.name} ...", file=sys.stderr, flush=True)
                with tempfile.TemporaryDirectory(prefix="gpuflow-bite-", ignore_cleanup_errors=True) as folder:
                    rows.append(_try(bite, Path(folder).resolve()))
            except OutOfDate as error:
                print(f"{bite.name}: {error}", file=sys.stderr, flush=True)
                out_of_date = True
    print(json.dumps([asdict(row) for row in rows], indent=1) if options.json else table(rows))
    return 2 if out_of_date else int(any(row.fault for row in rows))


def mutate(bite: Bite, text: str) -> str:
    """Return the text of the bite's file with the mutation. Raises OutOfDate."""
    if (count := text.count(bite.old)) != 1:
        raise OutOfDate(f"{bite.file} has {bite.old.strip()!r} {count} times; update the bite")
    return text.replace(bite.old, bite.new)


def fault_of(bite: Bite, code: int, red: Sequence[Red]) -> str:
    """Return what is wrong with a bite after its mutated run; empty if it was caught and stays so. Pure."""
    promise = any(one.broken_promise for one in red)
    if code != 1 or not red:
        return f"not caught: pytest ended with {code}"
    if bite.broken_promise and not promise:
        return "no test raised BrokenPromise"
    if all(one.passed_alone == ALONE for one in red) and not promise:
        return "forgiven"
    return ""


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text: for each bite a line, then two for each failed test."""
    form = "{:25} {:30} {:17} {:10} {:9} {}".format
    lines = [form("bite", "file", "suite", "unmutated", "mutated", "verdict")]
    for row in rows:
        suite = " ".join(dict.fromkeys(test.split("/")[1] for test in row.bite.tests))
        counts = (f"{row.passed} passed", f"{len(row.red)} failed")
        lines.append(form(row.bite.name, row.bite.file, suite, *counts, row.fault.upper() or "caught"))
        for one in row.red:
            lines.append(f"    red alone {ALONE - one.passed_alone} of {ALONE}  {one.node_id}")
            lines.append(f"        {'broken promise: ' if one.broken_promise else ''}{one.error[:110]}")
    return "\n".join(lines)


def _try(bite: Bite, folder: Path) -> Row:
    copy, notes = folder / "checkout", folder / "notes"
    _copy_checkout(copy)
    (copy / "sitecustomize.py").write_text(_WITNESS.format(notes=str(notes)))
    broken = mutate(bite, (copy / bite.file).read_text())
    code, told = _pytest(copy, bite.tests)
    if code or not (passed := told.get("passed")):
        raise OutOfDate(f"pytest ended with {code} without the mutation; run {' '.join(bite.tests)}")
    _check_imports(bite, copy, notes)
    (copy / bite.file).write_text(broken)
    code, told = _pytest(copy, bite.tests)
    red = []
    for one in told.get("failures", []):
        if one["phase"] == "call":  # each by itself, as in the second pass of the gate
            ends = [_pytest(copy, [one["node_id"]]) for _ in range(ALONE)]
            passed_alone = sum(end == 0 and alone.get("passed") == 1 for end, alone in ends)
            red.append(Red(one["node_id"], one["error"], one["broken_promise"], passed_alone))
    _check_imports(bite, copy, notes)
    return Row(bite, passed, red, fault_of(bite, code, red))


def _copy_checkout(to: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # git lists what was removed a moment ago, too
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def _pytest(copy: Path, tests: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Run tests of the copy; return the exit code of pytest and what tests/gate/plugin.py reported."""
    report = copy.parent / "report.json"
    report.unlink(missing_ok=True)
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={copy.parent / 'pytest'}"]
    env = {**os.environ, "PYTHONPATH": str(copy), "GATE_REPORT": str(report), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*program, *tests], cwd=copy, env=env, stdout=subprocess.DEVNULL, check=False)
    return done.returncode, json.loads(report.read_text()) if report.exists() else {}


def _check_imports(bite: Bite, copy: Path, notes: Path) -> None:
    """Check that all processes imported the copy, and that those that the bite needs did. Raises OutOfDate."""
    seen = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    notes.unlink(missing_ok=True)
    if strange := [line for line in seen if line[1] is None or not Path(line[1]).resolve().is_relative_to(copy)]:
        raise OutOfDate(f"not imported from the copy: {strange[0]}")
    commands = [set(command) for package, _, command in seen if package == "gpuflow"]
    # Children are forked from the process that has imported executors, whose last word that is, or are `-m executors`.
    for words in [{"pytest"}, {"celery", "worker"}, {"executors"}][: 3 if bite.on_a_fleet else 1]:
        if not any(words <= command for command in commands):
            raise OutOfDate(f"no process with {' '.join(sorted(words))!r} imported the copy")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
