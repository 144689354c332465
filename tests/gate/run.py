"""The gate: builds every environment of tox, runs them, and says at its end what failed. Called by `.ci/run`.

python -m tests.gate.run [ENVIRONMENT ...]      # without names: the default environments of tox.ini

The order: preflight; builds (a failed one is tried once more: a download may break off) and tests, of one group of
environments after the other, the next group built while one is tested; report. tox is that of this interpreter's
environment. .tox/gate keeps what came of it: JSON and JUnit XML of each suite, logs of builds.
Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeAlias

from tests.gate import leftovers, preflight, report
from tests.gate.builds import BUILDS

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".tox" / "gate"
TRIES: Final = 2
#: Where tox tells what came of each of its runs: a suite reads all other JSON files of FOLDER.
TOX_RESULTS: Final = FOLDER / "tox"
#: Environments that are tested one after the other, and those that are tested beside them.
Group: TypeAlias = tuple[list[str], list[str]]
#: In this order. What is beside others waits most of its time, and is printed when all of its group has ended.
GROUPS: Final[tuple[Group, ...]] = (
    (["lint"], []),
    (["wheel", "tests"], []),
    (["ml"], []),
    (["vllm"], ["browser", "tls"]),
)


def main(names: list[str]) -> int:
    """Run the gate and return its exit code."""
    began = time.monotonic()
    run = uuid.uuid4().hex
    os.environ.update(CI="true", NO_COLOR="1", PY_COLORS="0", PYTHONUNBUFFERED="1", GATE_DIR=str(FOLDER))
    os.environ.setdefault("TEST_PATIENCE", "4")
    os.environ[leftovers.VARIABLE] = run
    shutil.rmtree(FOLDER, ignore_errors=True)
    TOX_RESULTS.mkdir(parents=True)
    _say("preflight", began)
    for line in preflight.lines(FOLDER):
        print(line, flush=True)
    names = names or _default_environments()
    builds, tox_code = _build_and_test(groups(names), began)
    left = leftovers.find(run, whole_run=True)
    leftovers.end(left)
    lines, code = report.end_of_run(
        builds=builds,
        environments=environments(TOX_RESULTS),
        expected=[one.name for one in builds if not one.error],
        suites=_suites(),
        left=[str(one) for one in left],
        seconds=time.monotonic() - began,
        tox_code=tox_code,
    )
    print("\n".join(lines), flush=True)
    return code


def _build_and_test(order: Sequence[Group], began: float) -> tuple[list[report.Build], int]:
    """Build and test all environments; return the builds, and 0 or how the first tox that failed has ended.

    A group is built while the one before it is tested.
    """
    builds: list[report.Build] = []
    codes: list[int] = []
    with ThreadPoolExecutor(max_workers=1) as ahead:
        coming = [ahead.submit(_build_all, [*group, *beside], began) for group, beside in order]
        for number, (group, beside) in enumerate(order):
            builds += coming[number].result()
            broken = {one.name for one in builds if one.error}
            _say("tests", began)
            codes += _test_group(number, *([one for one in names if one not in broken] for names in (group, beside)))
    return builds, next(filter(None, codes), 0)


def _build_all(names: Sequence[str], began: float) -> list[report.Build]:
    """Build every environment, one after the other; what one needs beyond its packages, beside the others."""
    builds: dict[str, report.Build] = {}
    with ThreadPoolExecutor() as pool:
        beside = {}
        for name in sorted(names, key=lambda name: name not in BUILDS):
            _say(f"build {name}", began)
            builds[name] = _build(name, "run", "--notest", "-e", name)
            if name in BUILDS and not builds[name].error:
                step = ("exec", "--skip-pkg-install", "-e", name, "--", "python", "-m", "tests.gate.builds", name)
                beside[name] = pool.submit(_build, name, *step)
        builds |= {name: future.result() for name, future in beside.items()}
    return [builds[name] for name in names]


def _build(name: str, *step: str) -> report.Build:
    log = FOLDER / f"build-{name}.log"
    began = time.monotonic()
    error = ""
    if not any(_tox(*step, log=log) == 0 for _ in range(TRIES)):
        said = log.read_text(errors="replace")
        print(said[-3000:], flush=True)
        error = report.cause_of(said)
    return report.Build(name=name, seconds=time.monotonic() - began, error=error)


def groups(names: Sequence[str]) -> list[Group]:
    """Return which environments are tested together, those that GROUPS does not name with the first. Pure."""
    found: list[Group] = []
    left = {*names} - {name for group in GROUPS for part in group for name in part}
    for mains, others in GROUPS:
        group = [name for name in names if name in mains or name in left]
        beside = [name for name in names if name in others]
        left = set()
        if group or beside:
            found.append((group, beside) if group else (beside, []))
    return found


def _test_group(number: int, group: Sequence[str], beside: Sequence[str]) -> list[int]:
    """Test environments, and others beside them; return how each tox has ended."""
    log = FOLDER / f"beside-{number}.log"
    codes: list[int] = []
    with ThreadPoolExecutor() as pool:
        other = pool.submit(_test, f"{number}-beside", beside, log) if beside else None
        if group:
            codes.append(_test(str(number), group))
        if other is not None:
            codes.append(other.result())
            print(log.read_text(errors="replace"), flush=True)
    return codes


def _test(number: str, names: Sequence[str], log: Path | None = None) -> int:
    result = str(TOX_RESULTS / f"{number}.json")
    return _tox("run", "--skip-pkg-install", "--result-json", result, "-e", ",".join(names), log=log)


def environments(folder: Path) -> dict[str, Any]:
    """Return what tox has told in `folder` of each environment that ran."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text())["testenvs"]  # of all environments there are; empty for what did not run
        found |= {name: one for name, one in told.items() if one}
    return found


def _suites() -> list[dict[str, Any]]:
    """Return what the suites have written, in the order in which they ended."""
    written = [path for path in FOLDER.glob("*.json") if path.name.count(".") == 1]
    return [json.loads(path.read_text()) for path in sorted(written, key=lambda path: path.stat().st_mtime)]


def _default_environments() -> list[str]:
    program = [sys.executable, "-m", "tox", "list", "--no-desc", "-d", "-q"]
    told = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line.strip() for line in told.splitlines()]
    return [line for line in lines if line and not line.startswith(("default", "additional"))]


def _tox(*arguments: str, log: Path | None = None) -> int:
    """Run tox; its output goes on as it comes, or into a log."""
    command = [sys.executable, "-m", "tox", arguments[0], "--colored", "no", *arguments[1:]]
    if log is None:
        return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    with log.open("ab") as file:
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False)
    return done.returncode


def _say(what: str, began: float) -> None:
    print(f"\n== {what} ({time.monotonic() - began:.0f} s since the start)", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
