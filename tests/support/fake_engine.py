"""A small container engine on a Unix socket: the Docker Engine API as far as gpuflow uses it, and real processes.

It holds to the API's shapes: fields that the API does not know, wrong types, wrong states and unknown names are refused
with the statuses of the real one. A container's process is a process of this machine; its mounts are stood in for by
replacing the paths of the container in its command and environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from tests.gate import leftovers

API: Final = "1.44"
_STREAMS: Final = {"stdout": 1, "stderr": 2}
#: Fields of a create request, and their types.
_CONFIG: Final[Mapping[str, Any]] = {
    "Image": str, "Cmd": list, "Entrypoint": list, "Env": list, "WorkingDir": str, "User": str, "Labels": dict,
    "HostConfig": dict, "Tty": bool, "OpenStdin": bool, "StdinOnce": bool, "AttachStdin": bool, "AttachStdout": bool,
    "AttachStderr": bool, "NetworkDisabled": bool, "Hostname": str, "Domainname": str, "ExposedPorts": dict,
    "Volumes": dict, "NetworkingConfig": dict, "MacAddress": str, "StopSignal": str, "Healthcheck": dict,
    "StopTimeout": int,
}  # fmt: skip
_HOST: Final[Mapping[str, Any]] = {
    "Mounts": list, "DeviceRequests": list, "Memory": int, "MemorySwap": int, "NanoCpus": int, "PidsLimit": int,
    "ShmSize": int, "NetworkMode": str, "Init": bool, "CapDrop": list, "SecurityOpt": list, "LogConfig": dict,
}  # fmt: skip
_MOUNT: Final[Mapping[str, Any]] = {"Type": str, "Source": str, "Target": str, "ReadOnly": bool}
_DEVICE: Final[Mapping[str, Any]] = {
    "Driver": str, "Count": int, "DeviceIDs": list, "Capabilities": list, "Options": dict,
}  # fmt: skip


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class FakeImage:
    """An image whose working folder `/app` is a folder of this machine."""

    folder: Path
    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/app"
    id: str = field(default_factory=lambda: f"sha256:{uuid.uuid4().hex * 2}")


class FakeContainer:
    """One container: created, running, exited."""

    def __init__(self, name: str, image: FakeImage, config: Mapping[str, Any]) -> None:
        self.id = uuid.uuid4().hex * 2
        self.name, self.image, self.config = name, image, config
        self.process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.oom_killed = False
        self.attached: list[Any] = []
        self.ended, self.began = threading.Event(), threading.Event()
        self.lock, self.sending = threading.Lock(), threading.Lock()

    @property
    def host(self) -> Mapping[str, Any]:
        return self.config["HostConfig"]

    @property
    def status(self) -> str:
        return "created" if self.process is None else ("exited" if self.ended.is_set() else "running")

    def start(self) -> None:
        """Run the process. The first words of its command may be `python`."""
        places = {mount["Target"]: mount["Source"] for mount in self.host.get("Mounts") or ()}
        places["/app"] = str(self.image.folder)
        argv = [*(self.config.get("Entrypoint") or []), *(self.config.get("Cmd") or self.image.command)]
        env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **self.image.env}
        env |= dict(text.split("=", 1) for text in self.config.get("Env") or ())
        env = {name: _outside(value, places) for name, value in env.items()}
        env |= {name: os.environ[name] for name in (leftovers.VARIABLE,) if name in os.environ}  # of this test run
        try:
            self.process = subprocess.Popen(
                [_outside(word, places) for word in argv],
                cwd=_outside(self.config.get("WorkingDir") or self.image.workdir, places),
                env=env,
                stdin=subprocess.PIPE if self.config.get("OpenStdin") else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise Refused(400, f"failed to create task for container: {error}") from error
        readers = [
            threading.Thread(target=self._read, args=(stream, getattr(self.process, name)), daemon=True)
            for name, stream in _STREAMS.items()
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(readers,), daemon=True).start()
        self.began.set()

    def feed(self, connection: Any) -> None:
        """Give the process what comes from a client that is attached to its stdin; with `StdinOnce` its end, too."""
        while not self.began.wait(0.05):
            if self.ended.is_set():
                return
        stdin = self.process.stdin if self.process is not None else None
        assert stdin is not None
        with contextlib.suppress(OSError):
            while chunk := connection.recv(65_536):
                stdin.write(chunk)
                stdin.flush()
        if self.config.get("StdinOnce"):
            with contextlib.suppress(OSError):
                stdin.close()

    def _read(self, stream: int, pipe: Any) -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), 65_536):
                for connection in self.attached:
                    with contextlib.suppress(OSError), self.sending:
                        connection.sendall(struct.pack(">BxxxL", stream, len(chunk)) + chunk)

    def _wait(self, readers: list[threading.Thread]) -> None:
        assert self.process is not None
        code = self.process.wait()
        self.kill_group()  # with the first process of its PID namespace, all others end
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        for reader in readers:
            reader.join()
        self.code = code if code >= 0 else 128 - code
        self.ended.set()

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process is not None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def remove(self) -> None:
        if self.status == "running":
            self.kill_group()
            self.ended.wait()
        self.ended.set()  # one that was never started, for who waits for its start

    def inspect(self) -> dict[str, Any]:
        state = {
            "Status": self.status,
            "Running": self.status == "running",
            "ExitCode": self.code or 0,
            "OOMKilled": self.oom_killed,
            "Error": "",
        }
        config = {key: value for key, value in self.config.items() if key != "HostConfig"}
        return {"Id": self.id, "Name": f"/{self.name}", "State": state, "HostConfig": self.host, "Config": config}


def _outside(text: str, places: Mapping[str, str]) -> str:
    """Return a path of the container as one of this machine; any other text as it is."""
    for target in sorted(places, key=len, reverse=True):
        if text == target or text.startswith(f"{target}/"):
            return places[target] + text[len(target) :]
    return text


class _Connections:
    """The open connections, so that they can be cut."""

    def __init__(self) -> None:
        self._open: set[Any] = set()
        self._lock = threading.Lock()

    def add(self, one: Any) -> None:
        with self._lock:
            self._open.add(one)

    def discard(self, one: Any) -> None:
        with self._lock:
            self._open.discard(one)

    def cut(self) -> None:
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64


class FakeEngine:
    """The engine. `images` are on the machine, `registry` can be pulled; `refused` are the shapes that it refused."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "engine.sock")
        self.images: dict[str, FakeImage] = {}
        self.registry: dict[str, FakeImage] = {}
        self.containers: dict[str, FakeContainer] = {}
        #: Every container that ever was, and every call.
        self.all: list[FakeContainer] = []
        self.calls: list[str] = []
        self.refused: list[str] = []
        self.security: list[str] = ["name=seccomp,profile=builtin"]
        self.lock = threading.Lock()
        self.connections = _Connections()
        engine = self

        class Handler(_Handler):
            def setup(self) -> None:
                self.engine = engine
                engine.connections.add(self.request)
                super().setup()

            def finish(self) -> None:
                engine.connections.discard(self.request)
                with contextlib.suppress(OSError):
                    super().finish()

        self._server = _Server(self.path, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def image(self, reference: str) -> FakeImage:
        whole = reference if ":" in reference.rpartition("/")[2] else f"{reference}:latest"
        for name, image in self.images.items():
            if whole in (name, image.id):
                return image
        raise Refused(404, f"No such image: {reference}")

    def find(self, reference: str) -> FakeContainer:
        with self.lock:
            for one in self.containers.values():
                if reference in (one.id, one.name) or (len(reference) >= 12 and one.id.startswith(reference)):
                    return one
        raise Refused(404, f"No such container: {reference}")

    def labelled(self, label: str, value: str) -> list[FakeContainer]:
        with self.lock:
            return [one for one in self.containers.values() if (one.config.get("Labels") or {}).get(label) == value]

    def cut(self) -> None:
        """Cut every connection, as a restart of the engine does that keeps its containers."""
        self.connections.cut()

    def cut_output(self) -> None:
        """Cut what is attached to containers, and nothing else."""
        for one in self.all:
            for connection in one.attached:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for one in list(self.containers.values()):
            one.remove()
        Path(self.path).unlink(missing_ok=True)


class _Handler(BaseHTTPRequestHandler):
    engine: FakeEngine
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def address_string(self) -> str:
        return "unix"

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path = re.sub(r"^/v1\.\d+", "", parts.path)
        self.query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.engine.calls.append(f"{self.command} {path}")
        try:
            for method, pattern, handler in _ROUTES:
                found = re.fullmatch(pattern, path)
                if method == self.command and found:
                    return handler(self, raw, *(unquote(part) for part in found.groups()))
            raise Refused(404, "page not found")
        except Refused as error:
            if error.status == 400:
                self.engine.refused.append(error.message)
            with contextlib.suppress(OSError):
                self._json(error.status, {"message": error.message})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _json(self, status: int, value: Any = None) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _ping(self, _: bytes) -> None:
        self._json(200, "OK")

    def _version(self, _: bytes) -> None:
        self._json(
            200, {"ApiVersion": API, "MinAPIVersion": "1.24", "Version": "27.0.0", "Components": [{"Name": "Engine"}]}
        )

    def _info(self, _: bytes) -> None:
        self._json(200, {"SecurityOptions": self.engine.security, "ServerVersion": "27.0.0"})

    def _image(self, _: bytes, name: str) -> None:
        image = self.engine.image(name)
        self._json(200, {"Id": image.id, "RepoTags": [name], "Config": {"Cmd": image.command}})

    def _pull(self, _: bytes) -> None:
        name = f"{self.query.get('fromImage')}:{self.query.get('tag', 'latest')}"
        if name not in self.engine.registry:
            raise Refused(404, f"pull access denied for {self.query.get('fromImage')}, repository does not exist")
        self.engine.images[name] = self.engine.registry[name]
        self._json(200, {"status": f"Status: Downloaded newer image for {name}"})

    def _create(self, raw: bytes) -> None:
        config = json.loads(raw)
        config = _checked(config, _CONFIG, "config")
        host = config["HostConfig"] = _checked(config.get("HostConfig") or {}, _HOST, "HostConfig")
        for mount in host.get("Mounts") or ():
            _checked(mount, _MOUNT, "Mount")
            if mount["Type"] != "bind" or not mount["Target"].startswith("/"):
                raise Refused(400, f"invalid mount config: {mount}")
            if not Path(mount["Source"]).exists():
                raise Refused(400, f'invalid mount config for type "bind": bind source path does not exist: {mount}')
        for device in host.get("DeviceRequests") or ():
            _checked(device, _DEVICE, "DeviceRequest")
            if device.get("Count") and device.get("DeviceIDs"):
                raise Refused(400, "cannot set both Count and DeviceIDs on device request")
        if host.get("Memory") and host["Memory"] < 6 << 20:
            raise Refused(400, "Minimum memory limit allowed is 6MB")
        if not all(isinstance(text, str) and "=" in text for text in config.get("Env") or ()):
            raise Refused(400, f"invalid environment variables: {config.get('Env')}")
        if not all(isinstance(value, str) for value in (config.get("Labels") or {}).values()):
            raise Refused(400, "labels must be text")
        name = self.query.get("name") or uuid.uuid4().hex
        if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", name):
            raise Refused(400, f"Invalid container name ({name})")
        image = self.engine.image(str(config.get("Image")))
        with self.engine.lock:
            if any(one.name == name for one in self.engine.containers.values()):
                raise Refused(409, f"Conflict. The container name {name} is already in use")
            made = FakeContainer(name, image, config)
            self.engine.containers[made.id] = made
            self.engine.all.append(made)
        self._json(201, {"Id": made.id, "Warnings": []})

    def _start(self, _: bytes, reference: str) -> None:
        container = self.engine.find(reference)
        with container.lock:
            if container.status == "running":
                return self._json(304)
            container.start()
        return self._json(204)

    def _attach(self, _: bytes, reference: str) -> None:
        container = self.engine.find(reference)
        if self.headers.get("Upgrade") != "tcp" or self.query.get("stream") != "1":
            raise Refused(400, "attach is asked for with Upgrade: tcp and stream=1")
        wants = {name for name in ("stdin", "stdout", "stderr") if self.query.get(name) == "1"}
        if "stdin" in wants and not container.config.get("OpenStdin"):
            raise Refused(400, "stdin of the container is not open")  # the real one attaches to nothing, in silence
        if {"stdout", "stderr"} & wants:
            container.attached.append(self.connection)  # it is started by a client that has the answer
        self.connection.sendall(
            b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
            b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        if "stdin" in wants:
            container.feed(self.connection)
        else:
            container.ended.wait()
        self.close_connection = True

    def _wait(self, _: bytes, reference: str) -> None:
        container = self.engine.find(reference)
        if container.status != "created":  # as the real one: a container that does not run is waited for no more
            container.ended.wait()
        self._json(200, {"StatusCode": container.code or 0})

    def _kill(self, _: bytes, reference: str) -> None:
        container = self.engine.find(reference)
        name = self.query.get("signal", "SIGKILL")
        if name not in signal.Signals.__members__:
            raise Refused(400, f"Invalid signal: {name}")
        if container.status != "running" or container.process is None:
            raise Refused(409, f"Container {container.id} is not running")
        with contextlib.suppress(ProcessLookupError):
            container.process.send_signal(signal.Signals[name])
        self._json(204)

    def _remove(self, _: bytes, reference: str) -> None:
        container = self.engine.find(reference)
        if container.status == "running" and self.query.get("force") not in ("1", "true", "True"):
            raise Refused(409, f"You cannot remove a running container {container.id}. Stop it first or force removal")
        container.remove()
        with self.engine.lock:
            self.engine.containers.pop(container.id, None)
        self._json(204)

    def _list(self, _: bytes) -> None:
        filters = json.loads(self.query.get("filters", "{}"))
        if not isinstance(filters, dict) or set(filters) - {"label"}:
            raise Refused(400, f"invalid filter: {filters}")
        with self.engine.lock:
            found = list(self.engine.containers.values())
        if self.query.get("all") not in ("1", "true"):
            found = [one for one in found if one.status == "running"]
        for label in filters.get("label", ()):
            name, separator, value = label.partition("=")
            found = [
                one
                for one in found
                if name in (labels := one.config.get("Labels") or {}) and (not separator or labels[name] == value)
            ]
        self._json(
            200, [{"Id": one.id, "State": one.status, "Labels": one.config.get("Labels") or {}} for one in found]
        )

    def _inspect(self, _: bytes, reference: str) -> None:
        self._json(200, self.engine.find(reference).inspect())


def _checked(value: Any, shape: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return an object without its nulls. Raises Refused for a field that the API does not know, or of a wrong type."""
    if not isinstance(value, dict):
        raise Refused(400, f"{what} is no object")
    for name, entry in value.items():
        if name not in shape:
            raise Refused(400, f"{what}: unknown field {name!r}")
        if entry is not None and (not isinstance(entry, shape[name]) or (shape[name] is int and entry is True)):
            raise Refused(400, f"{what}: {name} is {entry!r}")
    return {name: entry for name, entry in value.items() if entry is not None}


_ROUTES: Final = (
    ("GET", "/_ping", _Handler._ping),
    ("GET", "/version", _Handler._version),
    ("GET", "/info", _Handler._info),
    ("GET", "/images/(.+)/json", _Handler._image),
    ("POST", "/images/create", _Handler._pull),
    ("POST", "/containers/create", _Handler._create),
    ("GET", "/containers/json", _Handler._list),
    ("POST", "/containers/([^/]+)/start", _Handler._start),
    ("POST", "/containers/([^/]+)/attach", _Handler._attach),
    ("POST", "/containers/([^/]+)/wait", _Handler._wait),
    ("POST", "/containers/([^/]+)/kill", _Handler._kill),
    ("DELETE", "/containers/([^/]+)", _Handler._remove),
    ("GET", "/containers/([^/]+)/json", _Handler._inspect),
)
