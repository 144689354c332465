"""TLS of the gateway: a self-signed pair for development, or the operator's."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gpuflow.cluster.commands import with_our_packages
from gpuflow.gateway.certificates import development_pair
from tests.support.gateway import Gateway
from tests.support.waiting import patient


def test_a_self_signed_gateway_is_trusted_by_its_certificate_alone(tmp_path: Path) -> None:
    with Gateway(tmp_path, "--ssl", env={"GPUFLOW_STATE_DIR": str(tmp_path / "state")}) as gateway:
        folder = tmp_path / "state" / "tls"
        assert gateway.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(folder / "gateway.crt"))
        assert httpx.get(f"{gateway.url}/healthz", verify=trusted, timeout=patient(30)).json() == {"status": "ok"}
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{gateway.url}/healthz", timeout=patient(30))
        assert (folder / "gateway.key").stat().st_mode & 0o777 == 0o600


def test_a_pair_is_kept_until_a_name_is_missing(tmp_path: Path) -> None:
    first = development_pair(tmp_path, "127.0.0.1").certificate.read_bytes()
    assert development_pair(tmp_path, "127.0.0.1").certificate.read_bytes() == first
    other = development_pair(tmp_path, "gpu.example").certificate.read_bytes()
    assert other != first
    (tmp_path / "gateway.key").write_text("cut")
    assert development_pair(tmp_path, "gpu.example").certificate.read_bytes() != other


def test_the_operators_pair_is_served_and_a_wrong_one_refused(tmp_path: Path) -> None:
    pair, other = development_pair(tmp_path / "a", "127.0.0.1"), development_pair(tmp_path / "b", "127.0.0.1")
    options = ("--ssl-certfile", str(pair.certificate), "--ssl-keyfile", str(pair.key))
    with Gateway(tmp_path, *options) as gateway:
        trusted = ssl.create_default_context(cafile=str(pair.certificate))
        assert httpx.get(f"{gateway.url}/healthz", verify=trusted, timeout=patient(30)).status_code == 200
    for wrong, said in (
        (("--ssl-certfile", str(pair.certificate)), "--ssl-keyfile"),
        ((*options[:3], str(other.key)), "cannot be used"),
        ((*options[:3], str(tmp_path / "none")), "cannot be used"),
        ((*options, "--ssl"), "one of them"),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", "from gpuflow.cli import main; main()", "gateway", "--port", "0", *wrong],
            env=with_our_packages(
                {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "GPUFLOW_WORKER_TOKEN": "0123456789abcdef"}
            ),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=patient(30),
            check=False,
        )
        assert ended.returncode == 2, ended.stderr
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_connection_without_its_handshake_is_ended_in_time(tmp_path: Path) -> None:
    code = "import gpuflow.gateway.connections as c; c.Connections.__init__.__kwdefaults__['header_seconds'] = 1.0"
    env = {"GPUFLOW_STATE_DIR": str(tmp_path / "state")}
    with Gateway(tmp_path, "--ssl", env=env, code=code) as gateway, contextlib.ExitStack() as stack:
        port = int(gateway.url.rpartition(":")[2])
        hello = b"\x16\x03\x01\x02\x00\x01"  # the begin of a handshake
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=25)) for _ in range(20)]
        for number, line in enumerate(silent):
            line.sendall(hello[: number % len(hello)])
        for line in silent:
            with contextlib.suppress(ConnectionResetError):
                assert line.recv(1) == b""
        trusted = ssl.create_default_context(cafile=str(tmp_path / "state" / "tls" / "gateway.crt"))
        assert httpx.get(f"{gateway.url}/healthz", verify=trusted, timeout=patient(30)).status_code == 200
        assert "Traceback" not in gateway.log
