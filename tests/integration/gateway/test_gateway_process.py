"""The process `gpuflow gateway`: its limits by settings, its end, its log, and what it says without its libraries."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from gpuflow.artifacts.repr_digest import repr_digest
from gpuflow.cluster.commands import with_our_packages
from tests.integration.gateway.test_results_service import CONTENT, digest, problem
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import eventually, patient

MIB = 1 << 20


@contextlib.contextmanager
def begun_upload(gateway: Gateway, name: str, content: bytes, sent: int) -> Iterator[socket.socket]:
    """Begin an upload of `content`, send so much of it, and hold the line."""
    parts = urlsplit(gateway.url)
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=patient(30)) as line:
        line.sendall(
            f"POST /api/v1/results/t/files/{name} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Repr-Digest: {repr_digest(digest(content))}\r\nUpload-Length: {len(content)}\r\nUpload-Offset: 0\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content[:sent]
        )
        yield line


def test_the_largest_file_is_a_setting_that_the_refusal_names(tmp_path: Path) -> None:
    with Gateway(tmp_path, env={"GPUFLOW_GATEWAY_MAX_FILE_BYTES": "1000"}) as gateway:
        for answer in (
            httpx.post(f"{gateway.results_url}/t/files/f", headers=gateway.headers, content=CONTENT),
            httpx.post(f"{gateway.results_url}/t/files/f", headers=gateway.headers, content=iter([CONTENT])),
            httpx.post(f"{gateway.results_url}/t/files", headers=gateway.headers, files={"file": ("f", CONTENT)}),
        ):
            assert (answer.status_code, problem(answer)) == (413, "too-large")
            assert "GPUFLOW_GATEWAY_MAX_FILE_BYTES" in answer.json()["detail"]
        assert gateway.files() == []
        assert gateway.parts() == []


def test_the_count_of_open_uploads_is_a_setting_that_the_refusal_names(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    with Gateway(tmp_path, env={"GPUFLOW_GATEWAY_MAX_UPLOADS": "2"}) as gateway:
        with begun_upload(gateway, "a", bytes(MIB), 10), begun_upload(gateway, "b", bytes(MIB), 10):
            eventually(lambda: len(gateway.parts("t")) == 2, what="two open uploads")
            answer = httpx.post(f"{gateway.results_url}/t/files/f", headers=gateway.headers, content=CONTENT)
            assert (answer.status_code, problem(answer)) == (429, "too-many-uploads")
            assert "GPUFLOW_GATEWAY_MAX_UPLOADS" in answer.json()["detail"]
            assert answer.headers["Retry-After"] == "1"
        gateway.store().put(source, "t/f")  # it comes again until there is room
        assert gateway.files() == ["t/f"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_its_end_keeps_what_has_come_in(tmp_path: Path, number: int, code: int) -> None:
    content = os.urandom(8 * MIB)
    (tmp_path / "source").write_bytes(content)
    with (
        Gateway(tmp_path, env={"GPUFLOW_GRACE_SEC": "1"}) as gateway,
        begun_upload(gateway, "f", content, 4 * MIB),
    ):
        eventually(lambda: sum(part.stat().st_size for part in gateway.parts("t")) >= 3 * MIB, what="3 MiB")
        gateway.process.send_signal(number)
        assert gateway.process.wait(patient(30)) == code
        assert "Traceback" not in gateway.log
    kept = sum(part.stat().st_size for part in gateway.parts("t"))
    assert 3 * MIB <= kept <= 4 * MIB
    assert gateway.files() == []
    with Gateway(tmp_path) as again:
        assert (again.store().put(tmp_path / "source", "t/f")).sha256 == digest(content)


def test_an_upload_that_ends_in_time_is_taken_in_by_a_gateway_that_stops(tmp_path: Path) -> None:
    content = os.urandom(2 * MIB)
    with Gateway(tmp_path, env={"GPUFLOW_GRACE_SEC": "20"}) as gateway:
        with begun_upload(gateway, "f", content, MIB) as line:
            eventually(lambda: gateway.parts("t"), what="the part")
            gateway.process.send_signal(signal.SIGTERM)
            line.sendall(content[MIB:])
            assert b" 201 " in line.recv(4096).split(b"\r\n")[0]
        gateway.process.wait(patient(30))
        assert gateway.files() == ["t/f"]


def test_the_token_is_never_in_its_log(tmp_path: Path) -> None:
    code = (
        "import gpuflow.gateway.results as results\n"
        "def broken(*_, **__):\n"
        "    raise RuntimeError('the token is ' + __import__('os').environ['GPUFLOW_WORKER_TOKEN'])\n"
        "results._progress_of = broken\n"
    )
    with Gateway(tmp_path, code=code) as gateway:
        for headers in (gateway.headers, {"X-Worker-Token": TOKEN}):
            answer = httpx.head(
                f"{gateway.results_url}/t/files/{TOKEN}", headers={**headers, "Repr-Digest": repr_digest(digest(b""))}
            )
            assert answer.status_code == 500
        eventually(lambda: gateway.log.count("RuntimeError: the token is ***") >= 2, what="the log of the failures")
        assert TOKEN not in gateway.log


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "python_multipart"])
def test_without_its_libraries_it_names_the_mend(missing: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from gpuflow.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "gateway"], cwd=tmp_path, env=with_our_packages(os.environ),
        capture_output=True, text=True, timeout=patient(60),
    )  # fmt: skip

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpuflow: the gateway needs ")
    assert "pip install 'gpuflow[gateway]'" in line
