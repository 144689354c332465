"""Runs one container by Docker or Podman, through the Docker SDK: create, read, stop, remove.

The output is attached to before the start, so no line is lost, and goes through pipes to the readers of processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from executors.base import ExecutorError
from executors.containers.plan import Bind
from gpuflow.protocol import Emitter

#: An engine that does not answer one call for so long counts as gone, in seconds.
_CALL_SECONDS: Final = 60
#: What the engine keeps of the output for `docker logs`, until the container is removed.
_LOG: Final = {"max-size": "10m", "max-file": "1"}
_HIGHEST_SIGNAL: Final = 64
#: What an engine answers to a signal for a container that has ended: it is gone, or does not run.
_ENDED: Final = (404, 409)
#: A container that runs so long after its output has ended has lost it, in seconds.
_SILENT_SECONDS: Final = 5.0
_CPU_PERIOD: Final = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A container to create. Sizes are in bytes. With `talks` its stdin is open, and attached to."""

    image: str
    command: Sequence[str] | None
    entrypoint: Sequence[str] | None
    environment: Mapping[str, str]
    workdir: str | None
    network: str | None
    binds: Sequence[Bind]
    gpus: Sequence[str]
    memory_bytes: int | None
    cpus: float | None
    pids: int
    shm_bytes: int
    init: bool
    labels: Mapping[str, str]
    name: str
    talks: bool = False


class ContainerEngine:
    """A container engine at a Unix socket. Raises ExecutorError where it does not answer, or refuses."""

    def __init__(self, path: str) -> None:
        try:
            import docker
        except ImportError as error:
            raise ExecutorError(
                "MissingDependency",
                f"a container engine answers at {path}, and the Docker SDK is not installed; run `pip install "
                "'gpuflow[container]'` beside the worker, or set GPUFLOW_CONTAINER_ENGINE=none",
            ) from error
        self.path = path
        with engine_errors(path):
            self.api = docker.APIClient(base_url=f"unix://{path}", version="auto", timeout=_CALL_SECONDS)
            version, info = self.api.version(), self.api.info()
        components = version.get("Components") or [{}]
        self.name = f"{components[0].get('Name') or 'Engine'} {version.get('Version')}"
        self.is_rootless = any("rootless" in str(option) for option in info.get("SecurityOptions") or ())

    def image_id(self, image: str, pull: str, emitter: Emitter) -> str:
        """Return the id of an image, pulled if need be; `pull` is missing, always or never."""
        from docker.errors import ImageNotFound

        with engine_errors(self.path):
            if pull == "always":
                self._pull(image, emitter)
            try:
                return str(self.api.inspect_image(image)["Id"])
            except ImageNotFound:
                if pull == "never":
                    raise ExecutorError(
                        "ImageNotFound",
                        f"image {image} is not on this worker and its preset pulls none; build or load it there",
                    ) from None
            self._pull(image, emitter)
            return str(self.api.inspect_image(image)["Id"])

    def _pull(self, image: str, emitter: Emitter) -> None:
        from docker.errors import APIError, NotFound

        emitter.status("loading", f"pulling image {image}")
        try:
            for line in self.api.pull(image, stream=True, decode=True):
                if line.get("error"):
                    raise ExecutorError("ImageNotFound", f"image {image}: {line['error']}", retryable=True)
        except NotFound as error:
            raise ExecutorError(
                "ImageNotFound",
                f"image {image} is neither on this worker nor in its registry: {error.explanation}; "
                "build it there, or correct the name",
            ) from error
        except APIError as error:
            raise ExecutorError(
                "ImageNotFound", f"image {image} cannot be pulled: {error.explanation}", retryable=True
            ) from error

    def start(self, wanted: Wanted, user: str) -> Container:
        """Create and start a container."""
        from docker.types import DeviceRequest, LogConfig, Mount

        mounts = [
            Mount(target=bind.target, source=bind.source, type="bind", read_only=bind.read_only)
            for bind in wanted.binds
        ]
        devices = [DeviceRequest(device_ids=list(wanted.gpus), capabilities=[["gpu"]])]
        with engine_errors(self.path):
            host = self.api.create_host_config(
                mounts=mounts,
                device_requests=devices if wanted.gpus else None,
                mem_limit=wanted.memory_bytes,
                memswap_limit=wanted.memory_bytes,
                nano_cpus=int(wanted.cpus * _CPU_PERIOD) if wanted.cpus else None,
                pids_limit=wanted.pids,
                shm_size=wanted.shm_bytes,
                network_mode=wanted.network,
                init=wanted.init,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                log_config=LogConfig(type="json-file", config=_LOG),
            )
            created = self.api.create_container(
                wanted.image,
                list(wanted.command) if wanted.command else None,
                entrypoint=list(wanted.entrypoint) if wanted.entrypoint else None,
                environment=dict(wanted.environment),
                working_dir=wanted.workdir,
                user=user,
                labels=dict(wanted.labels),
                host_config=host,
                name=wanted.name,
                stdin_open=wanted.talks,
                use_config_proxy=False,  # it is given what the task and its preset name, and nothing else
            )
            return Container(self, created["Id"], talks=wanted.talks)

    def close(self) -> None:
        """Close the connections."""
        self.api.close()


class Container:
    """A container that runs, as `executors.programs.running.follow` takes it; with `talks` it can be written to."""

    def __init__(self, engine: ContainerEngine, container: str, *, talks: bool = False) -> None:
        self.id = container
        self._engine = engine
        self._code: int | None = None
        self._error: Exception | None = None
        self._over = threading.Event()
        self._output_ended_at: float | None = None
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self.streams: tuple[IO[bytes], IO[bytes]] = os.fdopen(out, "rb"), os.fdopen(err, "rb")
        self._input = _Input(engine, container) if talks else None
        frames = engine.api.attach(container, stdout=True, stderr=True, stream=True, demux=True)
        threading.Thread(target=self._copy, args=(frames, out_end, err_end), name="gpuflow-attach", daemon=True).start()
        engine.api.start(container)
        threading.Thread(target=self._wait, name="gpuflow-wait", daemon=True).start()

    def _copy(self, frames: Iterator[tuple[bytes | None, bytes | None]], out_end: int, err_end: int) -> None:
        """Write the two streams to their pipes; an attachment that breaks ends them."""
        with (
            os.fdopen(out_end, "wb", buffering=0) as out,
            os.fdopen(err_end, "wb", buffering=0) as err,
            contextlib.suppress(OSError, ValueError),
        ):
            for stdout, stderr in frames:
                for pipe, chunk in ((out, stdout), (err, stderr)):
                    rest = memoryview(chunk or b"")
                    while rest:
                        rest = rest[pipe.write(rest) or 0 :]
        self._output_ended_at = time.monotonic()

    def _wait(self) -> None:
        from docker.errors import NotFound

        try:
            with engine_errors(self._engine.path):
                try:
                    self._code = int(self._engine.api.wait(self.id)["StatusCode"])
                except NotFound as error:
                    told = "the container was removed while it ran, by somebody else"
                    raise ExecutorError("ContainerGone", told, retryable=True) from error
        except Exception as error:  # noqa: BLE001  (raised where it is waited for)
            self._error = error
        self._over.set()

    def ended(self, timeout_seconds: float) -> int | None:
        """Wait so long at most; return the exit code, -N for signal N, None while it runs. Raises ExecutorError."""
        if not self._over.wait(timeout_seconds):
            self._check_output()
            return None
        if self._error is not None:
            raise self._error
        code = self._code or 0
        return 128 - code if 128 < code <= 128 + _HIGHEST_SIGNAL else code

    def _check_output(self) -> None:
        """Raise ExecutorError for a container that runs on while nobody reads it: the attachment was cut."""
        if self._output_ended_at is None or time.monotonic() - self._output_ended_at < _SILENT_SECONDS:
            return
        self._output_ended_at = time.monotonic()
        with engine_errors(self._engine.path):
            is_running = self._engine.api.inspect_container(self.id)["State"].get("Running")
        if is_running:
            raise ExecutorError(
                "EngineUnavailable",
                f"the container engine at {self._engine.path} ended the output of a container that runs; it was "
                "restarted, or the container has closed its stdout and stderr, which have to stay open",
                retryable=True,
            )

    def signal(self, number: int) -> None:
        """Send a signal to its first process; nothing for one that has ended."""
        from docker.errors import APIError

        with engine_errors(self._engine.path):
            try:
                self._engine.api.kill(self.id, signal=signal.Signals(number).name)
            except APIError as error:
                if error.status_code not in _ENDED:
                    raise

    def send(self, line: bytes) -> None:
        """Write to its stdin; it may block while nobody reads. Raises OSError where it has gone."""
        if self._input is None:
            raise BrokenPipeError("its stdin is not open")
        self._input.write(line)

    def end_input(self) -> None:
        """Close its stdin; nothing where that is not open."""
        if self._input is not None:
            self._input.close()

    def remove(self, lock: Path, folder: Path | None = None) -> None:
        """Kill and remove it, a folder that it shared, and then its lock file, by which the shim knows what is left.

        Where the engine does not let us, all of that is left to the shim.
        """
        from docker.errors import NotFound

        if self._input is not None:
            self._input.close()
        with contextlib.suppress(ExecutorError), engine_errors(self._engine.path):
            with contextlib.suppress(NotFound):
                self._engine.api.remove_container(self.id, v=True, force=True)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)

    def is_out_of_memory(self) -> bool:
        """Say whether the kernel ended it for its memory limit."""
        with engine_errors(self._engine.path):
            return bool(self._engine.api.inspect_container(self.id)["State"].get("OOMKilled"))


class _Input:
    """The stdin of a container: a connection of its own, whose end is the end of that."""

    def __init__(self, engine: ContainerEngine, container: str) -> None:
        # The raw connection is below a reader of the SDK, which has to live as long.
        self._reader = engine.api.attach_socket(container, params={"stdin": 1, "stream": 1})
        self._socket: socket.socket = self._reader._sock
        self._socket.settimeout(None)

    def write(self, line: bytes) -> None:
        self._socket.sendall(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def engine_errors(path: str) -> Iterator[None]:
    """Turn the errors of the SDK into ExecutorErrors; an engine that does not answer may do so at another attempt."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except APIError as error:
        told = f"the container engine at {path} refuses: {error.explanation}"
        if "select device driver" in told:
            told += "; install the NVIDIA container toolkit on this worker"
        raise ExecutorError("EngineRefused", told, retryable=bool(error.is_server_error())) from error
    except (DockerException, RequestException, OSError) as error:
        raise ExecutorError(
            "EngineUnavailable", f"the container engine at {path} does not answer: {error}; start it", retryable=True
        ) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file by which the worker knows that the child of a container lives.

    It is made before the container and stays until `Container.remove` has removed both.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
