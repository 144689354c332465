"""Machines that are containers of Docker or Podman on the machine where beat runs, by the engine's own command.

A container is named after its machine and stays when it has ended, so that a second launch of one id finds it. The
address of the broker is passed in the environment, never as an argument.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Final

from gpuflow.scaling.provisioners import (
    FAMILY_LABEL,
    FLEET_LABEL,
    MACHINE_LABEL,
    ContainerImage,
    ProvisionerError,
    UnknownMachine,
    Wanted,
)
from gpuflow.settings import Settings
from gpuflow.terminal import clean

#: A worker that is terminated has drained, or never served; what is left of it has so many seconds.
_STOP_SECONDS: Final = 10
#: Containers that have ended are kept, so that a launch which comes late does nothing.
_KEPT: Final = 50
_ENDED_LABEL: Final = "gpuflow-ended"
#: What both engines say where a name is taken, or no container has it.
_NAME_TAKEN: Final = "already in use"
_NO_SUCH: Final = ("no such container", "no container with name")
_MOST_ERROR: Final = 400


class Containers:
    """Workers of the broker `url` as containers of `image`; `tag` names this fleet."""

    listed_within_seconds = 10.0

    def __init__(
        self, image: ContainerImage, settings: Settings, url: str, tag: str, *, timeout_seconds: float = 120.0
    ) -> None:
        self._image = image
        self._tag = tag
        self._timeout_seconds = timeout_seconds
        self._given = {"REDIS_URL": url}
        if settings.key_prefix:
            self._given["GPUFLOW_KEY_PREFIX"] = settings.key_prefix

    def launch(self, wanted: Wanted) -> None:
        """Start a container."""
        worker = ["celery", "-A", "gpuflow", "worker", "--name", wanted.id, *wanted.worker_options]
        passed = [part for name in (*self._given, *self._image.environment) for part in ("--env", name)]
        started = ["run", "--detach", "--restart", "no", *self._labels(wanted.id, wanted.family)]
        self._run("launch", *started, *passed, *self._image.options, self._image.image, *worker, but=(_NAME_TAKEN,))

    def terminate(self, machine_id: str) -> None:
        """Stop a container; what stays of it keeps a late launch from starting another one."""
        if self._run("terminate", "stop", "-t", str(_STOP_SECONDS), self._name(machine_id), but=_NO_SUCH) is None:
            labels = [*self._labels(machine_id, ""), "--label", f"{_ENDED_LABEL}=true"]
            self._run("terminate", "create", *labels, self._image.image, "true", but=(_NAME_TAKEN,))
        self._prune()

    def machines(self) -> dict[str, str]:
        """Return the containers that run."""
        rows = self._list(f"label={FLEET_LABEL}={self._tag}", MACHINE_LABEL, FAMILY_LABEL)
        return {machine: family for machine, family, _ in rows if machine}

    def unknown(self) -> list[UnknownMachine]:
        """Return the containers of other fleets of this engine."""
        rows = self._list(f"label={FLEET_LABEL}", MACHINE_LABEL, FAMILY_LABEL, FLEET_LABEL)
        return [
            UnknownMachine(
                id=machine or container,
                family=family,
                fleet=fleet,
                host=socket.gethostname(),
                engine=self._image.engine,
                container=container,
            )
            for machine, family, fleet, container in rows
            if fleet != self._tag
        ]

    def _name(self, machine_id: str) -> str:
        return f"gpuflow.{self._tag}.{machine_id}"

    def _labels(self, machine_id: str, family: str) -> list[str]:
        labels = {FLEET_LABEL: self._tag, MACHINE_LABEL: machine_id, FAMILY_LABEL: family}
        return ["--name", self._name(machine_id), *(p for k, v in labels.items() for p in ("--label", f"{k}={v}"))]

    def _list(self, asked: str, *labels: str, ended: bool = False) -> list[list[str]]:
        """Return these labels of each container that runs (or has ended), and its id."""
        states = ["--all", "--filter", "status=exited", "--filter", "status=created"] if ended else []
        shown = "\t".join([*(f'{{{{.Label "{label}"}}}}' for label in labels), "{{.ID}}"])
        output = self._run("list", "ps", *states, "--filter", asked, "--format", shown) or ""
        rows = [line.split("\t") for line in output.splitlines()]
        return [row for row in rows if len(row) == len(labels) + 1]

    def _prune(self) -> None:
        """Remove what is left of all but the newest that have ended; engines list the newest first."""
        ended = self._list(f"label={FLEET_LABEL}={self._tag}", MACHINE_LABEL, ended=True)
        for _, container in ended[_KEPT:]:
            self._run("terminate", "rm", container, but=_NO_SUCH)

    def _run(self, action: str, *arguments: str, but: Sequence[str] = ()) -> str | None:
        """Run the engine's command; return its output, None where it failed by one of the causes of `but`."""
        try:
            done = subprocess.run(
                [self._image.engine, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={**os.environ, **self._given},
                timeout=self._timeout_seconds,
                check=False,
            )
        except OSError as error:
            raise self._error(action, f"it cannot be started: {error.strerror or error}") from None
        except subprocess.TimeoutExpired:
            raise self._error(action, f"it did not end within {self._timeout_seconds:g} s; raise its timeout") from None
        if done.returncode:
            errors = done.stderr.decode("utf-8", "replace")
            if any(cause in errors.lower() for cause in but):
                return None
            raise self._error(action, clean(errors[-_MOST_ERROR:].strip()) or f"exit code {done.returncode}")
        return done.stdout.decode("utf-8", "replace")

    def _error(self, action: str, cause: str) -> ProvisionerError:
        return ProvisionerError(f"the engine {self._image.engine!r} failed to {action}: {cause}")
