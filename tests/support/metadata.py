"""The metadata service of an EC2 instance, version 2, as a server on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Metadata:
    """What the service says; `refused` tokens are refused once each."""

    def __init__(self) -> None:
        self.notice = ""
        self.tokens = 0
        self.asked = 0
        self.refuses: set[str] = set()
        self.url = ""
        self.clock: Callable[[], float] = time.time
        self.tells_time = True

    def announce(self, seconds: float) -> None:
        at = datetime.fromtimestamp(self.clock() + seconds, UTC)
        self.notice = json.dumps({"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})


@contextmanager
def metadata_service() -> Iterator[Metadata]:
    service = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            if self.path != "/latest/api/token" or not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
                return self._answer(400, "")
            service.tokens += 1
            return self._answer(200, f"token-{service.tokens}")

        def do_GET(self) -> None:
            service.asked += 1
            token = self.headers.get("X-aws-ec2-metadata-token", "")
            if not token.startswith("token-") or token in service.refuses:
                return self._answer(401, "")
            if self.path != "/latest/meta-data/spot/instance-action" or not service.notice:
                return self._answer(404, "")
            return self._answer(200, service.notice)

        def _answer(self, status: int, text: str) -> None:
            self.send_response_only(status)
            if service.tells_time:
                self.send_header("Date", formatdate(service.clock(), usegmt=True))
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
