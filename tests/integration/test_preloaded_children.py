"""Children that are forked from a process which has imported their program already: like new ones, and as safe."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuflow.protocol import parse_line
from gpuflow.worker import spawner as spawners
from gpuflow.worker.child import Child, ChildEnd
from gpuflow.worker.confinement import UNCONFINED, Confinement
from tests.gate import leftovers
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-P", "-m", "executors")
REPORT = f"tests.start_report={ROOT / 'tests' / 'support' / 'start_report.py'}:StartReport"


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[spawners.Spawners]:
    """Return spawners of this test alone."""
    fresh = spawners.Spawners()
    monkeypatch.setattr("gpuflow.worker.child.spawner", lambda: fresh)
    yield fresh
    fresh.close()


@pytest.fixture
def variables() -> dict[str, str]:
    """Return the environment of a child."""
    kept = ("PATH", "HOME", "LANG", "PYTHONPATH", leftovers.VARIABLE)
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "GPUFLOW_EXECUTORS": REPORT,
        "PYTHONUNBUFFERED": "1",
        "A_SECRET": "hunter2",
    }


class Started:
    """A child, and what came of it."""

    def __init__(self, folder: Path, environment: dict[str, str], spec: dict[str, Any], confined: Confinement) -> None:
        request = {"task_id": "t", "task_type": spec["taskType"], "spec": spec, "output_dir": str(folder)}
        self.child = Child(
            PROGRAM, request=json.dumps(request), environment=environment, cwd=folder, confinement=confined
        )
        self.log = b""

    def value(self) -> Any:
        """Return its result when it has ended."""
        found = None
        for kind, line in self.child.read(1.0):
            if kind == "log":
                self.log += line + b"\n"
            elif kind == "event" and (event := parse_line(line)).name == "result":
                found = event.data["value"]
        return found

    def end(self) -> ChildEnd:
        self.value()
        return self.child.wait()


@pytest.fixture
def start(tmp_path: Path, both: spawners.Spawners, variables: dict[str, str]) -> Iterator[Callable[..., Started]]:
    """Start children; those that a test leaves behind, as it failed, are killed."""
    children: list[Started] = []

    def start(spec: dict[str, Any], confined: Confinement = UNCONFINED, **more: str) -> Started:
        children.append(Started(tmp_path, variables | more, spec, confined))
        return children[-1]

    yield start
    for one in children:
        one.child.kill()


def reported(start: Callable[..., Started], **more: str) -> dict[str, Any]:
    started = start({"taskType": "tests.start_report"}, **more)
    value = started.value()
    assert started.child.wait().exit_code == 0, started.log
    return dict(value)


def test_a_preloaded_child_is_what_a_new_interpreter_is(
    start: Callable[..., Started], both: spawners.Spawners, monkeypatch: pytest.MonkeyPatch
) -> None:
    preloaded = reported(start)
    monkeypatch.setattr(both, "_preloading_for", lambda *_: None)
    fresh_one = reported(start)

    assert (preloaded["preloaded"], fresh_one["preloaded"]) == (True, False)
    assert preloaded["alike"] == fresh_one["alike"]
    assert preloaded["alike"]["environment"]["A_SECRET"] == "hunter2"


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "LD_PRELOAD", "LANG", "LC_ALL", "HOME", "TZ", "MALLOC_ARENA_MAX"])
def test_what_a_program_reads_at_its_start_starts_a_new_one(start: Callable[..., Started], name: str) -> None:
    assert reported(start)["preloaded"]
    value = {"LANG": "C", "LC_ALL": "POSIX", "LD_PRELOAD": "", "HOME": "/", "TZ": "Asia/Tokyo"}.get(name, "1")

    other = reported(start, **{name: value})

    assert not other["preloaded"] and other["alike"]["environment"][name] == value
    assert reported(start)["preloaded"]


def test_variables_of_one_child_are_not_in_the_next(start: Callable[..., Started]) -> None:
    reported(start, OF_THE_FIRST="1")

    second = reported(start)

    assert second["preloaded"]
    assert not [word for word in second["alike"]["shown_environment"] if "OF_THE_FIRST" in word]


def test_more_variables_than_there_is_room_to_show_reach_the_child(start: Callable[..., Started]) -> None:
    many = {f"V{number}": 300 * "x" for number in range(200)}

    report = reported(start, **many)

    assert report["preloaded"] and many.items() <= report["alike"]["environment"].items()


def test_a_child_of_another_user_is_a_new_program(both: spawners.Spawners) -> None:
    assert both._preloading_for(PROGRAM, {"user": None}) is not None
    assert both._preloading_for(PROGRAM, {"user": [65534, 65534, []]}) is None
    assert both._preloading_for(("bwrap", *PROGRAM), {"user": None}) is None


def test_limits_hold_in_a_preloaded_child(start: Callable[..., Started]) -> None:
    started = start({"taskType": "tests.start_report"}, Confinement(limits={"RLIMIT_FSIZE": 1_000_000}))

    report = started.value()

    assert report["preloaded"] and report["alike"]["limits"]["RLIMIT_FSIZE"] == [1_000_000, 1_000_000]
    assert started.child.wait().exit_code == 0


def test_the_death_of_who_forks_ends_no_child_and_the_next_one_starts(
    start: Callable[..., Started], both: spawners.Spawners, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    first = start({"taskType": "echo", "echo": {"output": 1, "until_exists": str(go)}})
    forks = both.preloaded_pid
    assert forks is not None

    os.kill(forks, signal.SIGKILL)
    second = start({"taskType": "echo", "echo": {"output": 2}})

    assert second.value()["output"] == 2 and second.child.wait().exit_code == 0
    go.touch()
    assert first.value()["output"] == 1 and first.child.wait().exit_code == 0
    assert both.preloaded_pid not in (None, forks)


def test_another_installation_is_imported_anew(
    start: Callable[..., Started], both: spawners.Spawners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "gpuflow"
    package.mkdir(parents=True)
    monkeypatch.setattr(spawners, "packages", lambda: (package,))
    pids = []
    for _ in range(2):
        assert reported(start)["preloaded"]
        pids.append(both.preloaded_pid)
    (package.parent / "gpuflow-9.dist-info").mkdir()
    assert reported(start)["preloaded"]
    assert pids[0] == pids[1] != both.preloaded_pid


def test_one_that_hangs_is_killed_and_done_without(
    start: Callable[..., Started], both: spawners.Spawners, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = tmp_path / "site"
    hangs.mkdir()
    pids = hangs / "pids"
    (hangs / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if 'shim.py' in ' '.join(sys.orig_argv):\n"
        f"    open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "    time.sleep(3600)\n"
    )
    monkeypatch.setattr(spawners, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(spawners, "_AGAIN_SECONDS", 3600.0)
    path = os.pathsep.join([str(hangs), os.environ.get("PYTHONPATH", "")])

    started = start({"taskType": "echo", "echo": {"output": 1}}, PYTHONPATH=path)

    assert started.value()["output"] == 1 and started.child.wait().exit_code == 0
    assert len(pids.read_text().split()) == 1
    eventually(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split()), what="its end")
    assert not reported(start)["preloaded"]


def test_a_process_that_cannot_import_the_program_is_done_without(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    (broken / "executors").mkdir(parents=True)
    (broken / "executors" / "__init__.py").write_text("raise RuntimeError('half installed')")

    started = start({"taskType": "echo", "echo": {"output": 1}}, PYTHONPATH=str(broken))

    assert started.end().exit_code == 1  # as a new interpreter ends there
    assert b"half installed" in started.log
    assert not reported(start)["preloaded"]


def test_what_runs_a_thread_in_each_interpreter_runs_it_in_each_child(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), name='of all', daemon=True).start()"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    report = reported(start, PYTHONPATH=path)

    assert not report["preloaded"] and "of all" in report["alike"]["threads"]


def test_what_failed_once_is_tried_again_later(
    start: Callable[..., Started], both: spawners.Spawners, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr(spawners, "_AGAIN_SECONDS", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(spawners.Spawner, "_ask", fails)
        with pytest.raises(OSError, match="too many processes"):
            start({"taskType": "echo", "echo": {}})
    assert both.preloaded_pid is None

    assert eventually(lambda: reported(start)["preloaded"], what="a preloaded child")


def test_variables_that_an_installation_sets_in_each_interpreter_are_in_each_child(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nos.environ['OF_THE_SITE'] = os.environ.get('A_SECRET', '')\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    report = reported(start, PYTHONPATH=path)

    assert not report["preloaded"] and report["alike"]["environment"]["OF_THE_SITE"] == "hunter2"


def test_without_a_locale_both_have_what_the_interpreter_sets(
    start: Callable[..., Started], both: spawners.Spawners, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables.pop("LANG", None)

    preloaded = reported(start)
    monkeypatch.setattr(both, "_preloading_for", lambda *_: None)
    fresh_one = reported(start)

    assert preloaded["preloaded"] and preloaded["alike"] == fresh_one["alike"]
    assert preloaded["alike"]["environment"]["LC_CTYPE"] == "C.UTF-8"


def test_a_shim_shows_nothing_of_its_child(start: Callable[..., Started], tmp_path: Path) -> None:
    started = start({"taskType": "echo", "echo": {"until_exists": str(tmp_path / "never")}})
    shim = psutil.Process(started.child.shim_pid)
    (child,) = eventually(shim.children, within=10, what="the child")
    eventually(lambda: child.cmdline() == list(PROGRAM), what="its command line")

    assert child.environ()["A_SECRET"] == "hunter2"
    assert "A_SECRET" not in shim.environ() and shim.cmdline() != child.cmdline()

    child.send_signal(signal.SIGTERM)
    assert started.end().exit_code in (143, None)  # None: before it could tell
