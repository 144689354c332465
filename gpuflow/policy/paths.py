"""The paths of the worker that a template can name, judged before a child starts, all references resolved.

The child judges them once more where it opens them: between the two a path may come to lead elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gpuflow.errors import NotAllowed
from gpuflow.policy.roots import WRITE_SETTING, Roots, opened


def judge_paths(spec: Mapping[str, Any], roots: Roots, filled: Callable[[str], str]) -> None:
    """Raise NotAllowed for a path of the worker that the task may not read; `filled` replaces `${env:NAME}`."""
    for field, given in _named(spec):
        text = filled(given)
        parts = urlsplit(text) if text.startswith("file:") else None
        path = Path(unquote(parts.path) if parts else text)
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # not there: the child says so
            if path.expanduser().is_absolute():
                with opened(path, roots, field=field):
                    pass
    name = _at(spec, "echo", "artifact")
    if isinstance(name, str):
        if "${env:" in name:
            raise NotAllowed("echo.artifact names a file, which everybody sees, by a variable; write the name itself")
        check_file_name(name)


def check_file_name(name: str) -> None:
    """Raise NotAllowed for the name of a file that would not lie in the folder of its attempt."""
    parts = Path(name).parts
    if not parts or name.startswith(("/", "~")) or ".." in parts or "\0" in name:
        raise NotAllowed(
            "echo.artifact leads out of the folder of its attempt; give a name such as out/file.bin", WRITE_SETTING
        )


def _named(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for place in (
        ("data", "path"),
        ("data", "eval_split", "path"),
        ("search", "documents", "path"),
        ("search", "documents", "eval_split", "path"),
        ("command", "path"),
        ("reward_model", "path"),
        ("echo", "until_exists"),
        ("echo", "fail", "unless_exists"),
    ):
        found = _at(spec, *place)
        if isinstance(found, str) and found:
            yield ".".join(place), found
    for place in (("model", "source", "identifier"), ("embedding", "model"), ("reward_model", "identifier")):
        found = _at(spec, *place)
        # A name of the hub is none of a folder; one that looks like a path, or is one here, is read as a path.
        if isinstance(found, str) and (found[:1] in "/~." or "${" in found):
            yield ".".join(place), found


def _at(spec: Mapping[str, Any], *names: str) -> Any:
    found: Any = spec
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
