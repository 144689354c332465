"""Which build of gpuflow this is: its version with the commit, so that two builds of one version can be told apart.

A wheel has its commit in a file that `hatch_build.py` writes; a checkout is asked by its files, without git.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Final

from gpuflow import __version__

_FOLDER: Final = Path(__file__).parent
#: What the build writes beside this file.
COMMIT_FILE: Final = "_commit.txt"
#: Letters of a commit that are shown.
_SHOWN: Final = 10
_COMMIT: Final = re.compile(r"[0-9a-f]{7,64}")


@lru_cache
def full_version() -> str:
    """Return the version and the commit, such as `0.1.0+g2f85ef54a1`; the version alone where no commit is known."""
    commit = _read(_FOLDER / COMMIT_FILE) or commit_of(_FOLDER.parent)
    return f"{__version__}+g{commit[:_SHOWN]}" if _COMMIT.fullmatch(commit) else __version__


def commit_of(checkout: Path) -> str:
    """Return the commit that a git checkout, or a worktree of one, stands at; "" where it is none."""
    git = checkout / ".git"
    if git.is_file():
        git = checkout / _read(git).removeprefix("gitdir:").strip()
    head = _read(git / "HEAD")
    name = head.removeprefix("ref:").strip()
    if name == head:
        return head
    shared = git / (_read(git / "commondir") or ".")
    if commit := _read(git / name) or _read(shared / name):
        return commit
    packed = (line.split(" ") for line in _read(shared / "packed-refs").splitlines())
    return next((words[0] for words in packed if words[1:] == [name]), "")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""
