"""The embedded server, with the real binary: data survive, nothing is left behind, and there is only one."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import psutil
import pytest
import redis

from gpuflow.broker.embedded import EmbeddedServer
from gpuflow.celery_app import GPUFlow
from gpuflow.errors import BrokerUnavailable
from gpuflow.settings import Settings
from tests.support.fleet import running
from tests.support.memory_disk import memory_folder
from tests.support.users import need_root
from tests.support.waiting import eventually

#: Starts the server, says on stdout what it got, and waits for the end of its stdin.
OWNER = """
import json, sys
from pathlib import Path
from gpuflow.broker.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]))
url = server.start()
print(json.dumps({"url": url, "owner": server.owner}), flush=True)
sys.stdin.read()
if sys.argv[2] == "stop":
    server.stop()
"""


@pytest.fixture
def server(tmp_path):
    embedded = EmbeddedServer(tmp_path / "it's \"a")
    yield embedded
    embedded.stop()


@pytest.fixture
def on_a_port(tmp_path):
    """A server whose folder has too long a path for a Unix socket."""
    embedded = EmbeddedServer(tmp_path / ("a state " * 20))
    yield embedded
    embedded.stop()


@pytest.fixture
def durable(tmp_path):
    """A server whose files are in memory where there is such a disk.

    What it has acknowledged is with the kernel at once, unless an fsync is under way: then it waits up to 2 s, and kill
    -9 would lose it. A disk in memory is never behind, whatever else keeps the machine's disks busy.
    """
    with memory_folder("embedded", tmp_path) as folder, EmbeddedServer(folder) as embedded:
        yield embedded


@contextmanager
def connected(url):
    client = redis.Redis.from_url(url, decode_responses=True)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def owner_process(state: Path, at_end: str = "leave"):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state), at_end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def record(state: Path) -> dict:
    return json.loads((state / "embedded" / "server.json").read_text())


def wait_gone(pid: int) -> bool:
    """Wait until a process that is no child of ours has ended; a zombie has ended."""
    return eventually(lambda: not running([pid]), what=f"the end of process {pid}")


def state_of(server: EmbeddedServer) -> Path:
    return server.log.parent.parent


def test_it_starts_serves_and_stops(server):
    url = server.start()
    state = state_of(server)
    pid = record(state)["pid"]
    assert server.owner
    assert EmbeddedServer.running(state) == url
    with connected(url) as client:
        assert client.set("k", "v")
        settings = client.config_get("*")
        assert settings["appendonly"] == "yes"
        assert settings["maxmemory-policy"] == "noeviction"
        assert settings["port"] == "0"
    server.stop()
    assert wait_gone(pid)
    assert not server.owner
    assert EmbeddedServer.running(state) is None
    assert not (state / "embedded" / "server.json").exists()
    server.stop()


def test_start_is_idempotent(server):
    assert server.start() == server.start()
    assert server.owner


def test_a_clean_stop_keeps_data_address_and_password(server):
    first = server.start()
    with connected(first) as client:
        client.set("k", "v")
    server.stop()
    with connected(server.start()) as client:
        assert client.get("k") == "v"


def test_it_listens_on_a_socket_of_this_user(server):
    url = server.start()
    path = state_of(server) / "embedded" / "server.sock"
    assert url == f"unix://{quote(str(path))}?db=0"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not (path.parent / "password").exists()
    server.stop()
    assert server.start() == url  # also when the file of a former server is in the way
    server.stop()
    path.touch()
    assert server.start() == url


def test_celery_and_its_backend_use_the_socket(server, tmp_path):
    settings = Settings.load(env={"REDIS_URL": server.start(), "RESULTS_DIR": str(tmp_path)}, cwd=tmp_path)
    app = GPUFlow("socket", settings=settings)
    sent = app.send_task("gpuflow.echo", kwargs={"spec": {"taskType": "echo", "echo": {"output": 1}}})
    assert sent.state == "PENDING"
    assert app.redis.exists(app.keys.task(sent.id))
    app.close()


def test_a_server_on_a_port_needs_the_password_and_hides_it(on_a_port):
    server = on_a_port
    url = server.start()
    password = url.split(":")[2].split("@")[0]
    folder = state_of(server) / "embedded"
    command = psutil.Process(record(state_of(server))["pid"]).cmdline()
    assert not any(password in word for word in command)
    assert len(password) >= 32
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "password").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "server.json").stat().st_mode) == 0o600
    assert password not in (folder / "server.json").read_text()
    with connected(url.replace(f":{password}@", "")) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_data_survive_kill_9_of_the_server(durable):
    server = durable
    url = server.start()
    pid = record(state_of(server))["pid"]
    with connected(url) as client:
        for number in range(1000):
            client.set(f"k{number}", number)
    os.kill(pid, signal.SIGKILL)
    assert wait_gone(pid)
    assert EmbeddedServer.running(state_of(server)) is None
    again = server.start()
    assert again == url  # so workers come back by themselves
    assert record(state_of(server))["pid"] != pid
    with connected(again) as client:
        assert client.dbsize() == 1000


def test_a_torn_end_of_the_data_is_cut_off(server):
    with connected(server.start()) as client:
        client.set("before", "1")
        client.set("last", "2")
    server.stop()
    (file,) = (state_of(server) / "embedded" / "data").rglob("*.incr.aof")
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    with connected(server.start()) as client:
        assert client.get("before") == "1"
        assert client.get("last") is None


def test_nothing_is_left_when_the_owner_is_killed(tmp_path):
    with owner_process(tmp_path) as owner:
        url = json.loads(owner.stdout.readline())["url"]
        pid = record(tmp_path)["pid"]
        with connected(url) as client:
            client.set("k", "v")
        owner.kill()
        owner.wait()
        assert wait_gone(pid)
    assert EmbeddedServer.running(tmp_path) is None
    with EmbeddedServer(tmp_path) as server, connected(EmbeddedServer.running(tmp_path)) as client:
        assert server.owner
        assert client.get("k") == "v"


def test_nothing_is_left_when_the_owner_exits_without_a_stop(tmp_path):
    with owner_process(tmp_path) as owner:
        owner.stdout.readline()
        pid = record(tmp_path)["pid"]
        owner.communicate("")
        assert owner.returncode == 0
        assert wait_gone(pid)


def test_the_server_outlives_the_thread_that_called_start(server):
    urls = []
    thread = threading.Thread(target=lambda: urls.append(server.start()))
    thread.start()
    thread.join()
    with connected(urls[0]) as client:
        assert client.ping()
        assert client.set("k", "v")
    assert server.alive


def test_a_second_process_attaches_and_does_not_stop_it(server):
    url = server.start()
    with owner_process(state_of(server), at_end="stop") as other:
        assert json.loads(other.stdout.readline()) == {"url": url, "owner": False}
        other.communicate("")
        assert other.returncode == 0
    with connected(url) as client:
        assert client.ping()


def test_two_at_once_start_one(tmp_path):
    with owner_process(tmp_path) as one, owner_process(tmp_path) as other:
        said = [json.loads(process.stdout.readline()) for process in (one, other)]
        assert sorted(answer["owner"] for answer in said) == [False, True]
        assert said[0]["url"] == said[1]["url"]
        pid = record(tmp_path)["pid"]
    assert wait_gone(pid)


@pytest.mark.parametrize(
    "content",
    [
        '{"pid": 4194000, "process_started": 1.0, "port": 1}',  # gone
        f'{{"pid": {os.getpid()}, "process_started": 1.0, "port": 1}}',  # the id of another process
        "not json",
        "{}",
        "",
    ],
    ids=["gone", "the id of another process", "no JSON", "no fields", "empty"],
)
def test_a_stale_record_is_cleaned(server, content):
    folder = state_of(server) / "embedded"
    folder.mkdir(parents=True)
    (folder / "server.json").write_text(content)
    assert EmbeddedServer.running(state_of(server)) is None
    url = server.start()
    assert server.owner
    assert EmbeddedServer.running(state_of(server)) == url


def test_a_server_in_no_record_never_shares_its_data(tmp_path):
    with owner_process(tmp_path) as owner:
        owner.stdout.readline()
        pid = record(tmp_path)["pid"]
        (tmp_path / "embedded" / "server.json").unlink()
        second = EmbeddedServer(tmp_path, grace_seconds=0.3)
        with pytest.raises(BrokerUnavailable, match="still uses"):
            second.start()
        assert psutil.pid_exists(pid)


def test_a_port_has_another_password_at_each_start(on_a_port):
    first = on_a_port.start()
    on_a_port.stop()
    again = on_a_port.start()
    assert urlsplit(first).password != urlsplit(again).password
    former = first.replace(str(urlsplit(first).port), str(urlsplit(again).port))
    with connected(former) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_a_taken_port_is_left_to_its_owner(on_a_port):
    server = on_a_port
    first = server.start()
    server.stop()
    port = urlsplit(first).port
    folder = state_of(server) / "embedded"
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        (folder / "server.json").write_text(json.dumps({"pid": 4194000, "process_started": 1.0, "port": port}))
        second = server.start()
    assert urlsplit(second).port != port
    with connected(second) as client:
        assert client.ping()


def test_a_folder_that_is_not_ours_is_refused(tmp_path):
    need_root()
    (tmp_path / "embedded").mkdir()
    os.chown(tmp_path / "embedded", 65_534, 65_534)
    with pytest.raises(BrokerUnavailable, match="no folder of this user"):
        EmbeddedServer(tmp_path).start()


def test_a_server_that_hangs_is_named_and_killed_at_stop(tmp_path):
    server = EmbeddedServer(tmp_path, grace_seconds=0.5)  # what is stopped ends by SIGKILL, however long that takes
    server.start()
    pid = record(tmp_path)["pid"]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(BrokerUnavailable, match=f"kill {pid}"):
        EmbeddedServer(tmp_path, ready_seconds=0.5).start()
    server.stop()
    assert wait_gone(pid)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "embedded").write_text("a file in the way")
    with pytest.raises(BrokerUnavailable) as caught:
        EmbeddedServer(tmp_path).start()
    assert str(tmp_path / "embedded") in str(caught.value)
    assert "GPUFLOW_STATE_DIR" in str(caught.value)


@pytest.mark.parametrize(
    ("script", "expected"),
    [(None, "GPUFLOW_VALKEY_SERVER"), ("#!/bin/sh\necho no space left on device\nexit 1\n", "no space left on device")],
)
def test_a_server_that_does_not_start_says_why(tmp_path, script, expected):
    program = tmp_path / "valkey-server"
    if script:
        program.write_text(script)
        program.chmod(0o755)
    with pytest.raises(BrokerUnavailable) as caught:
        EmbeddedServer(tmp_path / "state", program=program).start()
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_large_log_is_turned_once_at_start(server):
    server.log.parent.mkdir(parents=True)
    server.log.write_bytes(b"x" * (6 * 1024 * 1024))
    server.start()
    assert server.log.stat().st_size < 1024 * 1024
    assert server.log.with_name("server.log.1").stat().st_size == 6 * 1024 * 1024
