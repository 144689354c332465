"""Strangers at the doors of a real gateway: slow, many, guessing, behind proxies, under other names."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from gpuflow.gateway.app import create_app
from gpuflow.settings import Settings
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import eventually, patient

#: Shortens what these tests wait for; the gateway takes it in before it starts.
HASTY = "import gpuflow.gateway.connections as c; c.Connections.__init__.__kwdefaults__['header_seconds'] = 1.0"
SLOW_BODY = "import gpuflow.gateway.doors as d; d.Doors.__init__.__kwdefaults__.update(patience_seconds=1.0)"
HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway")) as made:
        yield made


def connection(gateway: Gateway, source: str = "127.0.0.1") -> socket.socket:
    port = urlsplit(gateway.url).port
    assert port is not None
    return socket.create_connection(("127.0.0.1", port), timeout=patient(30), source_address=(source, 0))


def ended(line: socket.socket) -> bytes:
    """Return all that comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := line.recv(4096):
            found += piece
    return found


def client_of(gateway: Gateway, source: str, token: str = TOKEN) -> httpx.Client:
    return httpx.Client(
        base_url=gateway.results_url,
        headers={"Authorization": f"Bearer {token}"},
        transport=httpx.HTTPTransport(local_address=source),
        timeout=patient(30),
    )


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.9"], ids=["the address of the client", "another address"])
def test_a_thousand_half_open_connections_leave_a_client_alone(gateway: Gateway, source: str) -> None:
    with contextlib.ExitStack() as stack, client_of(gateway, "127.0.0.1") as client:
        assert client.put("/").status_code in (404, 405)  # it is connected before
        for _ in range(1000):
            stack.enter_context(connection(gateway, source)).sendall(HALF)
        for number in range(20):
            stored = client.post(f"/half-open/files/{number}", content=b"x" * 1000)
            assert stored.status_code == 201
        with client_of(gateway, "127.0.0.1") as fresh:
            assert len(fresh.get("/half-open/files").json()["files"]) == 20


def test_headers_that_drip_are_cut(tmp_path: Path) -> None:
    with Gateway(tmp_path, code=HASTY) as gateway, connection(gateway) as line:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            line.sendall(HALF)
            line.settimeout(0.05)
            while time.monotonic() - began < patient(30):
                line.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    answer = line.recv(100)
                    assert answer.startswith(b"HTTP/1.1 408") or not answer
                    break
        assert time.monotonic() - began < patient(30)
        # nor may a second request on the same connection begin and not end
        with connection(gateway) as again:
            again.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\n")
            assert b"408 Request Timeout" in ended(again)


def test_a_body_after_the_answer_is_cut(tmp_path: Path) -> None:
    with Gateway(tmp_path, code=HASTY) as gateway, connection(gateway) as line:
        line.sendall(b"POST /api/v1/results/t/files/f HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        line.settimeout(0.05)
        began, cut = time.monotonic(), False
        while not cut and time.monotonic() - began < patient(30):
            try:
                line.sendall(b"x")
                cut = line.recv(4096) == b""
            except TimeoutError:
                continue
            except OSError:
                cut = True
        assert cut


def test_a_body_that_drips_is_cut(tmp_path: Path) -> None:
    with Gateway(tmp_path, code=SLOW_BODY) as gateway, connection(gateway) as line:
        line.sendall(
            b"POST /api/v1/results/t/files/f HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
            b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
        )
        line.settimeout(0.05)
        began, answer = time.monotonic(), b""
        while b"too-slow" not in answer and time.monotonic() - began < patient(30):
            with contextlib.suppress(TimeoutError):
                line.sendall(b"x")
                answer += line.recv(4096)
        assert b" 408 " in answer and b"too-slow" in answer


def test_headers_without_end_are_refused(gateway: Gateway) -> None:
    with connection(gateway) as line:
        with contextlib.suppress(OSError):
            for _ in range(100):
                line.sendall(HALF + b"x" * 4096)
        assert b" 200 " not in ended(line)


@pytest.mark.parametrize("token", ["x", "short-of-it", "a" * 40, "", "a token with spaces in it"])
def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path, token: str) -> None:
    with pytest.raises(AssertionError, match="openssl rand -hex 32"):
        Gateway(tmp_path, token=token)


def test_wrong_tokens_are_limited_by_address_and_logged(tmp_path: Path) -> None:
    with Gateway(tmp_path) as gateway, client_of(gateway, "127.0.0.1") as friend:
        assert friend.get("/t/files").status_code == 200
        # When a stranger guesses
        with client_of(gateway, "127.0.0.2", "guess-0123456789abcdef") as stranger:
            codes = [stranger.get("/t/files").status_code for _ in range(60)]
            refused = stranger.get("/t/files")
        # Then it is slowed down
        assert codes[0] == 401
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        # and is not told when its guess is right
        with client_of(gateway, "127.0.0.2") as lucky:
            assert lucky.get("/t/files").status_code == 429
        # and everybody else goes on, those too who share the address of one that has sent wrong ones
        with client_of(gateway, "127.0.0.3") as other:
            assert other.get("/t/files").status_code == 200
        with client_of(gateway, "127.0.0.1", "guess-0123456789abcdef") as beside:
            assert {beside.get("/t/files").status_code for _ in range(40)} == {401, 429}
        assert friend.get("/t/files").status_code == 200
        # and the log tells of it in few lines, without the guess
        lines = [line for line in gateway.log.splitlines() if "wrong_token" in line]
        assert 1 <= len(lines) <= 10
        assert "client=127.0.0.2" in lines[0] and "path=/api/v1/results/t/files" in lines[0]
        assert "guess-0123456789abcdef" not in gateway.log and TOKEN not in gateway.log


@pytest.mark.parametrize("name", ["X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "Forwarded", "X-Real-IP"])
def test_what_a_proxy_has_sent_is_refused(gateway: Gateway, name: str) -> None:
    answer = httpx.get(f"{gateway.url}/healthz", headers={name: "127.0.0.1"}, timeout=patient(30))
    assert answer.status_code == 403
    assert "GPUFLOW_TRUSTED_PROXIES" in answer.json()["detail"]


def test_a_trusted_proxy_tells_who_asks(tmp_path: Path) -> None:
    with Gateway(tmp_path, env={"GPUFLOW_TRUSTED_PROXIES": "127.0.0.0/24"}) as gateway:

        def ask(forwarded: str, token: str = TOKEN) -> int:
            headers = {"Authorization": f"Bearer {token}", "X-Forwarded-For": forwarded, "Host": "gate.example"}
            return httpx.get(f"{gateway.results_url}/t/files", headers=headers, timeout=patient(30)).status_code

        assert ask("203.0.113.9") == 200
        codes = {ask("10.9.9.9, 203.0.113.7, 127.0.0.4", "guess-0123456789abcdef") for _ in range(40)}
        assert codes == {401, 429}
        assert ask("203.0.113.7") == 429  # the last hop that is no proxy of ours, whatever stands before it
        assert ask("10.9.9.9") == 200
        assert ask("nonsense") == 400
        assert "client=203.0.113.9" in gateway.log


@pytest.mark.parametrize("host", ["rebound.example", "rebound.example:8080", "127.0.0.1.evil.example", ""])
def test_another_name_is_refused_on_loopback(gateway: Gateway, host: str) -> None:
    with client_of(gateway, "127.0.0.1") as client:
        answer = client.get("/t/files", headers={"Host": host})
    assert answer.status_code == 403
    assert "another name" in answer.json()["detail"]


def test_the_access_log_has_one_line_for_each_request(tmp_path: Path) -> None:
    with Gateway(tmp_path) as gateway, client_of(gateway, "127.0.0.1") as client:
        for path in ("/health", "/healthz"):  # in no line
            assert httpx.get(f"{gateway.url}{path}", timeout=patient(30)).status_code == 200
        client.get("/forged%0Aevent=request%1b[2J/files")
        eventually(lambda: "event=request" in gateway.log, what="the line of the log")
        lines = gateway.log.splitlines()
        (line,) = [line for line in lines if "event=request method" in line]
        assert "status=" in line and "client=127.0.0.1" in line
        assert "\x1b" not in gateway.log
        assert len(lines) == 1


def test_without_a_token_nothing_is_served_by_chance(tmp_path: Path) -> None:
    app = create_app(Settings(results_dir=tmp_path))

    async def ask(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path)

    assert asyncio.run(ask("/healthz")).status_code == 200
    refused = asyncio.run(ask("/api/v1/results/t/files"))
    assert refused.status_code == 403
    assert "GPUFLOW_WORKER_TOKEN" in refused.json()["detail"]
