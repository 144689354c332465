"""An EC2 service over real HTTP: moto's, with client tokens, lists that lag, and faults, as EC2 has them."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from gpuflow.scaling.provisioners import COMMAND_MARK, AwsInstance
from gpuflow.scaling.provisioners.aws import Ec2Machines

ERROR = "<Response><Errors><Error><Code>{0}</Code><Message>it says {0}</Message></Error></Errors></Response>"
INSTANCE = AwsInstance(
    region="eu-west-1", image="ami-12c6146b", types=("g5.xlarge", "g6.xlarge"), user_data=f"#!/bin/sh\n{COMMAND_MARK}\n"
)


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


class Ec2Server:
    """One server. `answer` may give an error code for a request, "cut" to do it and lose the answer,
    "page" for that of a proxy, or None."""

    def __init__(self) -> None:
        self.requests: list[dict[str, str]] = []
        self.answer: Callable[[dict[str, str]], str | None] = lambda request: None
        self._tokens: dict[str, tuple[str, list[Any], bytes]] = {}
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._app, threaded=True, request_handler=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def machines(self, tag: str, instance: AwsInstance = INSTANCE) -> Ec2Machines:
        return Ec2Machines(instance, tag=tag, timeout_seconds=20, endpoint=self.url)

    def sent(self, action: str) -> list[dict[str, str]]:
        return [request for request in self.requests if request["Action"] == action]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _app(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        request = {name: values[0] for name, values in parse_qs(body.decode(), keep_blank_values=True).items()}
        if "Action" not in request:  # moto's own
            return self._moto(environ, start_response)
        self.requests.append(request)
        fault = self.answer(request)
        if fault == "page":
            start_response("200 OK", [("Content-Type", "text/html")])
            return [b"<!doctype html><p>the proxy is tired"]
        if fault is not None and fault != "cut":
            start_response("400 Bad Request" if fault != "RequestLimitExceeded" else "503 Busy", [])
            return [ERROR.format(fault).encode()]
        status, headers, content = self._do(environ, request)
        if fault == "cut":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start_response(status, headers)
        return [content]

    def _do(self, environ: dict[str, Any], request: dict[str, str]) -> tuple[str, list[Any], bytes]:
        token = request.get("ClientToken", "")
        if token in self._tokens:
            return self._tokens[token]
        begun: list[Any] = []
        content = b"".join(self._moto(environ, lambda status, headers, *_: begun.extend((status, headers))))
        done = (begun[0], begun[1], content)
        if token:
            self._tokens[token] = done
        return done


@pytest.fixture(scope="session")
def ec2_server() -> Iterable[Ec2Server]:
    server = Ec2Server()
    yield server
    server.close()


@pytest.fixture
def ec2(ec2_server: Ec2Server, monkeypatch: pytest.MonkeyPatch) -> Ec2Server:
    """The server without instances, and credentials for it."""
    import urllib.request

    reset = urllib.request.Request(f"{ec2_server.url}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    ec2_server.requests.clear()
    ec2_server._tokens.clear()
    ec2_server.answer = lambda request: None
    return ec2_server
