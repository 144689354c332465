"""Another user of the machine at the doors of `gpuflow up`; and who takes a port that a server has left."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from gpuflow.broker.embedded import EmbeddedServer
from gpuflow.broker.embedded_files import ServerFiles
from gpuflow.broker.embedded_process import listens
from gpuflow.gateway.login import login_file, read_login
from tests.integration.test_cli import Shell, pipeline, stage
from tests.support.users import need_root
from tests.support.waiting import eventually, patient

STRANGER = 65_534  # nobody

#: What another user tries: read each file, connect to the socket; says what worked.
ATTEMPTS = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        if path.endswith(".sock"):
            socket.socket(socket.AF_UNIX).connect(path)
        else:
            open(path).read()
        print("WORKED", path)
    except OSError as error:
        print("refused", path, error.strerror)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    try:
        yield made
    finally:
        made.close()


class Impostor:
    """Listens on a port that a server has left, and keeps all that it is sent."""

    def __init__(self, port: int) -> None:
        self.heard = b""
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        eventually(lambda: self._bound(port), within=10, what="the port of the killed server")
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _bound(self, port: int) -> bool:
        try:
            self._listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with line:
                self.heard += line.recv(4096)
                line.sendall(b"+OK\r\n")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_another_user_reads_nothing_and_reaches_no_socket(shell: Shell) -> None:
    need_root()
    # Given a local cluster, below folders that everybody may enter
    process, out = shell.start("up", "--no-beat")
    text = shell.until(process, out, "ready")
    for folder in [shell.folder, *shell.folder.parents]:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    state = shell.folder / "state"
    state.chmod(0o755)
    files = [state / "embedded" / "server.sock", state / "embedded" / "server.json", login_file(state)]
    files += [path for path in [state / "flower-password", *state.glob("logs/*.log")] if path.exists()]
    assert all(path.exists() for path in files), files
    assert stat.S_IMODE(login_file(state).stat().st_mode) == 0o600
    # When another user tries all of them
    tried = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ATTEMPTS, str(STRANGER), *map(str, files)],
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(30),
    )
    # Then nothing worked, and no secret was shown on the terminal
    assert tried.stdout.count("refused") == len(files), tried.stdout
    login = read_login(state)
    assert login is not None and login[1] not in text
    # and the gateway knows its user from the others
    address, token = login
    assert httpx.get(f"{address}/api/v1/results", timeout=patient(30)).status_code == 401
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{address}/api/v1/results", headers=headers, timeout=patient(30)).status_code == 200
    # and the user's own tasks run, their results over HTTP too
    spec = pipeline(stage("a"))
    spec["spec"]["output"] = {"destination": {"type": "http"}}
    assert shell("submit", shell.write(spec)).returncode == 0
    eventually(lambda: [row["state"] for row in shell.json("status")["pipelines"]] == ["SUCCEEDED"], what="its end")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=patient(30)) == 0
    assert not login_file(state).exists()


def test_who_takes_the_port_of_a_killed_server_gets_no_password(tmp_path: Path) -> None:
    # Given a server on a port, because its folder has too long a path for a socket
    state = tmp_path / ("long-" * 30)
    server = EmbeddedServer(state)
    url = server.start()
    former = urlsplit(url)
    record = ServerFiles(state).read_record()
    assert record is not None and record.port == former.port and listens(record.pid, record.port)
    # When it is killed and somebody takes its port
    os.kill(record.pid, signal.SIGKILL)
    eventually(lambda: not server.alive, within=10, what="the end of the server")
    impostor = Impostor(record.port)
    try:
        # Then who looks for the server finds none, and who starts one gets another port
        assert EmbeddedServer.running(state) is None
        again = urlsplit(server.start())
        assert again.port != former.port
        assert EmbeddedServer.running(state) == again.geturl()
        # and the impostor was sent nothing at all
        assert impostor.heard == b""
        # and what a client of the former server may still send it opens nothing
        assert again.password != former.password
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=again.port or 0, password=former.password).ping()
    finally:
        impostor.close()
        server.stop()


def test_a_port_that_is_taken_while_the_server_starts_gets_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    impostor = Impostor(port)
    ports = iter([port])
    from gpuflow.broker import embedded

    real = embedded.free_port
    monkeypatch.setattr(embedded, "free_port", lambda preferred: next(ports, None) or real(preferred))
    server = EmbeddedServer(tmp_path / ("long-" * 30))
    try:
        assert urlsplit(server.start()).port != port
        assert impostor.heard == b""
    finally:
        impostor.close()
        server.stop()


def test_a_cluster_on_a_port_follows_its_server_to_another_password(shell: Shell) -> None:
    state = shell.folder / ("long-" * 30)
    shell.environment["GPUFLOW_STATE_DIR"] = str(state)
    process, out = shell.start("up", "--no-beat", "--no-flower", "--no-gateway")
    shell.until(process, out, "ready")
    record = ServerFiles(state).read_record()
    assert record is not None and record.port
    os.kill(record.pid, signal.SIGKILL)
    shell.until(process, out, "it starts again")
    eventually(lambda: EmbeddedServer.running(state) is not None, within=30, what="the server")
    eventually(lambda: [row["state"] for row in shell.json("workers")] == ["IDLE"], within=60, what="the worker")
    assert shell("submit", shell.write(pipeline(stage("a")))).returncode == 0
    eventually(lambda: [row["state"] for row in shell.json("status")["pipelines"]] == ["SUCCEEDED"], what="its end")


def test_two_commands_on_one_server_have_one_gateway(shell: Shell) -> None:
    # Given a cluster without workers, whose gateway has a login
    up, out = shell.start("up", "--no-beat", "--no-flower", "--workers", "0")
    shell.until(up, out, "ready")
    state = shell.folder / "state"
    login = read_login(state)
    # When a run on the same server stores its results at that gateway
    spec = pipeline(stage("a"))
    spec["spec"]["output"] = {"destination": {"type": "http"}}
    done = shell("run", shell.write(spec))
    # Then it had the login
    assert "pipeline succeeded" in done.stdout
    # and a second cluster leaves that as it is, and knows the token
    second, second_out = shell.start("up", "--no-beat", "--no-flower", "--workers", "0")
    said = shell.until(second, second_out, "ready")
    assert login is not None and read_login(state) == login
    address = next(word for word in said.split() if word.startswith("http://127.0.0.1:"))
    headers = {"Authorization": f"Bearer {login[1]}"}
    assert address != login[0]
    assert httpx.get(f"{address}/api/v1/results", headers=headers, timeout=patient(30)).status_code == 200
    # and goes on with a login of its own when the first ends
    up.send_signal(signal.SIGINT)
    assert up.wait(timeout=patient(30)) == 0
    eventually(lambda: (read_login(state) or login)[0] == address, within=30, what="a login of the second")
