"""One process of a local cluster: it ends as asked, with all below it, and with its starter."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpuflow.cluster.process import ManagedProcess
from gpuflow.errors import GPUFlowError
from tests.support.fleet import running
from tests.support.waiting import eventually

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"
)


def started(folder: Path, code: str, *signals: tuple[int, float]) -> ManagedProcess:
    return ManagedProcess(
        "part",
        [sys.executable, "-c", code],
        environment={"PATH": "/usr/bin"},
        folder=folder,
        log=folder / "logs" / "part.log",
        stop_signals=signals,
    )


def test_it_runs_in_a_session_of_its_own_and_logs(tmp_path: Path) -> None:
    process = started(tmp_path, "import os; print('session', os.getsid(0) == os.getpid()); raise SystemExit(3)")
    assert process.wait(30)
    assert process.exit_code == 3
    assert process.log_tail() == "session True"
    assert process.tree() == []
    process.stop()


def test_stop_ends_the_whole_tree(tmp_path: Path) -> None:
    process = started(tmp_path, FAMILY, (signal.SIGTERM, 10.0))
    eventually(lambda: process.log_tail().startswith("child"), within=30)
    pids = [process.pid, int(process.log_tail().split()[1])]
    assert running(pids) == pids
    process.stop()
    assert running(pids) == []
    assert process.exit_code == -signal.SIGTERM


def test_a_stubborn_process_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path, STUBBORN, (signal.SIGTERM, 0.1))
    eventually(lambda: process.log_tail() == "up", within=30)
    process.stop()
    assert process.exit_code == -signal.SIGKILL


def test_kill_waits_for_nobody(tmp_path: Path) -> None:
    process = started(tmp_path, FAMILY, (signal.SIGTERM, 600.0))
    eventually(lambda: process.log_tail().startswith("child"), within=30)
    pids = [process.pid, int(process.log_tail().split()[1])]
    process.kill()
    assert running(pids) == []


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GPUFlowError, match="cannot start part"):
        ManagedProcess(
            "part", ["/bin/true"], environment={}, folder=tmp_path / "none", log=tmp_path / "x.log", stop_signals=()
        )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a dead parent is Linux's")
def test_it_does_not_outlive_its_starter(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom gpuflow.cluster.process import ManagedProcess\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "process = ManagedProcess('part', [sys.executable, '-c', 'import time; time.sleep(600)'], environment={},\n"
        "    folder=folder, log=folder / 'part.log', stop_signals=())\n"
        "print(process.pid, flush=True)\nsys.stdin.read()\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert psutil.pid_exists(pid)
        starter.kill()
    eventually(lambda: running([pid]) == [], within=10, what="the end of the orphan")
