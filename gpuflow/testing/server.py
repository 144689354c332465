"""The server of one test process, its folder, and the app that is pointed at it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Final

import redis

from gpuflow.broker.embedded import EmbeddedServer
from gpuflow.celery_app import GPUFlow
from gpuflow.errors import GPUFlowError
from gpuflow.settings import Settings
from gpuflow.testing.environment import environment_of
from gpuflow.testing.fleet import TestFleet
from gpuflow.testing.pointing import nowhere, point
from gpuflow.testing.simulated_gpus import build_library

#: How long a child has to end when its worker is stopped at the end of a test, in seconds.
_GRACE_SECONDS: Final = "1"


class TestServer:
    """A real Valkey server of this process, in a folder that goes with it, and the app that uses it.

    `timeout`: how long its fleets wait for a condition where the test says nothing else, in seconds.
    """

    __test__ = False

    def __init__(self, app: GPUFlow, *, timeout: float) -> None:
        self.app = app
        self.timeout = timeout
        self.url = ""
        #: The fleet of the test that runs.
        self.fleet_in_use: TestFleet | None = None
        self._stack = contextlib.ExitStack()
        self._server: EmbeddedServer | None = None

    @cached_property
    def folder(self) -> Path:
        """The folder of everything that the tests write. It is removed with the server."""
        made = tempfile.TemporaryDirectory(prefix="gpuflow-pytest-", ignore_cleanup_errors=True)
        self._stack.callback(made.cleanup)
        return Path(made.name)

    @cached_property
    def library(self) -> Path:
        """The library of simulated GPUs, built when a test first asks for some. Raises GPUFlowError."""
        return build_library(self.folder / "nvml")

    @property
    def environment(self) -> dict[str, str]:
        """The settings of every process of the tests, as environment variables."""
        config = self.folder / "gpuflow.toml"
        config.touch()  # that of the project, in the current folder, is not read
        return {
            "REDIS_URL": self.url,
            "RESULTS_DIR": str(self.folder / "results"),
            "GPUFLOW_STATE_DIR": str(self.folder / "state"),
            "GPUFLOW_CACHE_DIR": str(self.folder / "cache"),
            "GPUFLOW_ENV_DIR": str(self.folder / "environments"),
            "GPUFLOW_LOCK_DIR": str(self.folder / "locks"),
            "GPUFLOW_GRACE_SEC": _GRACE_SECONDS,
            "GPUFLOW_CONFIG": str(config),
        }

    @property
    def settings(self) -> Settings:
        """The same, as the app has them."""
        return Settings.load(env=self.environment, cwd=self.folder)

    def start(self) -> None:
        """Start the server and point the app at it. Raises BrokerUnavailable."""
        self._server = EmbeddedServer(self.folder / "state")
        self._stack.callback(self._server.stop)
        self.url = self._server.start()
        point(self.app, self.settings)
        self._stack.callback(point, self.app, nowhere())

    @contextlib.contextmanager
    def fleet(self) -> Iterator[TestFleet]:
        """Return a fleet without workers for a block, with an empty server; what the block has left is removed.

        One at a time, as the app is one: a fixture of your own, of a module or of the session, is such a block.
        """
        if self._server is None:
            raise GPUFlowError("the server of the tests does not run; ask for the fixture gpuflow_server")
        if self.fleet_in_use is not None:
            raise GPUFlowError(
                "a fleet is in use already, by a fixture of a wider scope; use that one, or move the test elsewhere"
            )
        point(self.app, self.settings)  # with nothing that it remembers of the fleet before
        fleet = TestFleet(self)
        self.fleet_in_use = fleet
        try:
            with environment_of(self.environment):
                yield fleet
        finally:
            self.fleet_in_use = None
            with contextlib.ExitStack() as stack:  # what one step raises keeps no other from being done
                stack.callback(self._clear)
                stack.callback(fleet.close)

    def _clear(self) -> None:
        """Remove all records, results and machines."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()
        for name in ("results", "machines", "locks", "logs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def close(self) -> None:
        """End the workers and the server, and remove the folder. May be called twice."""
        if self.fleet_in_use is not None:
            self._stack.callback(self.fleet_in_use.close)
            self.fleet_in_use = None
        self._server = None
        self._stack.close()
