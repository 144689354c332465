"""Large artifacts between real processes: constant memory at both ends, and a line that is cut in the middle.

ARTIFACT_MIB sets the size. Its default is already more than twice the memory that is allowed, so that whoever reads a
whole file fails; the tox environment `artifacts` runs it with 2 GB.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import boto3
import pytest

from gpuflow.artifacts.partial import file_digest
from gpuflow.artifacts.store import open_store
from gpuflow.filelocks import try_lock
from gpuflow.settings import Settings
from tests.chaos.proxy import Proxy
from tests.integration.artifacts.conftest import AWS_ENVIRONMENT, KINDS, Place
from tests.integration.artifacts.reading import last_line
from tests.support.gateway import Gateway
from tests.support.memory import peak_growth
from tests.support.memory_disk import memory_folder
from tests.support.waiting import eventually

MIB: Final = 1 << 20
SIZE: Final = int(os.environ.get("ARTIFACT_MIB", "256")) * MIB
MOST_MEMORY: Final = 100 * MIB
#: What HTTP says besides the bytes of the file.
HEADERS: Final = 64 << 10
#: Listens on a port of its own choice and says which.
S3_SERVER: Final = """
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""

#: What has to be free in memory for the copies of one test and for what a server keeps; else they are on the disk.
FREE_MIB: Final = 5 * SIZE // MIB

pytestmark = [pytest.mark.alone, pytest.mark.timeout(1200 + SIZE // MIB)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A file in which no two blocks are alike and no hole is, and its digest."""
    with memory_folder("large", tmp_path_factory.mktemp("large"), free_mib=FREE_MIB) as folder:
        path, digest = folder / "large.bin", hashlib.sha256()
        with path.open("wb") as file:
            for number in range(SIZE // MIB):
                block = hashlib.shake_128(number.to_bytes(8, "big")).digest(1 << 14) * 64
                digest.update(block)
                file.write(block)
        yield path, digest.hexdigest()
        path.unlink()


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is enough: flushes of hundreds of MiB hold up whatever else uses the disk."""
    with memory_folder("large", tmp_path, free_mib=FREE_MIB) as folder:
        yield folder


@pytest.fixture
def own_gateway(tmp_path: Path) -> Iterator[Gateway]:
    with Gateway(tmp_path) as started:
        yield started


@pytest.fixture
def moto_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of an S3 server that is a process of its own: its memory is not ours."""
    with (tmp_path / "moto.log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-c", S3_SERVER], stdout=subprocess.PIPE, stderr=log)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        for name, value in {**AWS_ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="large")
        client.close()
        yield "s3://large/results"
    finally:
        server.kill()
        server.communicate()


def place_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    def never(name: str, content: bytes) -> None:
        raise AssertionError(name)

    if kind == "local":
        return Place(url=(tmp_path / "shared").as_uri(), replace=never, settings={})
    if kind == "s3":
        return Place(url=request.getfixturevalue("moto_process"), replace=never, settings={})
    gateway: Gateway = request.getfixturevalue("own_gateway")
    return Place(url=gateway.results_url, token=gateway.token, replace=never, settings={})


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_constant_at_both_ends(
    kind: str, request: pytest.FixtureRequest, large: tuple[Path, str], tmp_path: Path
) -> None:
    source, digest = large
    target = tmp_path / "back" / "large.bin"
    place = place_of(kind, request, tmp_path)
    (tmp_path / "small").write_bytes(os.urandom(MIB))
    place.open().put(tmp_path / "small", "task-1/small")
    place.open().get("task-1/small", tmp_path / "small-again")
    told: dict[str, dict[str, Any]] = {}
    server: dict[str, int] = {}

    for action, path in (("put", source), ("get", target)):
        pid = request.getfixturevalue("own_gateway").process.pid if kind == "http" else os.getpid()
        with peak_growth(pid) as growth, place.start(action, "task-1/large", path, warm_up="task-1/small") as child:
            told[action] = last_line(child, within=280 + SIZE / (4 * MIB))
        server[action] = growth()

    print(f"{kind}, {SIZE // MIB} MiB:", {a: f"client +{told[a]['extra_bytes'] >> 20} MiB" for a in told}, end=" ")
    print({action: f"server +{count >> 20} MiB" for action, count in server.items()} if kind == "http" else "")
    assert [line["size"] for line in told.values()] == [SIZE] * 2
    assert {line["sha256"] for line in told.values()} == {digest} == {file_digest(target)}
    # The kernel counts pages per CPU and sums them up late, so a peak can seem to have fallen a little.
    assert [line for line in told.values() if not -MIB < line["extra_bytes"] < MOST_MEMORY] == []
    assert kind != "http" or max(server.values()) < MOST_MEMORY


class CountingProxy(Proxy):
    """Counts what it passes on, by the way it goes, before whoever receives it can go on."""

    def __init__(self, url: str) -> None:
        self._counts = {"up": 0, "down": 0}
        super().__init__(url)

    @property
    def up(self) -> int:
        return self._counts["up"]

    @property
    def down(self) -> int:
        return self._counts["down"]

    def count_anew(self) -> None:
        """Begin at 0 with the connections to come: a cut one may still be about to count its last block."""
        self._counts = {"up": 0, "down": 0}

    def _pass(self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket) -> None:
        counts, way = self._counts, "up" if sink is pair[1] else "down"

        class Counted:
            def sendall(self, chunk: bytes) -> None:
                counts[way] += len(chunk)
                sink.sendall(chunk)

            def __getattr__(self, name: str) -> Any:
                return getattr(sink, name)

        super()._pass(pair, source, Counted())  # type: ignore[arg-type]


def test_an_upload_that_is_cut_at_half_sends_the_rest_alone(
    own_gateway: Gateway, large: tuple[Path, str], tmp_path: Path
) -> None:
    source, digest = large
    arrived: list[int] = []
    over = 0

    def idle() -> bool:
        (part,) = own_gateway.parts("task-1")
        with part.open("rb") as file:
            return try_lock(file.fileno())

    with CountingProxy(own_gateway.results_url) as proxy:

        def cut_at_half(count: int) -> None:
            nonlocal over
            over += count
            if over >= SIZE // 2 and not arrived:
                proxy.refuse()
                eventually(idle, what="the end of the first half")
                arrived.append(own_gateway.parts("task-1")[0].stat().st_size)
                proxy.count_anew()
                proxy.allow()

        stored = own_gateway.store(url=proxy.url).put(source, "task-1/large", progress=cut_at_half)
        again = proxy.up

    assert 0 < arrived[0] < SIZE
    assert SIZE - arrived[0] <= again <= SIZE - arrived[0] + HEADERS
    assert over == SIZE
    assert stored.sha256 == digest == file_digest(own_gateway.root / "task-1" / "large")
    assert own_gateway.parts() == []


@pytest.mark.parametrize("new_process", [False, True], ids=["the same process", "another process"])
def test_a_download_that_is_cut_at_half_fetches_the_rest_alone(
    own_gateway: Gateway, large: tuple[Path, str], tmp_path: Path, new_process: bool
) -> None:
    source, digest = large
    target = tmp_path / "back" / "large.bin"
    own_gateway.store().put(source, "task-1/large")
    here: list[int] = []
    over = 0

    with CountingProxy(own_gateway.results_url) as proxy:
        if new_process:
            place = Place(url=proxy.url, token=own_gateway.token, replace=lambda *_: None, settings={})
            with place.start("get", "task-1/large", target, stop_at=SIZE // 2) as child:
                assert last_line(child, first=True)["stopped"] >= SIZE // 2
                child.kill()
            (part,) = target.parent.iterdir()
            here.append(part.stat().st_size)
            proxy.count_anew()

        def cut_at_half(count: int) -> None:
            nonlocal over
            over += count
            if over >= SIZE // 2 and not here:
                proxy.cut()
                here.append(next(target.parent.iterdir()).stat().st_size)
                proxy.count_anew()

        stored = own_gateway.store(url=proxy.url).get("task-1/large", target, progress=cut_at_half)
        again = proxy.down

    # What lay in the buffers of the cut line is lost, and no more than what the client has is left out.
    assert here[0] >= SIZE // 2
    assert again <= SIZE - here[0] + HEADERS
    assert over == SIZE
    assert stored.sha256 == digest == file_digest(target)
    assert [path.name for path in target.parent.iterdir()] == ["large.bin"]


def test_s3_goes_on_with_a_cut_download(moto_process: str, large: tuple[Path, str], tmp_path: Path) -> None:
    source, digest = large
    target = tmp_path / "back" / "large.bin"
    here: list[int] = []
    over = 0
    with CountingProxy(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            store = open_store(moto_process, settings=Settings())
        store.put(source, "task-1/large")

        def cut_at_half(count: int) -> None:
            nonlocal over
            over += count
            if over >= SIZE // 2 and not here:
                here.append(over)
                proxy.cut()
                proxy.count_anew()

        stored = store.get("task-1/large", target, progress=cut_at_half)
        again = proxy.down

    assert again <= SIZE - here[0] + HEADERS
    assert stored.sha256 == digest == file_digest(target)
