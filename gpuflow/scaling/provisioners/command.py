"""Machines that a user's own program launches: one JSON object on its stdin, one on its stdout.

    {"schema": 1, "action": "launch", "fleet": TAG, "machine": {"id", "family", "spot", "workerOptions"}}   ->  {}
    {"schema": 1, "action": "terminate", "fleet": TAG, "machine": {"id"}}                                   ->  {}
    {"schema": 1, "action": "list", "fleet": TAG}                  ->  {"machines": [{"id": ..., "family": ...}]}

Exit code 0 is success. Anything else is a failure, which the end of its stderr explains.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuflow.scaling.provisioners import ProvisionerError, UnknownMachine, Wanted
from gpuflow.terminal import clean

#: Of what the program prints so much is read.
_MOST_BYTES: Final = 4 * 2**20
#: A killed program has so many seconds to be gone.
_END_SECONDS: Final = 5.0


class CommandProvisioner:
    """Runs `command` for each call; `tag` names this fleet."""

    listed_within_seconds = 10.0

    def __init__(self, command: Sequence[str], *, tag: str, timeout_seconds: float = 120.0) -> None:
        self._command = list(command)
        self._tag = tag
        self._timeout_seconds = timeout_seconds

    def launch(self, wanted: Wanted) -> None:
        """Launch a machine."""
        self._call("launch", wanted.to_dict())

    def terminate(self, machine_id: str) -> None:
        """End a machine."""
        self._call("terminate", {"id": machine_id})

    def machines(self) -> dict[str, str]:
        """Return the machines of this fleet."""
        answer = self._call("list")
        try:
            return {str(one["id"]): str(one.get("family", "")) for one in answer["machines"]}
        except (KeyError, TypeError, AttributeError):
            raise self._error("list", 'its answer is not {"machines": [{"id": ..., "family": ...}]}') from None

    def unknown(self) -> tuple[UnknownMachine, ...]:
        """Return nothing: the program lists by the tag alone."""
        return ()

    def _call(self, action: str, machine: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        request: dict[str, Any] = {"schema": 1, "action": action, "fleet": self._tag}
        if machine is not None:
            request["machine"] = dict(machine)
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise self._error(action, f"it cannot be started: {error.strerror or error}") from None
        try:
            output, errors = process.communicate(json.dumps(request).encode(), timeout=self._timeout_seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise self._error(action, f"it did not end within {self._timeout_seconds:g} s; raise its timeout") from None
        except BaseException:
            _kill(process)
            raise
        if process.returncode:
            tail = clean(errors[-500:].decode("utf-8", "replace").strip())
            raise self._error(action, f"exit code {process.returncode}: {tail or 'it wrote nothing to stderr'}")
        try:
            answer = json.loads(output[:_MOST_BYTES] or b"{}")
        except ValueError:
            raise self._error(action, "its answer is no JSON object; print one on stdout, all else on stderr") from None
        if not isinstance(answer, dict):
            raise self._error(action, "its answer is no JSON object; print one on stdout, all else on stderr")
        return answer

    def _error(self, action: str, cause: str) -> ProvisionerError:
        return ProvisionerError(f"the provisioner {self._command[0]!r} failed to {action}: {cause}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the program and what it has started in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    # A program of a session of its own may live on and hold the pipes: nobody waits for it.
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_SECONDS)
