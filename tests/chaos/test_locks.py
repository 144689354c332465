"""What a shim holds open (the lock files of GPUs) is free only when nothing of its tree is left."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil

from tests.support.fleet import running
from tests.support.waiting import BrokenPromise, eventually, patient

#: A worker reduced to the one thing: it locks a file and starts a child that scatters grandchildren.
WORKER = """
import fcntl, json, os, signal, sys
from pathlib import Path
from gpuflow.worker.child import Child

lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
script = "setsid sleep 300 & (setsid sleep 300 &) ; exec sleep 300"
child = Child(["sh", "-c", script], request="", environment=dict(os.environ), cwd=Path("/"), keep_open=[lock.fileno()])
print(json.dumps({"shim": child.shim_pid}), flush=True)
signal.pause()
"""


def is_free(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_lock_outlives_its_worker_until_the_last_grandchild_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        shim = json.loads(worker.stdout.readline())["shim"]

        def sleepers() -> list[int]:
            tree = psutil.Process(shim).children(recursive=True)
            return [process.pid for process in tree if process.name() == "sleep"]

        pids = eventually(lambda: len(found := sleepers()) == 3 and found, what="the grandchildren")
        with path.open("a") as lock:
            if is_free(lock):
                raise BrokenPromise("the lock was free while its worker lived")
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait(timeout=patient(30))

            eventually(lambda: is_free(lock), what="the lock")

            if left := running(pids):
                raise BrokenPromise(f"the lock was free while {left} of the tree lived")
    finally:
        worker.kill()
        worker.wait(timeout=patient(30))
        worker.stdout.close()
