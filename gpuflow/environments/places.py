"""Where environments lie, and what makes one count as built.

    GPUFLOW_ENV_DIR/<name>.yaml                       a definition of the user's own
    GPUFLOW_ENV_DIR/<name>/<variant>.json             the marker: names the folder in use; written last, by rename
    GPUFLOW_ENV_DIR/<name>/<variant>.lock             held by whoever builds or removes, and by its pip
    GPUFLOW_ENV_DIR/<name>/<variant>.log              what pip said, the last time
    GPUFLOW_ENV_DIR/<name>/<variant>-<digest>-<x>/    a virtual environment

A folder that no marker names is half built or has been replaced: it counts for nothing, and goes with the next build or
removal. Scripts of a virtual environment hold its path, so it is built where it stays, and the marker is what appears
by rename. Called by the rest of this package; it starts no process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

from gpuflow.environments.definition import Variant
from gpuflow.errors import GPUFlowError
from gpuflow.filelocks import lock, try_lock
from gpuflow.settings import Settings

_SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class Marker:
    """What is known of a built environment. `problem` is what the last check found wrong, empty if nothing."""

    name: str
    variant: Variant
    digest: str
    folder: str
    python_version: str
    built_at: float
    build_seconds: float
    size_bytes: int
    problem: str = ""
    checked_at: float = 0.0


def interpreter(folder: Path) -> Path:
    """Return the Python of a virtual environment."""
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


class Place:
    """The files of one variant of one environment."""

    def __init__(self, settings: Settings, name: str, variant: Variant) -> None:
        self.name = name
        self.variant: Variant = variant
        self.home = settings.env_dir / name
        self.marker_file = self.home / f"{variant}.json"
        self.log_file = self.home / f"{variant}.log"

    def marker(self) -> Marker | None:
        """Return the marker; None where there is none, or one that this version cannot read."""
        try:
            data: Any = json.loads(self.marker_file.read_text("utf-8"))
            if data.pop("schema") != _SCHEMA:
                return None
            return Marker(**data)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def folder(self, marker: Marker) -> Path:
        """Return the folder that a marker names."""
        return self.home / marker.folder

    def commit(self, marker: Marker) -> None:
        """Make a marker the one in use. Raises OSError."""
        temporary = self.home / f".{self.variant}.{secrets.token_hex(4)}.tmp"
        try:
            temporary.write_text(json.dumps({"schema": _SCHEMA, **asdict(marker)}, indent=2), "utf-8")
            temporary.replace(self.marker_file)
        finally:
            temporary.unlink(missing_ok=True)

    def note_check(self, folder: str, problem: str, at: float) -> None:
        """Remember in the marker what a check of `folder` found, unless another has taken its place.

        Nothing is noted while somebody builds or removes: that may take long, and settles it. Raises OSError.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        with self._lock_file.open("ab") as file:
            if not try_lock(file.fileno()):
                return
            marker = self.marker()
            if marker is not None and marker.folder == folder:
                self.commit(replace(marker, problem=problem, checked_at=at))

    def new_folder(self, digest: str) -> Path:
        """Make an empty folder for a build. Raises OSError."""
        folder = self.home / f"{self.variant}-{digest}-{secrets.token_hex(3)}"
        folder.mkdir()
        return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock of this variant, after whoever has it; gives its descriptor. Raises OSError."""
        self.home.mkdir(parents=True, exist_ok=True)
        with self._lock_file.open("ab") as file:
            lock(file.fileno())
            yield file.fileno()

    @property
    def is_here(self) -> bool:
        """Whether something of it is on this disk: built, half built, or replaced."""
        return self.marker_file.exists() or any(self.home.glob(f"{self.variant}-*-*"))

    @property
    def is_building(self) -> bool:
        """Whether somebody builds or removes it now."""
        try:
            with self._lock_file.open("rb+") as file:
                return not try_lock(file.fileno())
        except OSError:
            return False

    def sweep(self) -> int:
        """Remove every folder that the marker does not name and no process uses; return how many. Hold the lock."""
        marker = self.marker()
        kept = marker.folder if marker else None
        gone = 0
        for folder in self.home.glob(f"{self.variant}-*-*"):
            if folder.name != kept and folder.is_dir() and not users_of(folder):
                shutil.rmtree(folder, ignore_errors=True)
                gone += 1
        for left in self.home.glob(f".{self.variant}.*.tmp"):
            left.unlink(missing_ok=True)
        return gone

    def remove(self) -> Marker | None:
        """Remove what is built, its log and leftovers; return the former marker. Raises GPUFlowError, OSError."""
        if not self.home.is_dir():
            return None
        with self.locked():
            marker = self.marker()
            if marker is not None and (users := users_of(self.folder(marker))):
                raise GPUFlowError(
                    f"environment {self.name} ({self.variant}) is in use by process {users[0]}; "
                    "let its tasks end (`gpuflow workers drain ID`), then remove it"
                )
            self.marker_file.unlink(missing_ok=True)
            self.sweep()
            self.log_file.unlink(missing_ok=True)
        return marker

    @property
    def _lock_file(self) -> Path:
        return self.home / f"{self.variant}.lock"


def users_of(folder: Path) -> list[int]:
    """Return the ids of the processes that run the Python, or a script, of a virtual environment."""
    inside = f"{folder}{os.sep}"
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(part.startswith(inside) for part in (process.info["cmdline"] or [])[:2]):
            found.append(process.pid)
    return found


def size_of(folder: Path) -> int:
    """Return what the files of a folder take on disk, in bytes."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(root, name))  # noqa: PTH118  (tens of thousands of them)
                total += getattr(found, "st_blocks", 0) * 512 or found.st_size
    return total
