"""The virtual environments of programs: one for each set of requirements, made once and kept in the cache.

A folder with its marker is complete. One without is what a process left that was ended in the middle; whoever has the
lock next begins anew. They count for the limit of the cache, and go with what was used longest ago.

An environment is used by the tasks of everybody, so its name holds all that decides its content: the interpreter, the
requirements, the digests of files among them, and the settings of pip that its secrets bring. One in which a program
has installed something else is left to the tasks that run in it, and another is made.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from executors.base import ExecutorError, bad_input, write_json_atomically
from executors.cache import obtain
from executors.programs.lines import shortened, split_lines
from gpuflow.protocol import Emitter
from gpuflow.spec.pip_requirements import PipRequirement, read_requirement

_MARKER: Final = "complete.json"
#: Lines of pip's output that the error of a failed installation quotes, and characters of each.
_QUOTED_LINES: Final = 12
_QUOTED_CHARACTERS: Final = 500
_CHUNK_BYTES: Final = 65_536
#: Settings of pip that a task may name in its `secrets`, such as an index with a token: where from, and which of
#: several. In `env` no template may set them (gpuflow.spec.env_names).
_PIP_SETTINGS: Final = frozenset(
    {
        "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_TRUSTED_HOST", "PIP_PRE",
        "PIP_ONLY_BINARY", "PIP_NO_BINARY", "PIP_PREFER_BINARY", "PIP_PROXY", "PIP_CERT", "PIP_TIMEOUT", "PIP_RETRIES",
    }
)  # fmt: skip
#: The same for the network.
_NETWORK: Final = frozenset(
    {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"}
)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What an environment is made of. `env` and `secrets` name the variables of the task, `project` is its folder."""

    requirements: Sequence[str]
    python: str | None = None
    project: Path | None = None
    env: Collection[str] = ()
    secrets: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One requirement; `file` and its digest where it is one of this machine."""

    read: PipRequirement
    file: Path | None = None
    sha256: str | None = None

    @property
    def key(self) -> Any:
        return self.read.text if self.file is None else [self.file.name, self.sha256, self.read.extras]


def python_for(wanted: Wanted, root: Path, emitter: Emitter) -> Path:
    """Return the Python of an environment with these requirements, in the cache `root`; it is made if it is not there.

    Raises ExecutorError: BadInput for requirements and settings that are not taken, InstallFailed.
    """
    base = _interpreter(wanted.python)
    sources = [_source(text, wanted.project) for text in wanted.requirements]
    environment, settings = _environment(wanted.env, wanted.secrets)
    key = {
        "python": [base, *_build_of(base)],
        "requirements": sorted((source.key for source in sources), key=json.dumps),
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest() if settings else None,
    }
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    for number in itertools.count():
        place = root / "venvs" / (f"{digest}-{number}" if number else digest)
        if not _is_changed(place):
            break
        emitter.emit("log", message=f"{place.name} is not used: a program has changed what is installed in it")

    def make() -> None:
        emitter.status("loading", f"installing {len(sources)} requirements")
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        _make(place, base, sources, environment)
        write_json_atomically(place / _MARKER, {**key, "packages": _packages(place)})

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


def _build_of(base: str) -> tuple[str, int, int]:
    """Return what changes when another interpreter takes the place of one: its real path, size and time."""
    real = Path(base).resolve()
    found = real.stat()
    return str(real), found.st_size, found.st_mtime_ns


def _source(text: str, project: Path | None) -> _Source:
    try:
        read = read_requirement(text)
    except ValueError as error:
        raise bad_input(f"command.requirements: {text[:200]!r} {error}") from error
    if read.path is None:
        return _Source(read=read)
    file = Path(read.path)
    if read.is_relative:
        if project is None or not project.is_dir():
            raise bad_input(f"command.requirements: {read.path} is a file of a project; bring one, or give its path")
        file = project / read.path
        if not file.resolve().is_relative_to(project.resolve()):
            raise bad_input(f"command.requirements: {read.path} leads out of the project; put the file into it")
    return _Source(read=read, file=file, sha256=_sha256(file))


def _sha256(file: Path) -> str:
    try:
        if not file.is_file():
            raise bad_input(f"command.requirements: {file} is no file on this worker; put it there, or bring a project")
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise bad_input(
            f"command.requirements: {file} cannot be read: {error.strerror}; give the right to it"
        ) from error


def _environment(env: Collection[str], secrets: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment of the installation, and the settings in it that come from the task's secrets.

    Other variables of a task count for its program only: in an installation they could put anything into an
    environment that others use. Raises ExecutorError: BadInput for a setting of pip that is not taken.
    """
    refused = sorted(name for name in secrets if name.startswith("PIP_") and name not in _PIP_SETTINGS)
    if refused:
        taken = ", ".join(sorted(_PIP_SETTINGS))
        raise bad_input(
            f"secrets: {refused[0]} is not taken beside command.requirements; the settings of pip are: {taken}"
        )
    settings = {
        name: os.environ[name]
        for name in secrets
        if name in os.environ and (name in _PIP_SETTINGS or name.upper() in _NETWORK)
    }
    rest = {
        name: value
        for name, value in os.environ.items()
        if name not in env and name not in secrets and not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
    }
    return {**rest, **settings, "GIT_TERMINAL_PROMPT": "0"}, settings


def _packages(place: Path) -> list[str]:
    """Return what is installed in an environment: the names, which of packages hold their version."""
    return sorted(
        item.name
        for folder in place.glob("lib/python*/site-packages")
        for item in folder.iterdir()
        if item.name != "__pycache__"
    )


def _is_changed(place: Path) -> bool:
    """Whether an environment is complete, but no more what was installed."""
    try:
        listed = json.loads((place / _MARKER).read_bytes()).get("packages")
        return bool(listed != _packages(place))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):
        return True


def _make(place: Path, base: str, sources: Sequence[_Source], environment: Mapping[str, str]) -> None:
    _call([base, "-m", "venv", str(place)], environment, "its environment cannot be made")
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    given = [_argument(number, source, place) for number, source in enumerate(sources)]
    argv = [str(place / "bin" / "python"), "-m", "pip", "install", *options, "--", *given]
    _call(argv, environment, "its requirements cannot be installed")


def _argument(number: int, source: _Source, place: Path) -> str:
    """Return a requirement as pip is given it; of a file it is given a copy, which is what the digest is of."""
    if source.file is None:
        return source.read.text
    copy = place / "files" / str(number) / source.file.name
    copy.parent.mkdir(parents=True)
    shutil.copyfile(source.file, copy)
    if _sha256(copy) != source.sha256:
        raise ExecutorError(
            "InstallFailed", f"{source.file} is being written to; try again when it is done", retryable=True
        )
    return f"{copy}{source.read.extras}"


def _call(argv: Sequence[str], environment: Mapping[str, str], what: str) -> None:
    """Run a step of the installation; its output goes to the log. Raises ExecutorError with the end of it."""
    last: list[str] = []
    with subprocess.Popen(
        list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(environment)
    ) as process:
        try:
            for line in split_lines(_chunks(process)):
                text = line.decode("utf-8", "replace")
                print(text, file=sys.stderr, flush=True)
                last = [*last[1 - _QUOTED_LINES :], shortened(text.rstrip(), _QUOTED_CHARACTERS)]
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


def _chunks(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    assert process.stdout is not None  # noqa: S101
    while chunk := os.read(process.stdout.fileno(), _CHUNK_BYTES):
        yield chunk
