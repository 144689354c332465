"""A disk that is really full: a small one in memory where we may mount it, else a limit on the size of files.

Put, get, pack and unpack end with an ArtifactError that says so, and leave nothing that anybody sees.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from gpuflow.artifacts.archive import pack
from gpuflow.artifacts.repr_digest import repr_digest
from gpuflow.artifacts.store import open_store
from gpuflow.cluster.commands import with_our_packages
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings
from tests.integration.artifacts.test_conformance import made, sha256
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient

MIB = 1 << 20
DISK_MIB = 8
#: Runs one action with files limited in size, as a disk that ends in the midst of one: for those who may not mount.
ACTION = """
import json, resource, sys
from pathlib import Path
from gpuflow.artifacts.archive import pack, unpack
from gpuflow.artifacts.store import open_store
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings
action, source, target, limit = json.loads(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
source, target = Path(source), Path(target)
store = open_store(target.as_uri(), settings=Settings())
try:
    if action == "put":
        store.put(source, "task-1/a")
    elif action == "get":
        open_store(source.parent.as_uri(), settings=Settings()).get(source.name, target / "a")
    elif action == "pack":
        pack(source, target / "a.tar.gz")
    else:
        unpack(source, target / "a")
except ArtifactError as error:
    print(json.dumps([str(error), [file.name for file in store.list("")]]))
"""


@dataclass(frozen=True, kw_only=True)
class SmallDisk:
    """A folder whose disk ends after 8 MiB, or a limit in bytes on the files of a process."""

    path: Path
    limit: int

    def left(self) -> list[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file())

    def run(self, action: str, source: Path) -> tuple[str, list[str]]:
        """Do one action in another process; return its error and what the store then lists."""
        done = subprocess.run(
            [sys.executable, "-c", ACTION, json.dumps([action, str(source), str(self.path), self.limit])],
            env=with_our_packages(os.environ), capture_output=True, text=True, timeout=patient(100), check=True,
        )  # fmt: skip
        error, listed = json.loads(done.stdout)
        return str(error), list(listed)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "small"
    path.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(path)], capture_output=True, check=False
        ).returncode
    )
    try:
        yield SmallDisk(path=path, limit=0 if mounted else DISK_MIB * MIB)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("action", ["put", "get", "pack", "unpack"])
def test_a_full_disk_is_told_and_leaves_nothing(action: str, disk: SmallDisk, tmp_path: Path) -> None:
    folder = tmp_path / "final_model"
    folder.mkdir()
    source = made(folder / "weights.bin", 3 * DISK_MIB * MIB)
    if action == "pack":
        source = folder
    elif action == "unpack":
        source = tmp_path / "a.tar.gz"
        pack(folder, source)
        if not disk.limit:  # the free space is looked at before a byte is written, so it has to vanish meanwhile
            (folder / "weights.bin").unlink()
            for number in range(3):
                made(folder / f"{number}.bin", 3 * MIB)
            pack(folder, source)

    error, listed = disk.run(action, source)

    assert "free some space" in error or "more than the disk has free" in error
    assert "\n" not in error
    assert listed == []
    assert disk.left() == []


def test_room_that_comes_back_is_used(disk: SmallDisk, tmp_path: Path) -> None:
    store = open_store(disk.path.as_uri(), settings=Settings())
    small = made(tmp_path / "small.bin", 6 * MIB)
    store.put(small, "task-1/first")
    if not disk.limit:
        with pytest.raises(ArtifactError, match="free some space"):
            store.put(small, "task-1/second")
        assert [file.name for file in store.list("")] == ["task-1/first"]

    store.delete("task-1/first")

    assert store.put(small, "task-1/second").sha256 == sha256(small)


def test_a_gateway_whose_disk_fills_up_says_507_and_goes_on_when_there_is_room(disk: SmallDisk, tmp_path: Path) -> None:
    root = disk.path / "results"
    source = made(tmp_path / "large.bin", 2 * DISK_MIB * MIB)
    content = source.read_bytes()
    code = "" if not disk.limit else (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({disk.limit}, {disk.limit}))"
    )  # fmt: skip
    with Gateway(tmp_path, root=root, code=code) as gateway:
        address = f"{gateway.results_url}/task-1/files/a"
        # Without its length only the disk itself can tell.
        pieces = (content[at : at + MIB] for at in range(0, len(content), MIB))
        untold = httpx.post(address, headers=gateway.headers, content=pieces, timeout=patient(60))
        assert untold.status_code in (413, 507)
        assert untold.headers["content-type"] == "application/problem+json"
        if not disk.limit:
            assert untold.json()["type"].endswith(":disk-full")
            told = {**gateway.headers, "Repr-Digest": repr_digest(sha256(source)), "Upload-Length": str(len(content))}
            assert httpx.post(address, headers=told, timeout=patient(60)).status_code == 507
        with pytest.raises(ArtifactError, match="disk of the results"):
            gateway.store().put(source, "task-1/a")
        assert gateway.files() == []
        assert httpx.get(f"{gateway.results_url}/task-1/files", headers=gateway.headers).json()["files"] == []
        eventually(lambda: not gateway.parts() or disk.limit, what="the end of the parts")

        small = made(tmp_path / "small.bin", 2 * MIB)
        assert gateway.store().put(small, "task-1/b").sha256 == sha256(small)
        with pytest.raises(httpx.HTTPStatusError):
            httpx.get(address, headers=gateway.headers).raise_for_status()
