"""Keeps the model cache below a size: the entries that were used longest ago go first, and none that is in use.

Run by `models` after a pull, and by the worker's housekeeping through `python -m executors.models trim`. What goes is
decided by `evictions`, which is pure; an entry is removed under its lock, by a rename first, so that nobody sees half.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from executors.base import ExecutorError
from executors.cache import KINDS, lock_name, lock_path, unused
from executors.modeling import hub

#: What the worker is bringing here, or has just brought, is not held before its child runs: this long it is left alone.
_FETCHED_SECONDS: Final = 600.0
_BROUGHT_BY_WORKER: Final = frozenset({"checkpoints", "data", "references"})
_EVICTED: Final = ".evicted-"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of the cache: `used_at` in Unix seconds; `name` is its own, or the id of a hub model."""

    kind: str
    name: str
    path: Path
    size_bytes: int
    used_at: float
    in_use: bool = False

    @property
    def label(self) -> str:
        """The name for people and logs."""
        return f"{self.kind}/{self.name}"


def evictions(entries: Iterable[Entry], max_bytes: int, *, now: float, keep: Collection[str] = ()) -> list[Entry]:
    """Return what is to go, in order, so that the rest takes `max_bytes` at most, as far as that can be. Pure.

    Never what is in use, what `keep` names by its label, or what a worker has brought here in the last minutes.
    """
    present = list(entries)
    total = sum(entry.size_bytes for entry in present)
    going = []
    for entry in sorted(present, key=lambda one: (one.used_at, one.label)):
        if total <= max_bytes:
            break
        fresh = entry.kind in _BROUGHT_BY_WORKER and now - entry.used_at < _FETCHED_SECONDS
        if entry.in_use or fresh or entry.label in keep or not entry.size_bytes:
            continue
        going.append(entry)
        total -= entry.size_bytes
    return going


def entries(root: Path) -> list[Entry]:
    """Return the entries of the cache `root` that count; of the hub's cache only if it lies inside `root`."""
    found = [entry for kind in KINDS for entry in _entries_of(root, kind)]
    hub_folder = hub.cache_folder()
    if hub_folder is not None and hub_folder.resolve().is_relative_to(root.resolve()):
        found += _hub_entries(root)
    return found


def _entries_of(root: Path, kind: str) -> Iterator[Entry]:
    try:
        listed = list(os.scandir(root / kind))
    except (FileNotFoundError, NotADirectoryError):
        return
    for item in listed:
        if item.name.startswith(".") or item.is_symlink():
            continue
        path = Path(item.path)
        size, written = _size(path)
        used = max(_mtime(path), _mtime(lock_path(root, lock_name(path))))
        if kind in _BROUGHT_BY_WORKER:  # a file that is being fetched leaves its folder as it is
            used = max(used, written)
        yield Entry(
            kind=kind,
            name=item.name,
            path=path,
            size_bytes=size,
            used_at=used,
            in_use=_in_use(root, lock_name(path)),
        )


def _hub_entries(root: Path) -> list[Entry]:
    by_id: dict[str, list[hub.HubModel]] = {}
    for model in hub.cached(str(root)):
        by_id.setdefault(model.id, []).append(model)
    return [
        Entry(
            kind="hub",
            name=identifier,
            path=models[0].folder,
            size_bytes=_size(models[0].folder)[0],
            used_at=max(model.used_at for model in models),
            in_use=_in_use(root, hub.lock_name(identifier)),
        )
        for identifier, models in by_id.items()
    ]


def trim(
    root: Path,
    max_bytes: int,
    *,
    keep: Collection[str] = (),
    tell: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.time,
) -> list[Entry]:
    """Remove what `evictions` names, and return it; `tell` gets a line for each.

    One process at a time: a second one does nothing. Raises OSError.
    """
    if not root.is_dir():
        return []
    with unused(root, "trim") as ours:
        if not ours:
            return []
        _clear_evicted(root)
        present = entries(root)
        removed, kept = [], set(keep)
        while chosen := evictions(present, max_bytes, now=clock(), keep=kept):
            entry = chosen[0]
            if remove(root, entry):
                removed.append(entry)
                present.remove(entry)
                tell(f"removed {entry.label} ({entry.size_bytes / 1e6:.1f} MB) from the cache: it is over its limit")
            else:
                kept.add(entry.label)
        left = sum(entry.size_bytes for entry in present)
        if left > max_bytes:
            tell(
                f"the model cache takes {left / 1e6:.1f} MB, more than its limit of {max_bytes / 1e6:.1f} MB: "
                "the rest is in use or new; raise GPUFLOW_MODEL_CACHE_MAX_BYTES if that lasts"
            )
        return removed


def remove(root: Path, entry: Entry) -> bool:
    """Remove one entry unless it is in use; say whether it has gone. Raises OSError."""
    if entry.kind == "hub":
        try:
            hub.remove(entry.name, str(root))
        except ExecutorError:
            return False
        return True
    with unused(root, lock_name(entry.path)) as free:
        if not free:
            return False
        if entry.kind in _BROUGHT_BY_WORKER and _mtime(entry.path) > entry.used_at:
            return False  # a worker has just found it again
        gone = entry.path.with_name(f"{_EVICTED}{os.getpid()}-{entry.path.name}")
        try:
            entry.path.rename(gone)
        except FileNotFoundError:
            return True
    _delete(gone)
    return True


def _clear_evicted(root: Path) -> None:
    """Finish what a killed process had begun to remove."""
    for kind in KINDS:
        for path in (root / kind).glob(f"{_EVICTED}*"):
            _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _in_use(root: Path, name: str) -> bool:
    if not lock_path(root, name).exists():
        return False
    with unused(root, name) as free:
        return not free


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> tuple[int, float]:
    """Return the bytes of the files of an entry, and when the last was written; links are not followed."""
    paths = [path] if not path.is_dir() else [Path(at, name) for at, _, names in os.walk(path) for name in names]
    size, written = 0, 0.0
    for one in paths:
        try:
            found = one.lstat()
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode):
            size, written = size + found.st_size, max(written, found.st_mtime)
    return size, written
