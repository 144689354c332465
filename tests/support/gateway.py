"""A real `gpuflow gateway` process on loopback."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from gpuflow.artifacts.http_store import HttpStore
from gpuflow.artifacts.throttle import Throttle
from gpuflow.cluster.commands import with_our_packages
from gpuflow.settings import Settings
from tests.support.fleet import keep_log
from tests.support.waiting import patient

TOKEN = "token-of-the-tests-0123456789"
_START_SECONDS = 30


class Gateway:
    """One process; `url` is its address, `root` its results folder. A context manager.

    `code` runs in it first: to break something.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        token: str | None = TOKEN,
        env: Mapping[str, str] | None = None,
        code: str = "",
        root: Path | None = None,
    ) -> None:
        self.root = root or folder / "results"
        self.token = token
        self.log_path = folder / "gateway.log"
        keep_log(self)
        environment = {name: value for name, value in os.environ.items() if name != "GPUFLOW_WORKER_TOKEN"}
        environment |= {"RESULTS_DIR": str(self.root), "PYTHONUNBUFFERED": "1", **(env or {})}
        if token is None:
            options = (*options, "--without-token")
        else:
            environment["GPUFLOW_WORKER_TOKEN"] = token
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"{code}\nfrom gpuflow.cli import main; main()",
                    "gateway",
                    "--port",
                    "0",
                    *options,
                ],
                cwd=folder,
                env=with_our_packages(environment),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self.url = self._told_address()
        except BaseException:
            self.close()
            raise

    def _told_address(self) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:  # select(2) ends at 1,024 descriptors
            selector.register(self.process.stdout, selectors.EVENT_READ)
            ready = selector.select(patient(_START_SECONDS))
        first = self.process.stdout.readline() if ready else ""
        assert first.startswith(("gateway: http://", "gateway: https://")), f"the gateway did not start: {self.log}"
        return first.removeprefix("gateway: ").strip()

    @property
    def results_url(self) -> str:
        return f"{self.url}/api/v1/results"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    @property
    def memory_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def store(self, *, url: str | None = None, throttle: Throttle | None = None, max_attempts: int = 6) -> HttpStore:
        """Return a store that speaks to this gateway, by `url` through a proxy."""
        return HttpStore(
            url or self.results_url,
            settings=Settings(),
            token=self.token,
            throttle=throttle or Throttle(None),
            max_attempts=max_attempts,
        )

    def files(self) -> list[str]:
        """Return what lies in the results folder, without the gateway's own."""
        return sorted(
            str(path.relative_to(self.root))
            for path in self.root.rglob("*")
            if path.is_file() and not path.relative_to(self.root).parts[0].startswith(".gpuflow-")
        )

    def parts(self, task_id: str = "*") -> list[Path]:
        """Return the uploads (of a task) that are not whole."""
        return sorted(self.root.glob(f".gpuflow-gateway/parts/{task_id}/*"))

    def stop(self) -> int:
        """Ask it to end, and return its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
