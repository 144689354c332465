"""An OTLP/HTTP collector on loopback that keeps the spans that it is sent, and that can hang or refuse."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, kw_only=True)
class SeenSpan:
    """One span as it was received; ids are hexadecimal, `parent` is "" for the first of its trace."""

    name: str
    trace: str
    id: str
    parent: str
    start: float
    end: float
    failed: bool
    service: str
    attributes: dict[str, Any]
    events: tuple[str, ...]
    links: tuple[str, ...] = field(default=())

    @property
    def task(self) -> str:
        return str(self.attributes.get("gpuflow.task.id", ""))

    @property
    def attempt(self) -> int:
        return int(self.attributes.get("gpuflow.attempt", 0))


class Collector:
    """`mode`: ok, hang (requests get no answer until the end), or refuse (500)."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.requests = 0
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self._spans: list[SeenSpan] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(collector._take(self.path, dict(self.headers), body))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def spans(self) -> list[SeenSpan]:
        with self._lock:
            return list(self._spans)

    def of(self, *ids: str) -> list[SeenSpan]:
        """Return the spans of these tasks and pipelines, the first one first."""
        wanted = set(ids)
        found = [
            span for span in self.spans() if wanted & {span.task, str(span.attributes.get("gpuflow.pipeline.id", ""))}
        ]
        return sorted(found, key=lambda span: (span.start, span.end))

    def close(self) -> None:
        self._ends.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        with self._lock:
            self.requests += 1
            mode = self.mode
        if mode == "hang":
            self._ends.wait()
        if mode != "ok":
            return 500
        assert path == "/v1/traces", path
        plain = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body
        found = list(_read(ExportTraceServiceRequest.FromString(plain)))
        with self._lock:
            self.headers.append(headers)
            self.bodies.append(plain)
            self._spans += found
        return 200


def _read(request: Any) -> Iterable[SeenSpan]:
    for of_resource in request.resource_spans:
        service = _values(of_resource.resource.attributes).get("service.name", "")
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    service=service,
                    attributes=_values(span.attributes),
                    events=tuple(event.name for event in span.events),
                    links=tuple(link.span_id.hex() for link in span.links),
                )


def _values(attributes: Iterable[Any]) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
