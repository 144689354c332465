"""Removes what transfers that broke off have left: unfinished files of stores, and downloads in the cache.

Called by the worker's housekeeping and by the gateway. A part that a transfer goes on with is locked, and younger than
a day; only what is neither goes, by its name alone, and no link is followed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpuflow.artifacts.store import RESERVED_PREFIX
from gpuflow.filelocks import try_lock
from gpuflow.logs import get_logger
from gpuflow.upkeep.turns import turn

log = get_logger("gpuflow.retention")

#: Nobody goes on with a transfer that broke off so long ago, in seconds.
STALE_SECONDS: Final = 86_400.0
_PART: Final = re.compile(rf"{re.escape(RESERVED_PREFIX)}[0-9a-f]{{16}}-[0-9a-f]{{16}}\.part")
_LOCK: Final = f"{RESERVED_PREFIX}parts-cleaning"
#: Folders of the cache that are filled by transfers; the models have a staging of their own.
_CACHED: Final = ("data", "references")
_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)


def clean_store(root: Path, *, every_seconds: float = 0, now: float | None = None) -> list[Path]:
    """Remove the stale parts of a store's folder, and return them; several processes that share it take turns.

    `now` in Unix seconds. Raises OSError.
    """
    now = time.time() if now is None else now
    if not root.is_dir():
        return []
    with turn(root / _LOCK, every_seconds, now) as ours:
        return _remove_parts(root, now) if ours else []


def clean_cache(cache_dir: Path, *, now: float | None = None) -> list[Path]:
    """Remove what broken downloads have left in a worker's cache, and return it. `now` in Unix seconds."""
    now = time.time() if now is None else now
    gone = [path for name in _CACHED for path in _remove_parts(cache_dir / name, now)]
    for place in _folders(cache_dir / "fetched"):
        gone += _clear_fetched(place, now)
    return gone


def _remove_parts(root: Path, now: float) -> list[Path]:
    return [path for path in _parts(root) if _remove_part(path, now)]


def _parts(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(RESERVED_PREFIX)]  # others keep those
        yield from (Path(folder, name) for name in names if _PART.fullmatch(name))


def _remove_part(path: Path, now: float) -> bool:
    """Remove a part that is stale and that nobody has locked; say whether it has gone."""
    with contextlib.suppress(OSError):
        if not _is_stale(path.lstat(), now):
            return False
        with io.FileIO(os.open(path, os.O_RDWR | _NO_FOLLOW), "r+") as file:
            # Between the look and the lock somebody may have gone on with it, or made another of that name.
            found = os.fstat(file.fileno())
            if try_lock(file.fileno()) and _is_stale(os.fstat(file.fileno()), now):
                if not os.path.samestat(found, path.lstat()):
                    return False
                path.unlink()
                log.info("removed", path=str(path), why="stale_part")
                return True
    return False


def _clear_fetched(place: Path, now: float) -> list[Path]:
    """Remove the files of one download, unless it is under way; its lock stays, as somebody may wait for it."""
    gone = []
    with contextlib.suppress(OSError), (place / ".lock").open("ab") as file:
        if not try_lock(file.fileno()):
            return []
        for item in sorted(place.iterdir()):
            if item.name != ".lock" and _is_stale(item.lstat(), now):
                item.unlink()
                log.info("removed", path=str(item), why="stale_download")
                gone.append(item)
    return gone


def _folders(root: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    return []


def _is_stale(found: os.stat_result, now: float) -> bool:
    return stat.S_ISREG(found.st_mode) and now - found.st_mtime > STALE_SECONDS
