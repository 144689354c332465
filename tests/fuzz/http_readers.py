"""Readers of HTTP: requests and forms at the gateway, answers of servers at the store."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shutil
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpcore
import httpx

from gpuflow.artifacts import http_download, http_store
from gpuflow.artifacts.http_store import HttpStore, fetch_http
from gpuflow.artifacts.repr_digest import repr_digest
from gpuflow.artifacts.throttle import Throttle
from gpuflow.errors import ArtifactError
from gpuflow.gateway.app import create_app
from gpuflow.gateway.forms import Form
from gpuflow.gateway.problems import Problem
from gpuflow.settings import Settings
from tests.fuzz.mutation import Mutator, as_json
from tests.fuzz.reader import Reader

#: It tells each malformed form, without a word of it.
logging.getLogger("python_multipart").setLevel(logging.ERROR)
_FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.bin"\r\n'
    b"Content-Type: x/y\r\n\r\n12345\r\n--b--\r\n"
)
_TWO = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\ntext\r\n' + _FORM
_PIECES = (
    b"--b", b"--b--", b"\r\n", b"\r\n\r\n", b"\r\n--b\r\n", b'filename="', b"filename*=UTF-8''%e2%82", b"; ", b"%22",
    b"Content-Disposition: form-data", b"Content-Disposition: " + b"a" * 200, b": ", b"\r", b"boundary=",
)  # fmt: skip


def _cut(data: bytes) -> list[bytes]:
    """Return a body in some chunks, the same ones for the same body."""
    rng = random.Random(zlib.crc32(data))
    step = rng.choice((7, 100, 4096, len(data) + 1))
    step = max(step, len(data) // 100 + 1)
    return [data[start : start + step] for start in range(0, len(data), step)]


class UploadForm(Reader):
    """A body of multipart/form-data; the first line is the Content-Type."""

    name = "upload forms"
    declared = (Problem,)

    def made_of(self) -> Mutator:
        head = b"multipart/form-data; boundary=b\n"
        types = (b"multipart/form-data; boundary=\n", b"multipart/form-data\n", b'multipart/form-data; boundary="b"\n')
        return Mutator(
            [head + _FORM, head + _TWO, head + _FORM + b"tail", *(one + _FORM for one in types)], words=_PIECES
        )

    def read(self, data: bytes) -> None:
        kind, _, body = data.partition(b"\n")
        _run(self._take(kind.decode("latin-1"), body))

    async def _take(self, kind: str, body: bytes) -> None:
        async def stream() -> AsyncIterator[bytes]:
            for chunk in _cut(body):
                yield chunk

        form = Form({"content-type": kind}, stream())
        while (name := await form.next_file()) is not None:
            name.encode("utf-8", "surrogatepass")
            async for block in form.body():
                assert block or block == b""


def _run(coroutine: Any) -> None:
    """Run a coroutine that waits for nothing: without a loop, which would cost more than the reader does."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something")


class GatewayRequests(Reader):
    """Requests to the gateway with the right token: path, headers and body; whatever they are, no answer is a 500."""

    name = "gateway requests"

    _SEEDS: tuple[Any, ...] = (
        {"method": "POST", "path": "/api/v1/results/t/files/a", "query": "", "headers": {}, "body": "12345"},
        {"method": "POST", "path": "/api/v1/results/t/files/a", "query": "",
         "headers": {"Repr-Digest": repr_digest("0" * 64), "Upload-Length": "9", "Upload-Offset": "0"},
         "body": "12345"},
        {"method": "HEAD", "path": "/api/v1/results/t/files/a", "query": "",
         "headers": {"Repr-Digest": repr_digest("1" * 64)}, "body": ""},
        {"method": "GET", "path": "/api/v1/results/t/files/kept.bin", "query": "",
         "headers": {"Range": "bytes=0-3", "If-Range": '"x"', "Want-Repr-Digest": "sha-256=1"}, "body": ""},
        {"method": "GET", "path": "/api/v1/results", "query": "prefix=t&after=&limit=10", "headers": {}, "body": ""},
        {"method": "GET", "path": "/api/v1/results/t/files", "query": "", "headers": {}, "body": ""},
        {"method": "DELETE", "path": "/api/v1/results/t/files/a%2fb", "query": "", "headers": {}, "body": ""},
        {"method": "POST", "path": "/api/v1/results/t/files", "query": "",
         "headers": {"Content-Type": "multipart/form-data; boundary=b"}, "body": _TWO.decode()},
    )  # fmt: skip
    _TOKEN = "token-of-the-fuzzing"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        results = folder / "results"
        (results / "t").mkdir(parents=True)
        (results / "t" / "kept.bin").write_bytes(b"0123456789")
        self.app = create_app(Settings(results_dir=results, worker_token=self._TOKEN))
        self.loop = asyncio.new_event_loop()
        self.sync = mock.patch("os.fsync", return_value=None)
        self.sync.start()
        self.count = 0

    def made_of(self) -> Mutator:
        keys = (
            "method", "path", "query", "headers", "body", "Range", "If-None-Match", "Content-Length", "Upload-Offset",
            "Upload-Length", "Repr-Digest", "If-Range", "Content-Type", "Origin", "Host", "Authorization",
        )  # fmt: skip
        words = (
            *_PIECES,
            b"/../",
            b"%2e%2e",
            b"%00",
            b"%ff",
            b"%2f",
            b"/files/",
            b"bytes=",
            b"sha-256=:",
            b"?1",
            b"limit=",
        )
        return Mutator([as_json(seed) for seed in self._SEEDS], words=words, keys=keys)

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return super().make(rng)
        return as_json(self.mutator.tree(rng, rng.choice(self._SEEDS)))

    def read(self, data: bytes) -> str:
        try:
            asked = json.loads(data)
        except (ValueError, RecursionError):
            path, _, body = data.partition(b"\n")
            asked = {
                "method": "POST",
                "path": "/api/v1/results/" + path.decode("latin-1"),
                "body": body.decode("latin-1"),
            }
        if not isinstance(asked, dict):
            return "no request"
        headers = asked.get("headers")
        pairs = list(headers.items()) if isinstance(headers, dict) else []
        given = {name.lower() for name, _ in pairs}
        if "authorization" not in given:
            pairs.append(("Authorization", f"Bearer {self._TOKEN}"))
        status = self.loop.run_until_complete(self._answer(asked, pairs))
        assert status != 500, "the gateway failed"
        self.count += 1
        if self.count % 500 == 0:
            for place in (self.folder / "results").iterdir():
                if place.name != "t":
                    shutil.rmtree(place, ignore_errors=True) if place.is_dir() else place.unlink()
        return f"HTTP {status}"

    async def _answer(self, asked: dict[str, Any], pairs: list[tuple[str, Any]]) -> int:
        raw_path = _octets(asked.get("path"), "/")
        body = _octets(asked.get("body"), "")
        chunks = [*_cut(body), b""]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
            "method": str(asked.get("method") or "GET").upper()[:10],
            "path": _unquoted(raw_path), "raw_path": raw_path, "query_string": _octets(asked.get("query"), ""),
            "headers": [(_octets(name, "").lower(), _octets(value, "")) for name, value in pairs],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            if not chunks:
                await asyncio.Event().wait()  # a client that stays connected
            chunk = chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

        statuses = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                for name, value in message["headers"]:
                    assert b"\n" not in name + value and b"\r" not in name + value, "a header is split"

        await self.app(scope, receive, send)
        return statuses[0] if statuses else 0

    def close(self) -> None:
        self.sync.stop()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


def _octets(value: Any, default: str) -> bytes:
    text = default if value is None else value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "surrogatepass")[: 64 << 10]


def _unquoted(path: bytes) -> str:
    """Return a path as uvicorn gives it."""
    from urllib.parse import unquote

    return unquote(path.decode("latin-1"))


class _Backend(httpcore.NetworkBackend):
    """Answers each connection with the next of some answers; then there is nobody."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers

    def connect_tcp(self, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
        if not self._answers:
            raise httpcore.ConnectError("nobody is there")
        data = self._answers.pop(0)
        step = max(1, len(data) // 8 + 1)
        return httpcore.MockStream([data[start : start + step] for start in range(0, len(data), step)])


class _Transport(httpx.HTTPTransport):
    def __init__(self, answers: list[bytes]) -> None:
        self._pool = httpcore.ConnectionPool(network_backend=_Backend(answers))


class HttpAnswers(Reader):
    """Answers of a server that is no gateway, or a hostile one, to what the store and the downloads ask.

    The first byte says what is asked; answers are told apart by a line of their own.
    """

    name = "HTTP answers"
    declared = (ArtifactError,)
    _MARK = b"\n=====\n"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.source = folder / "source"
        self.source.write_bytes(b"0123456789")
        self.settings = Settings(
            worker_token="token-of-the-fuzzing", gateway_url="http://h", download_max_bytes=1 << 20,
            results_dir=folder / "results", cache_dir=folder / "cache",
        )  # fmt: skip
        self.patches = [mock.patch.object(module, "connect", self._connect) for module in (http_store, http_download)]
        self.patches.append(mock.patch("os.fsync", return_value=None))
        for patch in self.patches:
            patch.start()

    def _connect(self, token: str | None, hosts: Any = None) -> httpx.Client:
        return httpx.Client(transport=_Transport(self.answers), headers={"Authorization": f"Bearer {token}"})

    @staticmethod
    def _answer(status: str, body: bytes = b"", **headers: str) -> bytes:
        lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    def made_of(self) -> Mutator:
        file = {"name": "t/a", "bytes": 3, "sha256": "0" * 64}
        page = as_json({"files": [file, {**file, "name": "t/b"}], "next": "t/b"})
        last = as_json({"files": [], "next": None})
        problem = as_json({"type": "urn:gpuflow:problem:wrong-offset", "detail": "no", "status": 409})
        digest = repr_digest("84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882")
        one, answer = self._MARK, self._answer
        corpus = (
            b"l" + answer("200 OK", page) + one + answer("200 OK", last),
            b"d" + answer("200 OK", page) + one + answer("204 No Content") + one + answer("404 Not Found"),
            b"g" + answer("200 OK", b"0123456789", ETag='"x"', Repr_Digest=digest),
            b"g" + answer("302 Found", Location="/other") + one + answer("200 OK", b"0123456789"),
            b"g" + answer("206 Partial", b"345", Content_Range="bytes 3-5/10") + one + answer("200 OK", b"0123456789"),
            b"g" + answer("200 OK", b"x", Transfer_Encoding="chunked"),
            b"p" + answer("204 OK", Upload_Offset="0") + one + answer("201 Created", b"{}", Upload_Complete="?1"),
            b"l" + answer("409 Conflict", problem, Content_Type="application/problem+json"),
            b"g" + answer("500 Oh", problem, Content_Type="application/problem+json", Content_Encoding="gzip"),
        )
        words = (
            b"HTTP/1.1 ", b"HTTP/1.0 200\r\n", b"\r\n\r\n", b"Content-Length: 99999999999\r\n", b"Location: http://[",
            b"Location: //h:99999999/", b"Transfer-Encoding: chunked\r\n", b"5\r\n", b"ffffffffffffffff\r\n",
            b"Repr-Digest: sha-256=:", b"Content-Range: bytes ", b"Upload-Offset: ", b"301", b"304", b"100 Continue",
            one, b'"bytes": ', b'"name": ', b'"next": ', b"\r\n ",
        )  # fmt: skip
        return Mutator(corpus, words=words, keys=("files", "next", "name", "bytes", "sha256", "type", "detail"))

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.6:
            return super().make(rng)
        item = {"name": "t/a", "bytes": 3, "sha256": "0" * 64}
        seed = rng.choice(({"files": [item, item], "next": "t/a"}, {"type": "urn:gpuflow:problem:x", "detail": "no"}))
        body = as_json(self.mutator.tree(rng, seed))
        status = rng.choice(("200 OK", "200 OK", "201 X", "404 No", "409 No", "302 Go"))
        kind = rng.choice(("application/json", "application/problem+json"))
        answers = [self._answer(status, body, Content_Type=kind)] * rng.choice((1, 2))
        return rng.choice((b"l", b"d", b"p", b"g")) + self._MARK.join(answers)

    def read(self, data: bytes) -> None:
        what, self.answers = data[:1], data[1:].split(self._MARK)[:8]
        store = HttpStore("http://h/api/v1/results", settings=self.settings, throttle=Throttle(None), max_attempts=1)
        target = self.folder / "down" / "target"
        try:
            if what == b"l":
                for file in store.list("t"):
                    repr(file)
            elif what == b"d":
                store.delete("t")
            elif what == b"p":
                store.put(self.source, "t/a")
            else:
                fetch_http("http://h/x", target, settings=self.settings, throttle=Throttle(None), max_attempts=1)
        finally:
            shutil.rmtree(target.parent, ignore_errors=True)

    def close(self) -> None:
        for patch in self.patches:
            patch.stop()


__all__ = ["GatewayRequests", "HttpAnswers", "UploadForm"]
