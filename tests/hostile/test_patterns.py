"""Every regular expression of the package takes time in proportion to the text, whatever the text is."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuflow
from gpuflow import secrets
from gpuflow.artifacts.tar_headers import check_pax
from gpuflow.errors import ArtifactError

SMALL, LARGE = 2 << 10, 16 << 10
#: A linear one takes 8 times as long, a quadratic one 64 times.
MOST_TIMES = 28
#: A time below this is one of the clock, in seconds.
LEAST_SECONDS = 0.0005
#: Pieces of which a text of an attacker is made, one after the other.
PIECES = (
    ("a",),
    ("0",),
    (" ",),
    ("_",),
    ("-",),
    ("%",),
    ("(",),
    ("$",),
    ("\\",),
    ("/",),
    ("\n",),
    ("\u202e",),
    ("a.",),
    ("a_",),
    ("a-",),
    ("aB",),
    ("${",),
    ("{{",),
    ("${a",),
    ("://",),
    ("a://",),
    ("://a@",),
    ("a:",),
    ("?a=",),
    ("&key",),
    ("?token",),
    ("bearer ",),
    ("authorization",),
    ("authorization: ",),
    ("Authorization=\\", "\\"),
    ("authorization:", " "),
    ("bearer", " "),
    ("bearer ", "a"),
    ("sk-",),
    ("hf_a",),
    ("\x1b[", "0"),
    ("\x1b[", " "),
    ("\x1b]", "a"),
    ("\x1b",),
    ("\\u", "d"),
    ("1 ",),
    ("1=",),
    ("1,",),
    ("1x",),
    ("1.",),
    ("[",),
    ("<",),
    ("'",),
    ('"',),
)


@functools.cache
def patterns() -> dict[str, re.Pattern[Any]]:
    """Return the compiled expressions at the top of all modules, by module and name."""
    found = {}
    for info in pkgutil.walk_packages(gpuflow.__path__, "gpuflow."):
        if info.name.endswith("__main__") or info.name == "gpuflow.worker.shim":
            continue
        try:
            module = importlib.import_module(info.name)
        except (ImportError, ArtifactError):  # an extra that is not here
            continue
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                found[f"{info.name}.{name}"] = value
    return found


def is_searched(name: str) -> bool:
    """Say whether its module looks for an expression anywhere in a text, and not only at its beginning."""
    module, _, short = name.rpartition(".")
    source = Path(str(importlib.import_module(module).__file__)).read_text("utf-8")
    return any(f"{short}.{method}(" in source for method in ("search", "sub", "finditer", "findall", "split"))


def text_of(pieces: tuple[str, ...], size: int) -> str:
    first, rest = pieces[0], pieces[-1]
    return (first + rest * (size // len(rest)))[:size] + "\x00"


def seconds(action: Callable[[], object], tries: int) -> float:
    """Return the processor time of this thread that an action takes, the best of some tries."""
    times = []
    for _ in range(tries):
        before = time.thread_time()
        action()
        times.append(time.thread_time() - before)
    return min(times)


def is_linear(action: Callable[[str], object], pieces: tuple[str, ...]) -> bool:
    small, large = text_of(pieces, SMALL), text_of(pieces, LARGE)
    for tries in (1, 3, 9):  # a machine that stumbles once is asked again
        taken = max(seconds(lambda: action(small), tries), LEAST_SECONDS)
        if seconds(lambda: action(large), tries) < MOST_TIMES * taken:
            return True
    return False


@pytest.mark.parametrize("name", sorted(patterns()))
def test_an_expression_is_linear(name: str) -> None:
    pattern, searched = patterns()[name], is_searched(name)
    is_bytes = isinstance(pattern.pattern, bytes)

    def use(text: str) -> None:
        given: Any = text.encode("utf-8", "surrogatepass") if is_bytes else text
        pattern.match(given)
        pattern.fullmatch(given)
        if searched:
            pattern.sub(b"" if is_bytes else "", given)

    slow = [pieces for pieces in PIECES if not is_linear(use, pieces)]

    assert slow == []


@pytest.mark.parametrize(
    "use",
    [
        secrets.mask_shapes,
        lambda text: list(secrets.url_secrets(text)),
        lambda text: list(secrets.secrets_in_spec({"env": {text: text}, "headers": {text: text}, "url": text})),
        lambda text: list(secrets.written_secrets({"env": {text: text}, "headers": {text: text}, "url": text})),
        lambda text: secrets.public_spec({"notify": [{"url": text}], "env": {text: text}, text: text}),
        secrets.Redactor(["a-secret-value"]).text,
    ],
)
def test_what_hides_secrets_is_linear(use: Callable[[str], object]) -> None:
    slow = [pieces for pieces in PIECES if not is_linear(use, (pieces[0], pieces[-1]))]
    slow += [pieces for pieces in PIECES if not is_linear(lambda text: use(f"{text} ://x@"), pieces)]

    assert slow == []


def test_the_check_of_a_pax_header_is_linear() -> None:
    def use(text: str) -> None:
        content = text.encode("utf-8", "surrogatepass")
        for given in (content, b"%d a=%s\n" % (len(content), content)):
            try:
                check_pax(given)
            except ArtifactError:
                continue

    assert [pieces for pieces in PIECES if not is_linear(use, pieces)] == []
