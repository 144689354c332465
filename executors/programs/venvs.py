"""The virtual environments of programs: one for each set of requirements, made once and kept in the cache.

A folder with its marker is complete. One without is what a process left that was ended in the middle; whoever has the
lock next begins anew. They count for the limit of the cache, and go with what was used longest ago.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from executors.base import ExecutorError, write_json_atomically
from executors.cache import obtain
from gpuflow.protocol import Emitter

_MARKER: Final = "complete.json"
#: Lines of pip's output that the error of a failed installation quotes.
_QUOTED_LINES: Final = 12


def python_for(requirements: Sequence[str], root: Path, emitter: Emitter, *, python: str | None = None) -> Path:
    """Return the Python of an environment with these requirements, in the cache `root`; it is made if it is not there.

    `python` is the interpreter to make it with: a path or a name, else the one that runs this. Raises ExecutorError.
    """
    base = _interpreter(python)
    wanted = {"python": base, "requirements": sorted(requirements)}
    place = root / "venvs" / hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:32]

    def make() -> None:
        emitter.status("loading", f"installing {len(requirements)} requirements")
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        _make(place, base, requirements)
        write_json_atomically(place / _MARKER, wanted)

    # It knows its own path, so it is made in its place, and complete with its marker.
    obtain(place, make, emitter, exists=(place / _MARKER).is_file)
    return place / "bin" / "python"


def _interpreter(python: str | None) -> str:
    if python is None:
        return sys.executable
    found = shutil.which(python)
    if found is None:
        raise ExecutorError(
            "BadInput", f"command.python: {python!r} is not on this worker; install it, or leave it out"
        )
    return found


def _make(place: Path, base: str, requirements: Sequence[str]) -> None:
    listed = place / "requirements.txt"
    _call([base, "-m", "venv", str(place)], "its environment cannot be made")
    listed.write_text("".join(f"{one}\n" for one in requirements), encoding="utf-8")
    install = ["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-r", str(listed)]
    _call([str(place / "bin" / "python"), *install], "its requirements cannot be installed")


def _call(argv: Sequence[str], what: str) -> None:
    """Run a step of the installation; its output goes to the log. Raises ExecutorError with the end of it."""
    last: list[str] = []
    with subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                print(line, end="", file=sys.stderr, flush=True)
                last = [*last[1 - _QUOTED_LINES :], line.rstrip()]
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        said = "\n".join(line for line in last if line)
        network = any(part in said.lower() for part in ("connection", "timed out", "temporary failure", "max retries"))
        raise ExecutorError(
            "InstallFailed",
            f"{what} (exit code {process.returncode}); correct command.requirements, or this worker's index:\n{said}",
            retryable=network,
        )
