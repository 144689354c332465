"""The client side runs where Unix' own modules are missing: on Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpuflow.cluster.commands import with_our_packages
from gpuflow.filelocks import holding, lock, try_lock
from tests.support.waiting import patient

#: What Celery, kombu and psutil import of Unix they import on Unix alone: they are there before it is hidden.
HIDDEN = """
import os, sys
import celery.app.base, celery.bin.celery, celery.backends.redis, kombu.transport.redis, redbeat, redis, psutil
import asyncio, billiard, click, httpx, multiprocessing, pydantic, rich.progress, structlog, subprocess, tempfile, yaml
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "copy_file_range", "preadv", "posix_fadvise"):
    if hasattr(os, name):
        delattr(os, name)
"""
#: Serves GPUs, tasks or files: Linux alone.
SERVERS = ("gpuflow.fleet.gpu_", "gpuflow.gateway", "gpuflow.worker")
#: Imports every module on the client's side; prints those that cannot be, and the count of the others.
WALK = """
import importlib, pkgutil, traceback
import gpuflow
left_out, count = tuple(sys.argv[1:]), 0
def walk(package):
    global count
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if found.name.startswith(left_out):
            continue
        try:
            module = importlib.import_module(found.name)
        except Exception:
            print(found.name, traceback.format_exc().splitlines()[-1])
            continue
        count += 1
        if found.ispkg:
            walk(module)
walk(gpuflow)
print(count)
"""
THERE_AND_BACK = """
sys.platform = "win32x"
from pathlib import Path
from gpuflow.artifacts.store import open_store
from gpuflow.settings import Settings
folder = Path(sys.argv[1])
source = folder / "source.bin"
source.write_bytes(bytes(range(256)) * 20_000)
store = open_store((folder / "shared").as_uri(), settings=Settings())
stored = store.put(source, "task-1/a")
assert store.get("task-1/a", folder / "back.bin", sha256=stored.sha256).size == 5_120_000
assert (folder / "back.bin").read_bytes() == source.read_bytes()
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=with_our_packages({"HOME": os.devnull}),
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_side_needs_none_of_the_modules_of_unix() -> None:
    *broken, count = run(HIDDEN + WALK, *SERVERS).splitlines()

    assert broken == []
    assert int(count) > 100


def test_a_store_works_without_what_linux_alone_has(tmp_path: Path) -> None:
    run(HIDDEN.replace('"fcntl", ', "") + THERE_AND_BACK, str(tmp_path))


def test_a_lock_has_one_owner_and_ends_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as one, path.open("ab") as other:
        lock(one.fileno())
        assert try_lock(one.fileno())
        assert not try_lock(other.fileno())
        one.close()
        assert try_lock(other.fileno())
    with holding(path), path.open("ab") as third:
        assert not try_lock(third.fileno())
    assert path.read_bytes() == b""
