"""Reads JSON into plain data with the line of every value. Used by `reading` alone."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from gpuflow.spec.report import Findings
from gpuflow.spec.tree import TooMuch, Tree

_MARK: Final = re.compile(r'[{}\[\]:,]|"(?:[^"\\]|\\.)*"|[^\s{}\[\]:,"]+|\n')
_MAX_DIGITS: Final = 400


def read_json(text: str, findings: Findings) -> Tree:
    """Return the tree of `text`; notes every mistake in `findings`. Never raises for bad input."""
    tree = Tree(findings, merge_key=None)
    try:
        json.loads(text, parse_int=lambda digits: 0, parse_float=lambda digits: 0, parse_constant=_refuse)
        _feed(tree, text)
    except TooMuch as stop:
        tree.root = None
        tree.mistake(*stop.args)
    except json.JSONDecodeError as error:
        tree.root = None
        tree.mistake((), error.lineno, f"is not valid JSON: {error.msg} (column {error.colno})")
    except RecursionError:
        tree.root = None
        tree.mistake((), 1, "nests too deep; flatten it")
    return tree


def _refuse(word: str) -> Any:
    raise TooMuch((), 1, f"{word} is not JSON; give a finite number")


def _feed(tree: Tree, text: str) -> None:
    """Walk the marks of a text that is known to be valid."""
    line = 1
    for found in _MARK.finditer(text):
        mark = found[0]
        if mark == "\n":
            line += 1
        elif mark in "{[":
            tree.open({} if mark == "{" else [], line)
        elif mark in "}]":
            tree.close()
        elif mark in ":,":
            continue
        elif tree.wants_key:
            tree.key(json.loads(mark), line)
        else:
            tree.scalar(_value(mark), line)


def _value(mark: str) -> Any:
    if mark.lstrip("-").isdigit() and len(mark) > _MAX_DIGITS:
        return 10**_MAX_DIGITS
    return json.loads(mark)
