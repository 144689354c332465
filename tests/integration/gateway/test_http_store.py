"""The store over HTTP against a real gateway: cut lines, bad bytes, several at once, slow ones, memory, tokens."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from gpuflow.artifacts.http_store import HttpStore, fetch_http
from gpuflow.artifacts.repr_digest import repr_digest
from gpuflow.artifacts.throttle import Throttle
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings
from tests.chaos.proxy import Proxy
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import eventually, patient

MIB = 1 << 20


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class CutAt:
    """Progress that cuts every connection of a proxy when so many bytes have gone over, once for each mark.

    `arrived` tells how many have; by default those that were told.
    """

    def __init__(self, proxy: Proxy, *marks: int, arrived: Callable[[], int] | None = None) -> None:
        self._proxy, self._marks = proxy, list(marks)
        self._arrived = arrived or (lambda: self.total)
        self.total = 0

    def __call__(self, count: int) -> None:
        self.total += count
        arrived, passed = self._arrived(), len(self._marks)
        self._marks = [mark for mark in self._marks if mark > arrived]
        if len(self._marks) < passed:
            self._proxy.cut()


def arrived_bytes(gateway: Gateway, task: str) -> int:
    """Return how much of the uploads of a task is at the gateway and not yet whole."""
    total = 0
    for part in gateway.parts(task):
        with contextlib.suppress(FileNotFoundError):  # whole by now
            total += part.stat().st_size
    return total


class Peak:
    """The most resident memory that a process had while the block ran, over what it had at its beginning."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self.growth = 0

    def _watch(self, before: int) -> None:
        while not self._over.wait(0.01):
            self.growth = max(self.growth, self._process.memory_info().rss - before)

    def __enter__(self) -> Peak:
        self._thread = threading.Thread(target=self._watch, args=(self._process.memory_info().rss,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# -- cut lines ---------------------------------------------------------------------------------------------------------


def test_a_cut_upload_goes_on_where_the_service_has_it(gateway: Gateway, task: str, source: Path) -> None:
    size = source.stat().st_size
    with Proxy(gateway.results_url) as proxy:
        progress = CutAt(proxy, size // 2, size - 1)
        stored = gateway.store(url=proxy.url).put(source, f"{task}/f", progress=progress)

        assert proxy.cuts >= 2
    assert stored.sha256 == sha256_of(source) == sha256_of(gateway.root / task / "f")
    assert progress.total == size
    assert gateway.parts(task) == []


def test_a_cut_upload_sends_no_byte_twice_that_has_arrived(gateway: Gateway, task: str, source: Path) -> None:
    content = source.read_bytes()
    digest = sha256_of(source)
    store = gateway.store()
    with Proxy(gateway.results_url) as proxy:
        parts = urlsplit(proxy.url)
        with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=patient(30)) as line:
            line.sendall(
                f"POST /api/v1/results/{task}/files/f HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
                f"Repr-Digest: {repr_digest(digest)}\r\nUpload-Length: {len(content)}\r\nUpload-Offset: 0\r\n"
                f"Content-Length: {len(content)}\r\n\r\n".encode()
                + content[: 6 * MIB]
            )
            eventually(lambda: [p for p in gateway.parts(task) if p.stat().st_size >= 5 * MIB], what="5 MiB of it")
            proxy.cut()

    sent: list[int] = []
    throttle = Throttle(None)
    throttle.wait_for_bytes = sent.append  # type: ignore[method-assign]
    gateway.store(throttle=throttle).put(source, f"{task}/f")

    assert sum(sent) <= 3 * MIB
    assert [file.sha256 for file in store.list(f"{task}/f")] == [digest]


def test_a_gateway_that_starts_again_goes_on_with_its_parts(tmp_path: Path, source: Path) -> None:
    with Gateway(tmp_path) as first, Proxy(first.results_url) as proxy:

        def kill(count: int) -> None:
            first.close()

        with pytest.raises(ArtifactError, match=r"t/f cannot be stored in http://127\.0\.0\.1:\d+/api/v1/results: "):
            first.store(url=proxy.url, max_attempts=1, throttle=Throttle(None)).put(source, "t/f", progress=kill)
    with Gateway(tmp_path) as second:
        assert second.files() == []
        second.store().put(source, "t/f")
        assert sha256_of(second.root / "t" / "f") == sha256_of(source)
        assert second.parts() == []


def test_a_cut_download_goes_on_where_it_ended(gateway: Gateway, task: str, source: Path, tmp_path: Path) -> None:
    size = source.stat().st_size
    gateway.store().put(source, f"{task}/f")
    sent: list[int] = []
    throttle = Throttle(None)
    throttle.wait_for_bytes = sent.append  # type: ignore[method-assign]
    with Proxy(gateway.results_url) as proxy:
        progress = CutAt(proxy, size // 2)
        got = gateway.store(url=proxy.url, throttle=throttle).get(f"{task}/f", tmp_path / "f", progress=progress)

        assert proxy.cuts >= 1
    assert got.sha256 == sha256_of(tmp_path / "f") == sha256_of(source)
    assert progress.total == size
    # What had come was not fetched again; only the beginning of the answer that told the version is thrown away.
    assert sum(sent) < size + 2 * MIB


def test_a_line_that_is_cut_again_and_again_is_borne_as_long_as_bytes_come(
    gateway: Gateway, task: str, source: Path, tmp_path: Path
) -> None:
    marks = range(MIB // 2, 8 * MIB, MIB)
    with Proxy(gateway.results_url) as proxy:
        store = gateway.store(url=proxy.url, max_attempts=3, throttle=Throttle(16 * MIB))
        there = CutAt(proxy, *marks, arrived=lambda: arrived_bytes(gateway, task))
        store.put(source, f"{task}/f", progress=there)
        assert proxy.cuts >= 1
        store.get(f"{task}/f", tmp_path / "f", progress=CutAt(proxy, *marks))
        assert proxy.cuts >= 4
    assert sha256_of(tmp_path / "f") == sha256_of(source)


def test_a_gateway_that_is_not_there_is_an_error_that_names_it(gateway: Gateway, source: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: it refuses every connection, and nobody else can have it
        taken.bind(("127.0.0.1", 0))
        store = gateway.store(url=f"http://127.0.0.1:{taken.getsockname()[1]}/api/v1/results", max_attempts=2)
        puts, gets = (lambda: store.put(source, "t/f")), (lambda: store.get("t/f", tmp_path / "f"))
        for action in (puts, gets, lambda: store.list("")):
            with pytest.raises(ArtifactError, match=r"cannot be reached; start the gateway, or correct the address"):
                action()


# -- bad bytes ---------------------------------------------------------------------------------------------------------


class Twister:
    """Passes a connection on to a gateway, and changes every `at`-th byte that the client sends, `times` times."""

    def __init__(self, url: str, at: int, times: int) -> None:
        parts = urlsplit(url)
        self._target = (str(parts.hostname), parts.port or 0)
        self._at, self.left = at, times
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = parts._replace(netloc=f"127.0.0.1:{self._listener.getsockname()[1]}").geturl()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, twisted: bool) -> None:
        passed, at = 0, self._at
        try:
            while chunk := source.recv(65_536):
                if twisted and self.left and passed <= at < passed + len(chunk):
                    self.left -= 1
                    place = at - passed
                    at += self._at
                    chunk = chunk[:place] + bytes([chunk[place] ^ 1]) + chunk[place + 1 :]
                passed += len(chunk)
                sink.sendall(chunk)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                end.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_byte_that_changed_on_the_way_is_found_and_sent_again(gateway: Gateway, task: str, source: Path) -> None:
    twister = Twister(gateway.results_url, 3 * MIB, 1)
    try:
        gateway.store(url=twister.url).put(source, f"{task}/f")
        assert twister.left == 0
        assert sha256_of(gateway.root / task / "f") == sha256_of(source)

        source.write_bytes(source.read_bytes()[::-1])
        twister.left = 1000
        with pytest.raises(ArtifactError, match=r"came in with the SHA-256 .*; it is not stored, send it again"):
            gateway.store(url=twister.url).put(source, f"{task}/f")
        assert sha256_of(gateway.root / task / "f") != sha256_of(source)
    finally:
        twister.close()


def test_a_byte_that_rotted_on_the_disk_is_found(gateway: Gateway, task: str, source: Path, tmp_path: Path) -> None:
    stored = gateway.store().put(source, f"{task}/f")
    with (gateway.root / task / "f").open("r+b") as file:
        file.seek(5 * MIB)
        file.write(b"\xff")

    with pytest.raises(ArtifactError, match=f"SHA-256 is .* instead of {stored.sha256}"):
        gateway.store().get(f"{task}/f", tmp_path / "f", sha256=stored.sha256)
    assert [path.name for path in tmp_path.iterdir()] == ["source.bin"]


# -- several at once -------------------------------------------------------------------------------------------------


def test_two_uploads_of_one_name_do_not_meet(gateway: Gateway, task: str, source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(source.read_bytes()[::-1])
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        target = gateway.root / task / "f"
        while not over.is_set():
            if target.exists():
                seen.add(sha256_of(target))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(gateway.store().put, path, f"{task}/f") for path in (source, other, source, other)]
            for future in done:
                future.result(patient(60))
    finally:
        over.set()
        watcher.join()

    assert seen <= {sha256_of(source), sha256_of(other)}
    assert sha256_of(gateway.root / task / "f") in {sha256_of(source), sha256_of(other)}
    assert gateway.parts(task) == []


def test_what_is_there_is_not_sent_again(gateway: Gateway, task: str, source: Path, tmp_path: Path) -> None:
    sent: list[int] = []
    throttle = Throttle(None)
    throttle.wait_for_bytes = sent.append  # type: ignore[method-assign]
    store = gateway.store(throttle=throttle)

    first = store.put(source, f"{task}/f")
    assert sum(sent) == source.stat().st_size
    told: list[int] = []
    assert store.put(source, f"{task}/f", progress=told.append) == first
    store.get(f"{task}/f", tmp_path / "f", sha256=first.sha256)
    sent_for_both = sum(sent)
    store.get(f"{task}/f", tmp_path / "f", sha256=first.sha256)

    assert sum(told) == source.stat().st_size
    assert sum(sent) == sent_for_both == 2 * source.stat().st_size


def test_slow_clients_hold_up_nobody(gateway: Gateway, task: str, source: Path) -> None:
    store = gateway.store()
    store.put(source, f"{task}/f")
    parts = urlsplit(gateway.url)
    lines = [socket.create_connection((str(parts.hostname), parts.port or 0), timeout=patient(30)) for _ in range(60)]
    try:
        login = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        for number, line in enumerate(lines):
            if number % 2:  # asks for the file, and reads none of it
                line.sendall(f"GET /api/v1/results/{task}/files/f HTTP/1.1\r\n{login}\r\n".encode())
            else:  # sends one byte of many
                line.sendall(
                    f"POST /api/v1/results/{task}/files/slow-{number} HTTP/1.1\r\n{login}"
                    "Content-Length: 1000000\r\n\r\nx".encode()
                )
        eventually(lambda: len(gateway.parts(task)) == 30, what="30 slow uploads")

        store.put(source, f"{task}/g")
        assert len(gateway.parts(task)) == 30, "it waited for the slow ones"
    finally:
        for line in lines:
            line.close()
    eventually(lambda: not gateway.parts(task), what="the end of the slow uploads")


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_an_error_that_does_not_tell_it(gateway: Gateway, source: Path, tmp_path: Path) -> None:
    wrong = "a-token-that-is-wrong"
    store = HttpStore(gateway.results_url, settings=Settings(), token=wrong, throttle=Throttle(None))
    for action in (
        lambda: store.put(source, "t/f"),
        lambda: store.get("t/f", tmp_path / "f"),
        lambda: store.list("t"),
        lambda: store.delete("t"),
    ):
        with pytest.raises(ArtifactError, match="set GPUFLOW_WORKER_TOKEN and GPUFLOW_GATEWAY_URL") as caught:
            action()
        assert wrong not in str(caught.value)
        assert TOKEN not in str(caught.value)


class Listener(http.server.BaseHTTPRequestHandler):
    """Notes the headers of each request, and repeats them in its refusal."""

    seen: ClassVar[list[dict[str, str]]] = []
    redirect: ClassVar[str | None] = None

    def do_GET(self) -> None:
        self.seen.append({name.lower(): value for name, value in self.headers.items()})
        if self.redirect:
            self.send_response(302)
            self.send_header("Location", self.redirect)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = f'{{"type": "x", "detail": "you sent {self.headers.get("Authorization")}"}}'.encode()
        self.send_response(418)
        self.send_header("Content-Type", "application/problem+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[Callable[[str | None], tuple[str, list[dict[str, str]]]]]:
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(redirect: str | None = None) -> tuple[str, list[dict[str, str]]]:
        handler = type("Handler", (Listener,), {"seen": [], "redirect": redirect})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", handler.seen  # type: ignore[attr-defined]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_workers_token_goes_to_its_own_gateway_alone(listener: Any, tmp_path: Path) -> None:
    ours, seen_by_us = listener()
    theirs, seen_by_them = listener()
    via_us, _ = listener(f"{theirs}/x")
    settings = Settings(worker_token=TOKEN, gateway_url=ours)  # type: ignore[arg-type]
    given = Settings(worker_token=TOKEN, gateway_url=via_us)  # type: ignore[arg-type]

    name = "api/v1/results/task/files/x"
    for url, chosen in (
        (f"{ours}/{name}", settings),
        (f"{ours}/x", settings),
        (f"{theirs}/{name}?key=hidden", settings),
        (f"{via_us}/{name}", given),
    ):
        with pytest.raises(ArtifactError, match="you sent") as caught:
            fetch_http(url, tmp_path / "x", settings=chosen, throttle=Throttle(None), max_attempts=1)
        assert TOKEN not in str(caught.value)
        assert "hidden" not in str(caught.value)

    assert [seen.get("authorization") for seen in seen_by_us] == [f"Bearer {TOKEN}", None]
    assert [seen.get("authorization") for seen in seen_by_them] == [None, None]


@pytest.mark.parametrize("url", ["http://user:password@host/api/v1/results", "http://host/results?key=1", "http://"])
def test_a_destination_with_secrets_in_it_is_refused(url: str) -> None:
    with pytest.raises(ArtifactError, match="names no results service") as caught:
        HttpStore(url, settings=Settings(), throttle=Throttle(None))
    assert "password" not in str(caught.value)


# -- other servers -----------------------------------------------------------------------------------------------------


def test_a_plain_web_server_will_do_for_a_download(tmp_path: Path, source: Path) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(source.parent))

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the line is cut: that is the test
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Proxy(f"http://127.0.0.1:{server.server_port}/source.bin") as proxy:
            progress = CutAt(proxy, 3 * MIB)  # it knows no ranges: all of it comes again, and what is here is kept
            target = tmp_path / "copy"
            got = fetch_http(
                proxy.url, target, settings=Settings(), throttle=Throttle(None), progress=progress, max_attempts=3
            )
            assert proxy.cuts >= 1
        assert (got.sha256, progress.total) == (sha256_of(source), source.stat().st_size)
        assert sha256_of(target) == sha256_of(source)
    finally:
        server.shutdown()
        server.server_close()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_large_file_takes_little_memory_at_either_end(gateway: Gateway, task: str, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    block = hashlib.sha512(b"x").digest() * 16_384
    with large.open("wb") as file:
        for number in range(200):
            file.write(number.to_bytes(8, "big") + block[8:])
    store = gateway.store()
    httpx.get(f"{gateway.url}/healthz", timeout=patient(30))

    with Peak(gateway.process.pid) as theirs, Peak(psutil.Process().pid) as ours:
        began = time.monotonic()
        stored = store.put(large, f"{task}/large")
        uploaded = time.monotonic()
        store.get(f"{task}/large", tmp_path / "back.bin", sha256=stored.sha256)
        downloaded = time.monotonic()

    print(
        f"200 MiB: up {200 / (uploaded - began):.0f} MiB/s, down {200 / (downloaded - uploaded):.0f} MiB/s, "
        f"memory gateway +{theirs.growth / MIB:.0f} MiB, client +{ours.growth / MIB:.0f} MiB"
    )
    assert sha256_of(tmp_path / "back.bin") == stored.sha256
    assert theirs.growth < 100 * MIB
    assert ours.growth < 100 * MIB
