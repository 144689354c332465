"""Reads one YAML document into plain data with the line of every value.

Used by `reading`, and by `presets`. Scalars follow YAML 1.2's core rules where 1.1 surprises: only true and false are
booleans (so `on:` is a key and `no` is text), dates and `1:30` stay text. Tags are refused: they would build objects.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from gpuflow.spec.report import Findings
from gpuflow.spec.tree import TooMuch, Tree
from gpuflow.spec.written import written

#: The C parser where PyYAML has it: ten times as fast, same events.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_BASED: Final = re.compile(r"[-+]?0[xo][0-9a-fA-F_]+")
_FLOAT: Final = re.compile(r"[-+]?(?:[0-9][0-9_]*)?\.[0-9_]*(?:[eE][-+]?[0-9]+)?")
_INFINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
#: Longest integer that is read; a longer one is a mistake all the same (see tree.MAX_INTEGER).
_MAX_DIGITS: Final = 400


def read_yaml(text: str, findings: Findings) -> Tree:
    """Return the tree of the one document in `text`; notes every mistake in `findings`. Never raises for bad input."""
    tree = Tree(findings)
    try:
        _feed(tree, text)
    except TooMuch as stop:
        tree.root = None
        tree.mistake(*stop.args)
    except (yaml.YAMLError, RecursionError) as error:
        tree.root = None
        line, cause = _explain(error, text)
        tree.mistake((), line, cause)
    return tree


def _feed(tree: Tree, text: str) -> None:
    documents = 0
    for event in yaml.parse(text, Loader=_LOADER):
        line = event.start_mark.line + 1 if event.start_mark else 1
        tag = getattr(event, "tag", None)
        if tag and tag not in ("!", "tag:yaml.org,2002:str"):
            raise TooMuch(tree.path, line, f"tag {_tag_text(tag)} is not allowed; write plain values")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise TooMuch((), line, "a second document begins here; one file holds one template")
        elif isinstance(event, yaml.MappingStartEvent):
            tree.open({}, line, event.anchor)
        elif isinstance(event, yaml.SequenceStartEvent):
            tree.open([], line, event.anchor)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            tree.close()
        elif isinstance(event, yaml.AliasEvent):
            tree.alias(event.anchor or "", line)
        elif isinstance(event, yaml.ScalarEvent):
            if tree.wants_key:
                tree.key(event.value, line)
            else:
                plain = event.implicit[0] and tag is None
                tree.scalar(scalar_value(event.value) if plain else event.value, line, event.anchor)


def _tag_text(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")[:60]


def scalar_value(text: str) -> Any:
    """Return the value of a plain (unquoted) scalar."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _INTEGER.fullmatch(text):
        digits = text.replace("_", "")
        return written(int(digits), text) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS
    if _BASED.fullmatch(text):
        try:
            return written(int(text.replace("_", "")[:_MAX_DIGITS], 0), text)
        except ValueError:
            return text
    if _FLOAT.fullmatch(text) and any(c.isdigit() for c in text):
        try:
            return written(float(text.replace("_", "")), text)
        except ValueError:  # its only digits are those of the exponent
            return text
    if _INFINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def _explain(error: Exception, text: str) -> tuple[int, str]:
    """Return (line, cause and mend) of a syntax error."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
        if isinstance(error, RecursionError):
            return line, "nests too deep; flatten it"
        character = getattr(error, "character", None)
        shown = f"U+{character:04X}" if isinstance(character, int) else "a character"
        return line, f"has {shown}, which YAML does not allow; remove it"
    line = mark.line + 1
    lines = text.splitlines()
    written = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())] or "'\\t'" in str(error):
        return line, "is indented by a tab, which YAML does not allow; use spaces"
    problem = getattr(error, "problem", None) or "cannot be read"
    context = getattr(error, "context", None)
    return (
        line,
        f"is not valid YAML: {problem}{f' ({context})' if context else ''}; check quotes, colons and indentation",
    )
