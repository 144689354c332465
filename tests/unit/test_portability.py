"""The client side runs where Unix' own modules are missing: on Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuflow.cluster.commands import with_our_packages
from gpuflow.filelocks import holding, lock, try_lock

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
#: What submits, looks at, and moves files.
CLIENT = [
    "gpuflow.client",
    "gpuflow.handles",
    "gpuflow.cli.submit",
    "gpuflow.cli.status",
    "gpuflow.cli.logs",
    "gpuflow.cli.result",
    "gpuflow.cli.session",
    "gpuflow.artifacts.inputs",
    "gpuflow.artifacts.archive",
    "gpuflow.artifacts.destination",
    "gpuflow.artifacts.local_store",
    "gpuflow.artifacts.http_store",
    "gpuflow.artifacts.s3_store",
]
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


def run(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=with_our_packages({"HOME": os.devnull}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", CLIENT)
def test_the_client_side_needs_none_of_the_modules_of_unix(module: str) -> None:
    run(f"{HIDDEN}\nimport {module}")


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
