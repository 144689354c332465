"""Makes a virtual environment and runs pip in it, and tells how far it is. Called by `building` alone.

What it starts ends with us, and holds the lock of the build as long as it lives, so nobody else touches the folder
before it has ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from gpuflow.environments.attached import attached_module
from gpuflow.environments.places import interpreter
from gpuflow.errors import GPUFlowError
from gpuflow.repeating import repeating

#: How often what has arrived is counted, in seconds.
_LOOK_SECONDS: Final = 0.5
_TAIL_LINES: Final = 400
#: What a virtual environment with nothing but pip takes, with room to spare.
_VENV_BYTES: Final = 64 << 20
_MEGABYTE: Final = 1e6


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a build is. `phase` is for people; `done` counts `unit` (MB, packages), of `total` if known."""

    phase: str
    done: float = 0
    total: float | None = None
    unit: str = ""


Tell = Callable[[Progress], None]


def make_venv(folder: Path, *, lock: int, environment: Mapping[str, str]) -> None:
    """Make an empty virtual environment of this Python, with pip. Raises GPUFlowError, OSError."""
    with attached_module(Path(sys.executable), "venv", [str(folder)], keep=[lock], env=environment) as process:
        said = process.communicate()[0].strip()
    if process.returncode == 0:
        return
    if find_spec("ensurepip") is None:
        raise GPUFlowError(
            f"{sys.executable} cannot make virtual environments: its module ensurepip is missing; "
            "install it (Debian: apt-get install python3-venv)"
        )
    if shutil.disk_usage(folder).free < _VENV_BYTES:
        said += "\n[Errno 28] No space left on device"
    raise GPUFlowError(f"no virtual environment could be made in {folder}: {_last_line(said)}; {_mend(said)}")


class Pip:
    """The pip of one environment that is being built."""

    def __init__(
        self, folder: Path, *, log: Path, lock: int, wheelhouse: Path | None, environment: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._log = log
        self._lock = lock
        self._wheelhouse = wheelhouse
        self._temporary = folder / ".tmp"
        self._environment = {**environment, "TMPDIR": str(self._temporary), "PYTHONUNBUFFERED": "1"}

    def install(self, pins: Sequence[str], beside: Sequence[str], tell: Tell) -> None:
        """Install pins; `beside` are those of earlier steps, which must stay. Raises GPUFlowError."""
        where = ["--no-index", "--find-links", str(self._wheelhouse)] if self._wheelhouse else []
        reader = _Reader(", ".join(pins), self._temporary, self._site_packages(), tell)
        self._run(["install", "--no-input", "--progress-bar", "off", *where, *pins, *beside], reader)

    def uninstall(self, names: Sequence[str]) -> None:
        """Uninstall packages, whether they are there or not. Raises GPUFlowError."""
        self._run(["uninstall", "--yes", *names], _Reader("", self._temporary, None, lambda _: None))

    def _site_packages(self) -> Path | None:
        return next(self._folder.glob("lib/python3*/site-packages"), None)

    def _run(self, arguments: Sequence[str], reader: _Reader) -> None:
        self._temporary.mkdir(exist_ok=True)
        argv = ["--disable-pip-version-check", *arguments]
        python = interpreter(self._folder)
        with (
            _log_to(self._log) as write,
            attached_module(python, "pip", argv, keep=[self._lock], env=self._environment) as pip,
            reader.looking(),
        ):
            write(f"$ pip {' '.join(arguments)}\n")
            for line in pip.stdout or ():
                write(line)
                reader.feed(line)
            code = pip.wait()
        if code != 0:
            said = reader.tail()
            raise GPUFlowError(
                f"pip could not install {reader.what or 'into the environment'}: {_cause(said, code)}; {_mend(said)} "
                f"(its log: {self._log})"
            )


class _Reader:
    """Follows one run of pip: what it says, what has arrived in its temporary folder, what is installed."""

    def __init__(self, what: str, temporary: Path, site_packages: Path | None, tell: Tell) -> None:
        self.what = what
        self._temporary = temporary
        self._site_packages = site_packages
        self._tell = tell
        self._lines: list[str] = []
        self._installing = 0
        self._there_before = 0
        self._current = ""
        self._largest = 0.0

    def feed(self, line: str) -> None:
        """Take a line of pip's."""
        self._lines = [*self._lines[-_TAIL_LINES:], line.rstrip()]
        text = line.strip()
        if match := re.match(r"(?:Collecting|Processing|Downloading|Using cached) (\S+)", text):
            self._current = match[1].rstrip("/").rpartition("/")[2]
        elif text.startswith("Installing collected packages:"):
            self._there_before = self._installed()
            self._installing = text.count(",") + 1

    def tail(self) -> list[str]:
        """Return the last lines."""
        return self._lines

    def looking(self) -> AbstractContextManager[None]:
        """Tell, from a thread, how far pip is, as long as the block lasts."""

        def look() -> bool:
            self._tell(self._progress())
            return True

        look()
        return repeating(look, _LOOK_SECONDS, "pip-progress")

    def _progress(self) -> Progress:
        if self._installing:
            done = max(0, self._installed() - self._there_before)
            return Progress(
                phase="installing", done=min(done, self._installing), total=self._installing, unit="packages"
            )
        self._largest = max(self._largest, _bytes_in(self._temporary) / _MEGABYTE)
        return Progress(phase=self._current or self.what, done=self._largest, unit="MB")

    def _installed(self) -> int:
        """Count the packages that are installed: a `dist-info` is written with each."""
        if self._site_packages is None:
            return 0
        with contextlib.suppress(OSError):
            return sum(path.suffix == ".dist-info" for path in self._site_packages.iterdir())
        return 0


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[Callable[[str], None]]:
    """Give what appends to the log; a full disk costs the log, not the build's own error."""
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            file = stack.enter_context(path.open("a", encoding="utf-8", buffering=1))

        def write(text: str) -> None:
            if file is not None:
                with contextlib.suppress(OSError, ValueError):
                    file.write(text)

        try:
            yield write
        finally:
            with contextlib.suppress(OSError):
                stack.close()


def _bytes_in(folder: Path) -> int:
    """Return the bytes of what lies in pip's temporary folders, which holds few files."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118
    return total


def _cause(lines: Sequence[str], code: int) -> str:
    """Return the cause in pip's own words: its last ERROR lines, the most telling first."""
    errors = [line.removeprefix("ERROR: ").strip() for line in lines if line.startswith("ERROR: ")]
    if errors:
        telling = next((one for one in errors if "No matching distribution" in one or "No space" in one), errors[0])
        return telling.rstrip(".")
    return _last_line("\n".join(lines)) or f"it ended with exit code {code}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300].rstrip(".") if lines else ""


def _mend(said: str | Sequence[str]) -> str:
    text = said if isinstance(said, str) else "\n".join(said)
    if "No space left" in text or "Errno 28" in text or "Errno 122" in text or "Errno 27]" in text:
        return "make room on that disk, or set GPUFLOW_ENV_DIR to a larger one"
    if "Read-only file system" in text or "Permission denied" in text:
        return "mend the rights of GPUFLOW_ENV_DIR, or set it to another folder"
    if "No matching distribution" in text or "Could not find a version" in text:
        return "check the network and pip's index, or give the wheels with --wheelhouse DIR"
    if "ConnectionError" in text or "Temporary failure" in text or "timed out" in text or "Connection" in text:
        return "check the network and pip's index; what was fetched is in pip's cache, so try it again"
    return "mend that, and try it again"
