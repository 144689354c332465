"""A page of another site, in a real Chromium, against Flower and gateway of a real `gpuflow up`: it reads nothing,
starts nothing and changes nothing; by names that resolve to this machine too, and where the browser remembers a login.

The browser needs no driver: the page sends home by itself what it could read.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import pytest

from gpuflow.gateway.login import read_login
from tests.integration.test_cli import Shell
from tests.support.browser_page import browser_program
from tests.support.waiting import eventually, patient

PAGE: Final = (Path(__file__).parent / "page.html").read_text()
#: A name of another site, which resolves to this machine.
REBOUND: Final = "rebound.example"
TASK: Final = {"args": [], "kwargs": {"spec": {"taskType": "echo", "echo": {"output": "by a page"}}}}
FLOWER_PATHS: Final = ("/", "/workers", "/tasks", "/api/workers", "/api/tasks", "/metrics", "/healthcheck", "/fleet",
                       "/fleet/updates", "/pipelines")  # fmt: skip
FLOWER_CHANGES: Final = ("/api/task/async-apply/gpuflow.echo", "/api/task/apply/gpuflow.echo",
                         "/api/task/send-task/gpuflow.echo", "/monitor/action")  # fmt: skip
GATEWAY_PATHS: Final = ("/", "/healthz", "/metrics", "/api/v1/results", "/api/v1/results/kept/files",
                        "/api/v1/results/kept/files/f.js")  # fmt: skip
GATEWAY_CHANGES: Final = ("/api/v1/results/kept/files", "/api/v1/results/kept/files/f.js", "/api/v1/tasks",
                          "/api/v1/pipelines")  # fmt: skip


class Site:
    """The other site: serves the page, and takes in what it reports."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = PAGE.replace("/*CONFIG*/{}", json.dumps(site.config)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                site.reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def browser(folder: Path, *urls: str) -> Iterator[None]:
    """Open pages in Chromium, in a profile of their own."""
    program = browser_program()
    rules = f"MAP {REBOUND} 127.0.0.1, MAP evil.example 127.0.0.1"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--remote-debugging-port=0", f"--user-data-dir={folder}", f"--host-resolver-rules={rules}"]  # fmt: skip
    port = folder / "DevToolsActivePort"
    port.unlink(missing_ok=True)  # of a former browser
    process = subprocess.Popen([program, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)  # fmt: skip
    try:
        eventually(lambda: port.exists() and port.read_text().count("\n"), within=30, what="the browser")
        for url in urls:
            opened = f"http://127.0.0.1:{port.read_text().split()[0]}/json/new?{url}"
            assert httpx.put(opened, timeout=patient(30)).status_code == 200
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(patient(30))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


class OpenServer:
    """Lets every page read and do everything, once it has logged in: what the attacks must find out."""

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.logins: set[str] = set()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                login = self.headers.get("Authorization", "")
                if self.command == "POST":
                    server.posted.append(self.rfile.read(length).decode())
                elif login.startswith("Basic"):
                    server.logins.add(self.headers.get("Origin", ""))
                if not login and self.path == "/login":
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", 'Basic realm="open"')
                else:
                    self.send_response(200)
                self.send_header("Access-Control-Allow-Origin", self.headers.get("Origin", "*"))
                self.send_header("Access-Control-Allow-Credentials", "true")
                self.send_header("Access-Control-Allow-Headers", "authorization, content-type")
                self.send_header("Access-Control-Allow-Methods", "GET, POST, PUT, DELETE")
                self.send_header("Content-Length", "8")
                self.end_headers()
                self.wfile.write(b"// taken")

            do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = _answer

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_the_page_takes_what_an_open_server_gives(tmp_path: Path, site: Site) -> None:
    server = OpenServer()
    base = f"http://127.0.0.1:{server.port}"
    site.config = {"bases": [base], "paths": ["/login"], "changes": ["/task"], "task": TASK}
    origin = f"http://evil.example:{site.port}"
    try:
        with browser(tmp_path / "profile", f"http://user:word@127.0.0.1:{server.port}/login", origin):
            eventually(lambda: site.reports, within=60, what="the report of the page")
    finally:
        server.close()
    assert {found["name"] for found in site.reports[0]["read"]} >= {"fetch", "script", "post", "put", "delete"}
    assert any("by a page" in body for body in server.posted)
    assert origin in server.logins, "the browser did not use the login that it has"


def test_a_page_of_another_site_reads_nothing_and_starts_nothing(shell: Shell, site: Site) -> None:
    # Given a local cluster as a user starts it, with a result
    process, out = shell.start("up")
    text = shell.until(process, out, "ready")
    addresses = {
        line.split()[0]: line.split()[1] for line in text.splitlines() if line.startswith(("gateway", "flower"))
    }
    login = read_login(shell.folder / "state")
    assert login is not None and login[0] == addresses["gateway"]
    password = (shell.folder / "state" / "flower-password").read_text().strip()

    def flower_answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(addresses["flower"], timeout=patient(10)).status_code == 401
        return False

    eventually(flower_answers, within=60, what="an answer of Flower")
    kept = f"{addresses['gateway']}/api/v1/results/kept/files/f.js"
    headers = {"Authorization": f"Bearer {login[1]}"}
    script = b"window.stolen = 'a result'"
    assert httpx.post(kept, content=script, headers=headers, timeout=patient(30)).status_code == 201
    flower, gateway = (urlsplit(addresses[name]).port for name in ("flower", "gateway"))

    # When the user opens a page of another site
    for origin in (f"http://evil.example:{site.port}", f"http://127.0.0.1:{site.port}"):
        for paths, changes, bases in (
            (FLOWER_PATHS, FLOWER_CHANGES, [f"http://{host}:{flower}" for host in ("127.0.0.1", "localhost", REBOUND)]),
            (
                GATEWAY_PATHS,
                GATEWAY_CHANGES,
                [f"http://{host}:{gateway}" for host in ("127.0.0.1", "localhost", REBOUND)],
            ),
        ):
            site.reports.clear()
            site.config = {"bases": bases, "paths": paths, "changes": changes, "task": TASK}
            with browser(shell.folder / "profile", f"http://gpuflow:{password}@127.0.0.1:{flower}/", origin):
                eventually(lambda: site.reports, within=60, what=f"the report of the page at {origin}")
            report = site.reports[0]
            # Then it was stopped everywhere
            assert report["asked"] > 50
            assert report["read"] == []

    # and nothing was started or changed, nor may a page on the server's own, rebound name do it
    assert shell.json("status") == {"pipelines": [], "tasks": []}
    assert httpx.get(kept, headers=headers, timeout=patient(30)).content == script
    rebound = {"Host": f"{REBOUND}:{gateway}"}
    assert httpx.get(addresses["gateway"], headers=rebound, timeout=patient(30)).status_code == 403
    # and the user still gets in
    as_user = httpx.BasicAuth("gpuflow", password)
    assert httpx.get(f"{addresses['flower']}/api/workers", auth=as_user, timeout=patient(30)).status_code == 200
