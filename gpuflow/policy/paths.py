"""The paths of the worker that a template can name, judged before a child starts, all references resolved.

The child judges them once more where it opens them: between the two a path may come to lead elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from gpuflow.errors import NotAllowed
from gpuflow.policy.roots import READ_SETTING, WRITE_SETTING, Roots, opened, writable

#: A longer text is no path: Linux takes none.
_LONGEST: Final = 4096


def judge_paths(spec: Mapping[str, Any], roots: Roots, filled: Callable[[str], str]) -> None:
    """Raise NotAllowed for a path of the worker that the task may not read; `filled` replaces `${env:NAME}`."""
    for field, given in _named(spec):
        _judge(field, filled(given), roots)
    for field, given in _options(spec):
        text = filled(given)
        if len(text) > _LONGEST or "\n" in text:  # a chat template, say
            continue
        if "/" in text and ".." in Path(text).parts and not text.startswith(("/", "~")) and "://" not in text:
            raise NotAllowed(
                f"{field}: {text} leads out of the folder of its attempt; give a path from / that {READ_SETTING} has",
                READ_SETTING,
            )
        _judge(field, text, roots, write=_is_written(field.rpartition(".")[2]))
    name = _at(spec, "echo", "artifact")
    if isinstance(name, str):
        if "${env:" in name:
            raise NotAllowed("echo.artifact names a file, which everybody sees, by a variable; write the name itself")
        check_file_name(name)


def _judge(field: str, text: str, roots: Roots, *, write: bool = False) -> None:
    parts = urlsplit(text) if text.startswith("file:") else None
    path = Path(unquote(parts.path) if parts else text)
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # not there: the child says so
        if not path.expanduser().is_absolute():
            return
        if write:
            writable(path, roots, field=field)
            return
        with opened(path, roots, field=field):
            pass


def _is_written(name: str) -> bool:
    """Say whether an option of a library names what it writes: download_dir, logging_dir, offload_folder, save_path."""
    return name.endswith(("_dir", "_folder")) or (name.endswith("_path") and ("save" in name or "output" in name))


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
    if _at(spec, "data", "type") == "dataset":  # the library takes a folder of this machine for a data set as well
        for place in (("data", "url"), ("data", "eval_split", "url")):
            found = _at(spec, *place)
            if isinstance(found, str) and (found[:1] in "/~." or "${" in found):
                yield ".".join(place), found


def _options(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the texts that libraries get as they are, which open what they take for a path by themselves.

    The field ends with the name of the option; entries of a list have that of the list.
    """
    waiting = [(".".join(place), _at(spec, *place)) for place in (("model", "vllm"), ("model", "transformers"))]
    waiting += [(name, spec.get(name)) for name in ("training", "lora")]
    while waiting:
        field, value = waiting.pop()
        if isinstance(value, str):
            yield field, value
        elif isinstance(value, Mapping):
            waiting.extend((f"{field}.{name}", item) for name, item in value.items())
        elif isinstance(value, list | tuple):
            waiting.extend((field, item) for item in value)


def _at(spec: Mapping[str, Any], *names: str) -> Any:
    found: Any = spec
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in plain data, without recursion: a spec may be nested deeply."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
