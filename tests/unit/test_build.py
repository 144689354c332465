"""Which commit a build says that it is of."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpuflow import __version__, build

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_checkout_its_worktrees_and_packed_names_are_read(tmp_path: Path) -> None:
    main, beside = tmp_path / "main", tmp_path / "beside"
    main.mkdir()
    git(main, "init", "-q", "-b", "trunk")
    git(main, "commit", "-q", "--allow-empty", "-m", "one")
    git(main, "worktree", "add", "-q", str(beside))
    git(beside, "commit", "-q", "--allow-empty", "-m", "two")
    heads = [git(folder, "rev-parse", "HEAD") for folder in (main, beside)]
    assert [build.commit_of(main), build.commit_of(beside)] == heads and heads[0] != heads[1]
    git(main, "pack-refs", "--all")
    assert [build.commit_of(main), build.commit_of(beside)] == heads
    git(main, "checkout", "-q", "--detach")
    assert build.commit_of(main) == heads[0]
    assert build.commit_of(tmp_path) == ""


@pytest.mark.parametrize(
    ("written", "shown"),
    [(f"{COMMIT}\n", f"{__version__}+g0123456789"), ("no commit", __version__), (None, __version__)],
)
def test_the_version_has_the_commit_that_the_build_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None, shown: str
) -> None:
    folder = tmp_path / "site" / "gpuflow"
    folder.mkdir(parents=True)
    if written is not None:
        (folder / build.COMMIT_FILE).write_text(written)
    monkeypatch.setattr(build, "_FOLDER", folder)
    assert build.full_version.__wrapped__() == shown


def test_this_version_is_one_of_a_python_package() -> None:
    assert re.fullmatch(r"\d+(\.\d+)*(\+g[0-9a-f]{7,10})?", build.full_version())
