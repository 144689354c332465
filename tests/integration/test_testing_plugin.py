"""gpuflow.testing in a pytest of its own: clean servers, workers that fail to start, and nothing that is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuflow.cluster.commands import with_our_packages
from tests.support.fleet import gone, running
from tests.support.waiting import eventually, patient

FILES = Path(__file__).resolve().parents[1] / "data" / "testing"
#: A developer's own settings, of a fleet that no test may reach.
DEVELOPER = {
    "REDIS_URL": "redis://developer:1/0",
    "GPUFLOW_KEY_PREFIX": "developer:",
    "GPUFLOW_SIGNING": "developer",
    "TASK_TOPIC": "developer",
    "CELERY_BROKER_URL": "redis://developer:1/0",
    "CELERY_RESULT_BACKEND": "redis://developer:1/0",
    "CUDA_VISIBLE_DEVICES": "7",
    "TEAM_VARIABLE": "of the developer",
}
CONFTEST = 'pytest_plugins = ["gpuflow.testing"]\n'


@dataclass(kw_only=True)
class Project:
    """A team's project: its tests, and a folder in which they make temporary files."""

    folder: Path
    temporary: Path
    pids: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *options: str, **env: str) -> subprocess.Popen[str]:
        dropped = ("GPUFLOW_", "XDG_", "PYTEST")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        environment = {**kept, "HOME": str(self.folder), "TMPDIR": str(self.temporary), "PIDS": str(self.pids), **env}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # all that are installed take a second to load
        command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        timeout = f"gpuflow_timeout={patient(60):g}"
        process = subprocess.Popen(
            [*command, "-c", "/dev/null", "--rootdir", ".", "--basetemp", "base", "-o", timeout, *options],
            cwd=self.folder,
            env=with_our_packages(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, *options: str, **env: str) -> tuple[int, str]:
        process = self.start(*options, **env)
        output, _ = process.communicate(timeout=patient(120))
        return process.returncode, output

    def started(self) -> list[int]:
        """Return the processes that the tests have noted: workers, servers, functions."""
        return [int(path.name) for path in self.pids.iterdir()]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    temporary = Path(tempfile.mkdtemp(prefix="gf-"))  # short: the path of a socket is
    made = Project(folder=tmp_path / "project", temporary=temporary, pids=tmp_path / "pids")
    shutil.copytree(FILES, made.folder)
    made.pids.mkdir()
    (made.folder / "conftest.py").write_text(CONFTEST)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.communicate()
        shutil.rmtree(temporary)


def passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


def test_a_fleet_is_clean_and_of_the_test_alone(project: Project) -> None:
    (project.folder / "gpuflow.toml").write_text('task_topic = "developer"\n')

    code, output = project.run("check_fleet.py", **DEVELOPER)

    assert (code, passed(output)) == (0, 14), output
    assert list(project.temporary.iterdir()) == []


def test_eager_calls_run_in_the_process_of_the_test(project: Project) -> None:
    code, output = project.run("check_eager.py", **DEVELOPER)

    assert (code, passed(output)) == (0, 6), output
    assert list(project.temporary.iterdir()) == []


NOTED = """
import os
from pathlib import Path

import psutil
from jobs import block

PIDS = Path(os.environ["PIDS"])


def begin(fleet):
    fleet.start_worker("jobs")
    block.delay(str(PIDS))
    fleet.wait_for(lambda: list(PIDS.iterdir()), what="a function that runs")
    for process in psutil.Process().children(recursive=True):
        (PIDS / str(process.pid)).touch()
"""

FAILING = """
from noted import begin


def test_no_module(gpuflow_fleet):
    gpuflow_fleet.start_worker("no_such_module")


def test_a_worker_that_ends(gpuflow_fleet):
    worker = gpuflow_fleet.start_worker("jobs")
    worker.process.kill()
    gpuflow_fleet.wait_for(lambda: False)


def test_that_fails(gpuflow_fleet):
    begin(gpuflow_fleet)
    assert 1 == 2
"""


def test_failures_show_logs_and_leave_nothing(project: Project) -> None:
    (project.folder / "noted.py").write_text(NOTED)
    (project.folder / "test_failing.py").write_text(FAILING)

    code, output = project.run("test_failing.py")

    assert code == 1 and "3 failed" in output, output
    first, second, third = re.split(r"^_+ test_\w+ _+$", output, flags=re.MULTILINE)[1:]
    assert "GPUFlowError: worker w1 ended with exit code" in first
    assert "Error: --include no_such_module: No module named 'no_such_module'" in first
    assert "GPUFlowError: worker w1 ended with exit code -9" in second
    assert "Log of gpuflow worker w1" in third and "ready" in third
    assert len(project.started()) > 2
    assert running(project.started()) == []
    assert list(project.temporary.iterdir()) == []


INTERRUPTED = """
from noted import PIDS, begin


def test_for_ever(gpuflow_fleet):
    begin(gpuflow_fleet)
    (PIDS.parent / "begun").touch()
    gpuflow_fleet.wait_for(lambda: False, within=600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_session_that_is_ended_leaves_no_process(project: Project, number: signal.Signals) -> None:
    (project.folder / "noted.py").write_text(NOTED)
    (project.folder / "test_interrupted.py").write_text(INTERRUPTED)
    process = project.start("test_interrupted.py")
    begun = project.pids.parent / "begun"
    eventually(lambda: begun.exists() or process.poll() is not None, within=60, what="a function that runs")

    process.send_signal(number)
    output, _ = process.communicate(timeout=patient(60))

    assert begun.exists(), output
    gone(project.started())
    if number == signal.SIGINT:
        assert process.returncode == pytest.ExitCode.INTERRUPTED, output
        assert list(project.temporary.iterdir()) == []


BESIDE = """
import os
from pathlib import Path

from jobs import say

PIDS = Path(os.environ["PIDS"])


def test_beside(gpuflow_fleet):
    gpuflow_fleet.start_worker("jobs", machine="T4")
    (PIDS / str(os.getpid())).write_text(gpuflow_fleet.url)
    gpuflow_fleet.wait_for(lambda: len(list(PIDS.iterdir())) == 2, what="the other process")
    assert say.apply_async(("hello",), task_id="the-same").get(timeout=gpuflow_fleet.timeout)
    (PIDS / f"{os.getpid()}.done").touch()
    gpuflow_fleet.wait_for(lambda: len(list(PIDS.glob("*.done"))) == 2, what="the other process")
"""


def test_two_processes_of_xdist_have_a_server_each(project: Project) -> None:
    for name in ("a", "b"):
        (project.folder / f"test_beside_{name}.py").write_text(BESIDE)

    code, output = project.run("test_beside_a.py", "test_beside_b.py", "-n", "2", "-p", "xdist")

    assert (code, passed(output)) == (0, 2), output
    assert len({path.read_text() for path in project.pids.iterdir() if path.suffix == ""}) == 2
    assert list(project.temporary.iterdir()) == []
