"""Where the secrets of a task come from on this worker, and the redactor that hides them in all that its child says.

Called by the supervisor before and after the child. A value goes from here to the child's environment alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from gpuflow.artifacts.manifest import write_json
from gpuflow.artifacts.placeholders import placeholder_secrets
from gpuflow.artifacts.plain_files import plain_files
from gpuflow.errors import GPUFlowError, InvalidSettings, NotAllowed
from gpuflow.policy.secrets import PREFIX, offered, refusal, variable_of
from gpuflow.private_files import open_new
from gpuflow.secrets import Redactor, secrets_in_environment, secrets_in_spec, url_secrets
from gpuflow.settings import Settings
from gpuflow.spec.references import UnresolvedReference, resolve_env
from gpuflow.worker.child_environment import child_environment, is_forbidden
from gpuflow.worker.outcome import Outcome, cause_of

#: How a secret can be called: as a variable.
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Longest secret, in bytes: a service account's key file is some KiB.
MAX_SECRET_BYTES: Final = 65_536
#: Files of a result that are read for secrets; others, weights above all, are what a library writes.
_TEXT_SUFFIXES: Final = frozenset(
    {"", ".csv", ".err", ".html", ".ini", ".json", ".jsonl", ".log", ".md", ".out", ".toml", ".tsv", ".txt", ".yaml"}
    | {".yml"}
)
#: A model's own files: a secret that is also a word must not change a vocabulary.
_LEFT_ALONE: Final = frozenset({"final_model", "final_lora", "checkpoints"})
#: Larger files are not read for secrets, in bytes.
MAX_SCRUBBED_BYTES: Final = 64 << 20


#: How errors name the folder of secrets.
_FOLDER: Final = "$GPUFLOW_SECRETS_DIR"


class MissingSecret(GPUFlowError):
    """A secret that the task names is not on this worker."""


def secrets_of(spec: Mapping[str, Any], settings: Settings, worker: str) -> dict[str, str]:
    """Return the secrets that a task names, as this process has them. Raises MissingSecret."""
    return secret_values(
        spec.get("secrets") or (),
        environ=os.environ,
        folder=settings.secrets_dir,
        worker=worker,
        allowed=settings.allow_secrets,
    )


def offered_secrets(settings: Settings) -> tuple[str, ...]:
    """Return the names of the secrets that this process gives tasks, sorted; a file is named whatever its mode is."""
    files: list[str] = []
    if settings.secrets_dir is not None:
        with contextlib.suppress(OSError):
            files = [path.name for path in settings.secrets_dir.iterdir() if path.is_file()]
    names = offered(os.environ, settings.allow_secrets, files)
    return tuple(sorted(name for name in names if _NAME.fullmatch(name) and not is_forbidden(name)))


def secret_values(
    names: Sequence[str],
    *,
    environ: Mapping[str, str],
    folder: Path | None,
    worker: str,
    allowed: Sequence[str] = (),
) -> dict[str, str]:
    """Return the values of a task's `secrets`: from the variables meant for tasks, else from the file `folder/NAME`.

    `allowed` are globs of the worker's variables that tasks may name (`gpuflow.policy.secrets`). Raises NotAllowed for
    another variable of the worker; MissingSecret, with worker, cause and mend, for one that is nowhere, is given to
    nobody, or whose file others can read.
    """
    return {name: _value(name, environ, folder, worker, allowed) for name in names}


def _value(name: str, environ: Mapping[str, str], folder: Path | None, worker: str, allowed: Sequence[str]) -> str:
    if is_forbidden(name):
        raise MissingSecret(f"worker {worker} gives {name} to no task; take it out of `secrets`")
    variable = variable_of(name, environ, allowed)
    if variable is not None:
        return environ[variable]
    if folder is None or not (folder / name).exists():
        refused = refusal(name, variables=environ, patterns=allowed, files=())
        if refused is not None:
            raise NotAllowed(f"worker {worker}: {refused.message}", refused.setting)
    if folder is None:
        raise MissingSecret(
            f"worker {worker} has no secret {name}: there is no {PREFIX}{name} in the worker's environment, and "
            f"GPUFLOW_SECRETS_DIR is not set; start the worker with {PREFIX}{name} set, or with GPUFLOW_SECRETS_DIR "
            f"naming a folder that holds the file {name}"
        )
    # Where the folder lies is nothing that a task needs to know: errors are shown to whoever submitted it.
    try:
        return _read(folder / name, name, worker)
    except OSError as error:
        cause = "there is none" if isinstance(error, FileNotFoundError) else error.strerror
        raise MissingSecret(
            f"worker {worker} has no secret {name}: there is no {PREFIX}{name} in the worker's environment, and "
            f"{_FOLDER}/{name} cannot be read ({cause}); write the value to that file with mode 600, or start the "
            f"worker with {PREFIX}{name} set"
        ) from None


def _read(path: Path, name: str, worker: str) -> str:
    """Return the text of a secret file without the line end at its end. Raises MissingSecret, OSError."""
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise MissingSecret(
                f"worker {worker} has no secret {name}: {_FOLDER}/{name} is no plain file; put the value in one"
            )
        if state.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise MissingSecret(
                f"worker {worker} does not use the secret {name}: others can read or change {_FOLDER}/{name} "
                f"(mode {stat.S_IMODE(state.st_mode):03o}); run `chmod 600` on it"
            )
        raw = file.read(MAX_SECRET_BYTES + 1)
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    if not text or "\0" in text or "\ufffd" in text or len(raw) > MAX_SECRET_BYTES:
        raise MissingSecret(
            f"worker {worker} has no secret {name}: {_FOLDER}/{name} must hold UTF-8 text of 1 to "
            f"{MAX_SECRET_BYTES} bytes"
        )
    return text


def read_token(file: str) -> SecretStr:
    """Return the worker's token of a file that nobody else may read. Raises InvalidSettings."""
    path = Path(file).expanduser()
    try:
        with path.open("rb") as opened:
            state = os.fstat(opened.fileno())
            raw = opened.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise InvalidSettings(
            f"--worker-token-file {file}: {error.strerror}; give a file that holds the token"
        ) from None
    if not stat.S_ISREG(state.st_mode) or state.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise InvalidSettings(f"--worker-token-file {file}: others can read or change it; run `chmod 600` on it")
    token = raw.decode("ascii", "replace").strip()
    if not token or not token.isprintable() or "\ufffd" in token or len(raw) > MAX_SECRET_BYTES:
        raise InvalidSettings(f"--worker-token-file {file}: holds no token; write one line of visible characters to it")
    return SecretStr(token)


def reference_values(spec: Mapping[str, Any], secrets: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """Return what `${env:NAME}` stands for in what the worker itself reads of a spec: what it will for the child.

    Variables of `env` that are put together are so in the order in which they stand; one that lacks a part is left out.
    """
    requested = spec.get("env")
    if not isinstance(requested, Mapping):  # of a merged call straight from the broker, which fails by itself
        requested = {}
    values = child_environment(
        os.environ,
        pass_env=settings.pass_env,
        given={},
        requested=requested,
        secrets=secrets,
        offline=settings.offline,
    )
    for name, value in requested.items():
        if "${env:" in str(value) and not is_forbidden(name):
            with contextlib.suppress(UnresolvedReference):
                values[name] = resolve_env(str(value), values)
    return values


def redactor_of(
    specs: Sequence[Mapping[str, Any]], secrets: Mapping[str, str], environment: Mapping[str, str], settings: Settings
) -> Redactor:
    """Return what hides a task's secrets: its own, what its spec and environment hold, and the worker's.

    A merged request has several specs, those of its callers.
    """
    inferred = [*secrets_in_environment(environment), *_of_worker(settings)]
    for spec in specs:
        inferred += secrets_in_spec(spec)
        inferred += placeholder_secrets(spec, reference_values(spec, secrets, settings))
    return Redactor(secrets.values(), inferred)


def worker_redactor(settings: Settings) -> Redactor:
    """Return what hides the worker's own secrets, in its own log."""
    return Redactor((), _of_worker(settings))


def _of_worker(settings: Settings) -> Iterator[str]:
    yield from secrets_in_environment(os.environ)
    yield from (value for name, value in os.environ.items() if name.startswith(PREFIX))
    yield from url_secrets(settings.redis_url or "")
    if settings.worker_token is not None:
        yield settings.worker_token.get_secret_value()


def scrubbed(outcome: Outcome, folder: Path, redactor: Redactor) -> Outcome:
    """Hide secrets in the text files that the child has left; a failure when that cannot be done."""
    try:
        scrub(folder, redactor)
    except OSError as error:
        return replace(outcome, completed=False, error=outcome.error or cause_of(error))
    return outcome


def scrub(folder: Path, redactor: Redactor) -> None:
    """Rewrite those files of an attempt that are text and hold a secret; each appears by rename. Raises OSError."""
    for path in plain_files(folder):
        if path.suffix.lower() not in _TEXT_SUFFIXES or not path.lstat().st_size:
            continue
        if _LEFT_ALONE & set(path.relative_to(folder).parts):
            continue
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_size > MAX_SCRUBBED_BYTES:
                continue
            text = file.read(MAX_SCRUBBED_BYTES).decode("utf-8", "surrogateescape")
        hidden = redactor.values(text)
        if hidden == text:
            continue
        _rewrite(path, text, hidden, redactor)
        path.chmod(stat.S_IMODE(state.st_mode))


def _rewrite(path: Path, text: str, hidden: str, redactor: Redactor) -> None:
    if path.suffix.lower() == ".json":
        try:
            write_json(path, redactor.data(json.loads(text), shapes=False))
        except (ValueError, RecursionError):
            pass
        else:
            return
    fresh = path.with_name(f".{path.name}.new")
    with open_new(fresh) as file:  # a link of that name, which the task has left, leads nowhere
        file.write(hidden.encode("utf-8", "surrogateescape"))
    fresh.replace(path)
