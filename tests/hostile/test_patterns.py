"""Every regular expression of the package takes time in proportion to the text, whatever the text is."""

from __future__ import annotations

import ast
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

#: Where the package that is tested lies, and beside it what children and workers run.
ROOT = Path(gpuflow.__path__[0]).parent
READ_ONLY = sorted(path for folder in ("executors", "tasks") for path in (ROOT / folder).rglob("*.py"))
SMALL, LARGE = 2 << 10, 16 << 10
#: A linear one takes 8 times as long, a quadratic one 64 times.
MOST_TIMES = 28
ONE_SHOT = tuple(f"re.{name}" for name in ("match", "fullmatch", "search", "sub", "split", "findall"))
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
            found |= written(source_of(info.name), info.name)
            continue
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                found[f"{info.name}.{name}"] = value
    for path in READ_ONLY:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found |= written(path.read_text("utf-8"), name)
    return found


def written(source: str, module: str) -> dict[str, re.Pattern[Any]]:
    """Return the expressions that stand in the text of a module, which is not imported."""
    found: dict[str, re.Pattern[Any]] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Call):
            call = statement.value
            if ast.unparse(call.func) == "re.compile":
                target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
                flags = [eval(ast.unparse(flag), {"re": re}) for flag in call.args[1:]]
                found[f"{module}.{ast.unparse(target)}"] = re.compile(ast.literal_eval(call.args[0]), *flags)
    return found


def source_of(module: str) -> str:
    place = ROOT.joinpath(*module.split("."))
    return (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text("utf-8")


def is_searched(name: str) -> bool:
    """Say whether its module looks for an expression anywhere in a text, and not only at its beginning."""
    module, _, short = name.rpartition(".")
    source = source_of(module)
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


@pytest.mark.parametrize(
    "name",
    [
        "executors.programs.lines._BAR",
        "executors.sessions.core_log._ERROR",
        "executors.retrieval.chunking._WORD",
        "gpuflow.gateway.downloads._RANGE",
        "gpuflow.artifacts.repr_digest._SHA256",
    ],
)
def test_the_expressions_of_all_packages_are_found(name: str) -> None:
    assert name in patterns()


def test_none_is_missed() -> None:
    """Each `re.compile` of children and tasks stands at the top of its module, as plain text."""
    texts = {path: path.read_text("utf-8") for path in READ_ONLY}
    missed = [str(path) for path, text in texts.items() if text.count("re.compile(") != len(written(text, "x"))]

    assert missed == []


@functools.cache
def one_shots() -> list[tuple[str, str, Any]]:
    """Return the expressions that are used where they are written: place, method, expression."""
    found = []
    for path in (*sorted((ROOT / "gpuflow").rglob("*.py")), *READ_ONLY):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ONE_SHOT
                and isinstance(node.args[0], ast.Constant)
            ):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                found.append((place, ast.unparse(node.func).removeprefix("re."), node.args[0].value))
    return found


@pytest.mark.parametrize(("place", "method", "text"), one_shots(), ids=lambda value: str(value)[:60])
def test_an_expression_that_is_used_where_it_is_written_is_linear(place: str, method: str, text: Any) -> None:
    def use(given: str) -> None:
        subject: Any = given.encode("utf-8", "surrogatepass") if isinstance(text, bytes) else given
        arguments = (text[:0], subject) if method == "sub" else (subject,)
        getattr(re, method)(text, *arguments)

    assert [pieces for pieces in PIECES if not is_linear(use, pieces)] == []


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
