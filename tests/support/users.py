"""Other users of this machine, made for a test, and how a program is started as one of them.

This machine's Python may lie in a folder that others cannot search (root's home): then the program runs in a mount
namespace of its own, in which it can be reached.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class User:
    name: str
    uid: int
    gid: int

    def owns(self, folder: Path) -> Path:
        """Make a folder of this user alone."""
        folder.mkdir(mode=0o755)
        os.chown(folder, self.uid, self.gid)
        return folder


def need_root() -> None:
    """Skip where no users can be made; fail in CI, where they can."""
    if os.geteuid() == 0:
        return
    if os.environ.get("CI") == "true":
        pytest.fail("CI runs as root, so that a test can make a second user of the machine")
    pytest.skip("only root can make a second user of this machine")


@contextlib.contextmanager
def made_user() -> Iterator[User]:
    name = f"gpuflow-{secrets.token_hex(4)}"
    subprocess.run(["useradd", "--system", "--user-group", "--home-dir", "/nonexistent", name], check=True)
    try:
        entry = pwd.getpwnam(name)
        yield User(name=name, uid=entry.pw_uid, gid=entry.pw_gid)
    finally:
        subprocess.run(["userdel", name], check=False, capture_output=True)


def _blocked(path: Path) -> Path | None:
    """Return the topmost folder above a path that others cannot search."""
    return next((one for one in reversed(path.parents) if not one.stat().st_mode & 0o001), None)


def launcher(user: User | None = None) -> list[str]:
    """Return what stands before a command, so that it can be reached by others, and runs as `user` (None: as we do)."""
    needed = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), ROOT}
    needed |= {Path(part).resolve() for part in os.environ.get("PYTHONPATH", "").split(":") if part}
    behind = {path: blocked for path in sorted(needed) if (blocked := _blocked(path)) is not None}
    lines = ["set -e", "hold=$(mktemp -d)", "mount -t tmpfs -o mode=700 none $hold"]
    for number, path in enumerate(behind):
        lines += [f"mkdir $hold/{number}", f"mount --bind '{path}' $hold/{number}"]
    lines += [f"mount -t tmpfs -o mode=755 none '{blocked}'" for blocked in sorted(set(behind.values()))]
    for number, path in enumerate(behind):
        lines += [f"mkdir -p '{path}'", f"mount --bind $hold/{number} '{path}'"]
    lines += ["umount -l $hold", "rmdir $hold"]
    become = f"setpriv --reuid {user.uid} --regid {user.gid} --clear-groups -- " if user is not None else ""
    lines.append(f'exec {become}"$@"')
    return ["unshare", "--mount", "sh", "-c", "\n".join(lines), "sh"]
