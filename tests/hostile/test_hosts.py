"""Addresses that no task may reach: by name, by spelling, by redirect, by a second answer of the resolver."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest

from executors import task_access
from executors.data.sources import read_entries
from executors.retrieval.qdrant import Qdrant
from gpuflow.artifacts.references import References, make_reference
from gpuflow.artifacts.store import fetch
from gpuflow.artifacts.task_access import Access, client_hosts, limited_to, may_use_token, task_hosts, task_roots
from gpuflow.errors import InvalidSettings, NotAllowed
from gpuflow.policy.child import child_policy
from gpuflow.policy.connecting import client
from gpuflow.policy.hosts import Hosts, Place
from gpuflow.policy.roots import Roots
from gpuflow.protocol import Emitter, Request
from gpuflow.settings import Settings
from gpuflow.upkeep.notices import deliver
from tests.support.waiting import patient

CLOSED = Hosts()
#: A task may reach the receiver of these tests, and no other address of the machine.
ONE = Hosts(allowed=("127.0.0.1/32",))
LOCAL = (
    "127.0.0.1", "127.1", "2130706433", "0177.1", "0x7f.1", "localhost", "0.0.0.0", "[::1]", "[::]",
    "[::ffff:127.0.0.1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]", "10.0.0.1",
    "192.168.1.1", "172.16.0.1", "100.64.0.1", "[fd00::1]", "[fec0::1]", "127.0.0.1.",
)  # fmt: skip
NEVER = (
    "169.254.169.254", "2852039166", "0xa9fea9fe", "[fe80::1]", "[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]",
    "[2002:a9fe:a9fe::]", "[fd00:ec2::254]", "100.100.100.200", "168.63.129.16", "192.0.0.192",
    "metadata.google.internal", "METADATA.google.internal.",
)  # fmt: skip


#: What a library of a child does, with the server's address and where that sends it.
CHILD = """
import json, socket, sys, urllib.request
from pathlib import Path
from executors import task_access
from gpuflow.errors import NotAllowed
from gpuflow.protocol import Request

policy, by, target, redirector = json.loads(sys.argv[1])
task_access.use(Request(task_id="t", task_type="echo", spec={}, output_dir=".", policy=policy))
urllib.request.urlopen(redirector + "here").read()  # the policy of libraries is not that of gpuflow's own requests
try:
    if by == "redirect":
        urllib.request.urlopen(redirector + f"http://{target}/latest/")
    elif by == "bytes":
        socket.socket().connect((target.encode(), 80))
    elif by == "message":
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendmsg([b"x"], [], 0, (target, 80))
    elif by == "datagram":
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", (target, 80))
    else:
        socket.create_connection((target, 80), timeout=1)
except OSError as error:
    refused = error if isinstance(error, NotAllowed) else getattr(error, "reason", None)
    if isinstance(refused, NotAllowed):
        print("refused:", refused)
"""


class Redirector(http.server.BaseHTTPRequestHandler):
    """Sends everybody to the address in its path, and answers `/here`."""

    def do_GET(self) -> None:
        self.server.asked.append(self.headers.get("Authorization"))  # type: ignore[attr-defined]
        if self.path == "/here":
            self.send_response(200)
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b'"x"')
            return
        self.send_response(302)
        self.send_header("Location", self.path[1:])
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirector)
    made.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process is the child of a task that may reach nothing here."""
    monkeypatch.setattr(task_access, "_roots", None)
    monkeypatch.setattr(task_access, "_hosts", None)
    policy = child_policy(Roots(read=(str(tmp_path),)), CLOSED)
    task_access.use(Request(task_id="t", task_type="echo", spec={}, output_dir=str(tmp_path), policy=policy))


@pytest.mark.parametrize("host", LOCAL)
def test_an_address_of_the_machine_or_its_networks(host: str) -> None:
    with client(CLOSED, timeout=2) as caller, pytest.raises(NotAllowed, match="GPUFLOW_ALLOW_HOSTS") as refused:
        caller.get(f"http://{host}:9/")
    assert refused.value.setting == "GPUFLOW_ALLOW_HOSTS"


@pytest.mark.parametrize("host", NEVER)
def test_a_metadata_service_whatever_is_allowed(host: str) -> None:
    everything = Hosts(allowed=("*", "0.0.0.0/0", "::/0"), own=(Place(host=host.strip("[]"), port=9),))

    with client(everything, timeout=2) as caller, pytest.raises(NotAllowed, match="no setting"):
        caller.get(f"http://{host}:9/")


@pytest.mark.parametrize("url", ["http://127.0.0.2:9/", "http://169.254.169.254/latest", "http://[::ffff:7f00:2]/"])
def test_a_redirect(server: http.server.ThreadingHTTPServer, tmp_path: Path, url: str) -> None:
    here = f"http://127.0.0.1:{server.server_port}"
    settings = Settings()

    with pytest.raises(NotAllowed):
        fetch(f"{here}/{url}", tmp_path / "x", settings=settings, hosts=ONE)
    fetch(f"{here}/{here}/here", tmp_path / "y", settings=settings, hosts=ONE)


def test_a_resolver_that_answers_something_else_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["93.184.216.34", "127.0.0.1", "127.0.0.1"])
    real, connected = socket.getaddrinfo, []

    def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host in ("rebinding.example", b"rebinding.example"):
            return real(next(answers), port, *args, **kwargs)
        return real(host, port, *args, **kwargs)

    def connect(self: Any, host: str, *_: Any, **__: Any) -> Any:
        connected.append(host)
        raise httpcore.ConnectError("not in a test")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect)

    with client(CLOSED, timeout=2) as caller:
        with pytest.raises(httpx.ConnectError):
            caller.get("http://rebinding.example/")
        with pytest.raises(NotAllowed, match=r"rebinding.example \(127.0.0.1\)"):
            caller.get("http://rebinding.example/")
    assert connected == ["93.184.216.34"]


def test_a_name_with_a_public_and_a_private_address(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)

    with client(CLOSED, timeout=2) as caller, pytest.raises(NotAllowed):
        caller.get("http://two.example/")


@pytest.mark.parametrize("host", ["a" * 64, "\u00fc" * 70, "xn--", "."])
def test_a_host_that_is_none(host: str) -> None:
    with (
        client(CLOSED, timeout=2) as caller,
        pytest.raises((httpx.HTTPError, httpx.InvalidURL, NotAllowed, UnicodeError)),
    ):
        caller.get(f"http://{host}/")


@pytest.mark.parametrize("broker", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("spelled", ["127.0.0.1", "localhost", "2130706433"])
def test_the_broker_whatever_is_allowed(broker: str, spelled: str) -> None:
    hosts = Hosts(allowed=("127.0.0.0/8", "localhost", "::1"), brokers=(Place(host=broker, port=6379),))

    with client(hosts, timeout=2) as caller, pytest.raises(NotAllowed, match="broker"):
        caller.post(f"http://{spelled}:6379/", content=b"FLUSHALL\r\n")


def test_behind_a_proxy_the_name_is_judged(
    server: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    with client(CLOSED, timeout=2) as caller:
        for host in ("169.254.169.254", "metadata.google.internal", "localhost", "0177.1"):
            with pytest.raises(NotAllowed):
                caller.get(f"http://{host}/")
        assert server.asked == []  # type: ignore[attr-defined]
        caller.get("http://public.example/")  # the operator's proxy itself may be anywhere
    assert len(server.asked) == 1  # type: ignore[attr-defined]


def test_what_the_operator_lists_or_has_configured(server: http.server.ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}/here"
    own = Hosts(own=(Place(host="127.0.0.1", port=server.server_port),))
    for hosts in (ONE, own, Hosts(allowed=("127.0.0.*",)), Hosts(allowed=("127.0.0.1",)), None):
        with client(hosts, timeout=5) as caller:
            assert caller.get(url).text == '"x"'
    with client(own, timeout=5) as caller, pytest.raises(NotAllowed):
        caller.get("http://127.0.0.1:9/")  # the operator's host, and another port


@pytest.mark.parametrize("entry", ["http://a", "a:80", "a b", "10.0.0.0/33"])
def test_a_setting_that_can_name_nothing(entry: str) -> None:
    with pytest.raises(InvalidSettings, match="GPUFLOW_ALLOW_HOSTS"):
        Settings.load(env={"GPUFLOW_ALLOW_HOSTS": entry})


def test_a_notice(server: http.server.ThreadingHTTPServer) -> None:
    with pytest.raises(NotAllowed, match="GPUFLOW_ALLOW_HOSTS"):
        deliver({"url": f"http://127.0.0.1:{server.server_port}/here", "headers": {"X": "y"}}, {}, hosts=CLOSED)
    assert server.asked == []  # type: ignore[attr-defined]


@pytest.mark.usefixtures("limited")
def test_what_a_child_fetches(server: http.server.ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}/here"

    with pytest.raises(NotAllowed):
        read_entries({"type": "jsonl", "url": url}, None, Emitter(None))  # type: ignore[arg-type]
    with pytest.raises(NotAllowed):
        Qdrant({"url": url.removesuffix("/here"), "collection": "c"}).search([[1.0]], 1)
    assert server.asked == []  # type: ignore[attr-defined]


def test_a_client_follows_no_reference_into_its_network(
    server: http.server.ThreadingHTTPServer, tmp_path: Path
) -> None:
    reference = make_reference("x", b'"x"', f"http://127.0.0.1:{server.server_port}/here")
    far = Settings(redis_url="redis://broker.example:6379/0", cache_dir=tmp_path / "far")
    near = Settings(redis_url="redis://127.0.0.1:6379/0", cache_dir=tmp_path / "near")

    with pytest.raises(NotAllowed):
        References(far, hosts=client_hosts(far)).load(reference)
    assert server.asked == []  # type: ignore[attr-defined]
    assert References(near, hosts=client_hosts(near)).load(reference) == "x"


GATEWAY = "http://gateway.internal:8080"
RESULTS = f"{GATEWAY}/api/v1/results"
OTHERS = "0" * 32


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        (f"{RESULTS}/mine/attempt-1/a.json", True),
        (f"{RESULTS}/upstream/attempt-1/a.tar.gz", True),
        (f"{RESULTS}/uploads/{OTHERS}/rows.jsonl", True),
        (RESULTS, False),
        (f"{RESULTS}/", False),
        (f"{RESULTS}?prefix=", False),
        (f"{RESULTS}/mine", False),
        (f"{RESULTS}/mine/../{OTHERS}/a", False),
        (f"{RESULTS}/mine/%2e%2e/{OTHERS}/a", False),
        (f"{RESULTS}/mine%2f..%2f{OTHERS}/a", False),
        (f"{RESULTS}/{OTHERS}/attempt-1/a.json", False),
        (f"{GATEWAY}/api/v1/tasks", False),
        (f"{GATEWAY}/api/v1/resultsx/mine/a", False),
        ("http://gateway.internal:8081/api/v1/results/mine/a", False),
        ("http://user@gateway.internal.evil.example:8080/api/v1/results/mine/a", False),
    ],
)
def test_the_token_of_the_worker_goes_to_own_results_alone(url: str, sent: bool) -> None:
    settings = Settings.load(env={"GPUFLOW_GATEWAY_URL": GATEWAY, "GPUFLOW_WORKER_TOKEN": "t" * 32})
    access = Access(roots=task_roots(settings), results_of=frozenset({"mine", "upstream"}))

    with limited_to(access):
        assert may_use_token(url, settings) is sent


def test_the_policy_of_settings() -> None:
    hosts = task_hosts(Settings(redis_url="redis://:pw@db:6380/0", gateway_url=GATEWAY, allow_hosts=("a",)))

    assert hosts.brokers == (Place(host="db", port=6380),)
    assert hosts.own == (Place(host="gateway.internal", port=8080),)
    assert hosts.allowed == ("a",)


@pytest.mark.parametrize("by", ["redirect", "connection", "bytes", "datagram", "message"])
@pytest.mark.parametrize("target", ["169.254.169.254", "2852039166", "100.100.100.200"])
def test_a_library_of_a_child_is_led_to_a_metadata_service(
    server: http.server.ThreadingHTTPServer, by: str, target: str
) -> None:
    policy = child_policy(Roots(), Hosts(allowed=("0.0.0.0/0",)))
    given = json.dumps([policy, by, target, f"http://127.0.0.1:{server.server_address[1]}/"])

    done = subprocess.run([sys.executable, "-c", CHILD, given], capture_output=True, text=True, timeout=patient(60))

    assert done.stdout.startswith("refused: "), done.stderr
    assert "metadata service" in done.stdout
