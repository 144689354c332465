"""Reads the entries of `command.requirements`: a name with its versions, a URL of fixed content, or a file.

Each entry is one requirement for pip and nothing else: options would reach every later one, and what may change under
its name would be installed once and kept. Pure; checked at validate, and by the child, where `${env:NAME}` has a value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import urlsplit

#: What an option is written for, and what to do instead; the first that the entry begins with.
_OPTIONS: Final = (
    (("-r", "--requirement"), "list its lines here"),
    (("-c", "--constraint"), "write the versions here"),
    (("-e", "--editable"), "bring the code by command.project, or build a wheel of it"),
    (("-i", "--index-url", "--pypi-url"), "set PIP_INDEX_URL on the worker, or name it in secrets"),
    (("--extra-index-url",), "set PIP_EXTRA_INDEX_URL on the worker, or name it in secrets"),
    (("-f", "--find-links"), "set PIP_FIND_LINKS on the worker"),
    (("--trusted-host",), "set PIP_TRUSTED_HOST on the worker"),
    (("--pre",), "name the version, such as torch==2.14.0rc1"),
    (("",), "write requirements such as torch==2.13.0"),
)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_ARCHIVES: Final = (".whl", ".tar.gz", ".zip")
_FILE: Final = re.compile(r"(?P<path>[^\[\];]+)(?P<extras>\[[A-Za-z0-9._, -]*\])?")
_SHA256: Final = re.compile(r"(?:^|&)sha256=[0-9a-fA-F]{64}(?:&|$)")
_COMMIT: Final = re.compile(r"@[0-9a-fA-F]{40}$")


@dataclass(frozen=True, kw_only=True)
class PipRequirement:
    """One requirement as pip takes it; `path` where it is a file, `extras` of that, as in `[test]`."""

    text: str
    path: str | None = None
    extras: str = ""

    @property
    def is_relative(self) -> bool:
        """Whether it is a file of the project."""
        return self.path is not None and not self.path.startswith("/")


def read_requirement(text: str) -> PipRequirement:
    """Return what one entry means. Raises ValueError with cause and mend."""
    entry = text.strip()
    if not entry or entry.startswith("#"):
        raise ValueError("is empty; leave it out")
    if _CONTROL.search(entry):
        raise ValueError("has more than one line; give each requirement an entry of its own")
    if entry.startswith("-"):
        mend = next(mend for starts, mend in _OPTIONS if entry.startswith(starts))
        raise ValueError(f"is an option of pip, and only requirements are taken; {mend}")
    if re.search(r"\s--?[A-Za-z]", entry):
        raise ValueError("has an option of pip, and only requirements are taken; write the version alone")
    if _is_file(entry):
        return _file(entry)
    return _named(entry)


def _is_file(entry: str) -> bool:
    if re.match(r"[A-Za-z0-9._-]+\s*(\[[^\]]*\]\s*)?@", entry) or "://" in entry:
        return False
    found = _FILE.match(entry)
    path = found["path"].strip() if found else entry
    return path.startswith(("/", "./", "../", "~", "file:")) or path.endswith(_ARCHIVES) or path == "."


def _file(entry: str) -> PipRequirement:
    found = _FILE.fullmatch(entry)
    path = found["path"].strip() if found else entry
    if found is None or not path.endswith(_ARCHIVES):
        raise ValueError("is a path, but of no wheel or source archive (.whl, .tar.gz, .zip); build one of it")
    if path.startswith(("~", "file:")) or ".." in PurePosixPath(path).parts:
        raise ValueError("is a path that may lead anywhere; give an absolute one, or one inside the project")
    return PipRequirement(text=entry, path=path, extras=found["extras"] or "")


def _named(entry: str) -> PipRequirement:
    from packaging.requirements import InvalidRequirement, Requirement

    if re.match(r"[a-z+]+://", entry, re.I):
        raise ValueError("is a URL without a name; write NAME @ URL#sha256=..., or NAME @ git+https://...@COMMIT")
    try:
        found = Requirement(entry)
    except InvalidRequirement as error:
        raise ValueError(
            f"is no requirement ({str(error).splitlines()[0]}); write one such as torch==2.13.0"
        ) from error
    if found.url is not None:
        _check_url(found.url)
    return PipRequirement(text=entry)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        has_login = parts.username is not None or parts.password is not None
    except ValueError as error:
        raise ValueError(f"has a URL that cannot be read: {error}") from error
    if has_login:
        raise ValueError("has a login in its URL, which would be kept; give it to the worker's netrc or pip.conf")
    if parts.scheme in ("http", "https"):
        if not _SHA256.search(parts.fragment):
            raise ValueError("is a URL whose content may change; add #sha256=..., the digest of the file")
    elif parts.scheme in ("git+http", "git+https"):
        if not _COMMIT.search(parts.path):
            raise ValueError("names a branch or tag, which may move; write @ and the 40 digits of the commit")
    else:
        raise ValueError(f"has a URL of scheme {parts.scheme!r}; use https: with a digest, or git+https: with a commit")
