"""The results folder of a caller: the files of its call in the run's folder, by hard links.

So they take no space of their own, and stay when the run's folder goes. A machine that has not run it has none of
them; the result itself stands in the record.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Final

from gpuflow.logs import get_logger

log = get_logger("gpuflow.merge")

#: Folder of an attempt that has one folder for each of several calls.
CHILDREN_FOLDER: Final = "children"
#: Folders of an attempt that are no results.
_WORKING_FOLDERS: Final = frozenset({"checkpoints", "work"})


def link_results(results_dir: Path, run_id: str, attempt: int, digest: str, caller_id: str) -> Path | None:
    """Link the files of one call into `<results_dir>/<caller>/attempt-N`; return that folder.

    None where they are not on this machine. May be done again.
    """
    source = results_dir / run_id / f"attempt-{attempt}"
    child = source / CHILDREN_FOLDER / digest
    source = child if child.is_dir() else source
    root = results_dir / caller_id
    target = root / f"attempt-{attempt}"
    if not source.is_dir() or target.is_dir():
        return target if target.is_dir() else None
    fresh = root / f".attempt-{attempt}.new-{_writer()}"
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        _link_tree(source, fresh)
        fresh.rename(target)
        for entry in sorted(target.iterdir()):
            _point(root / entry.name, Path(target.name) / entry.name)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # those mean that another thread was first
            log.warning("results_not_linked", run=run_id, caller=caller_id, cause=str(error))
        shutil.rmtree(fresh, ignore_errors=True)
        return target if target.is_dir() else None
    return target


def _writer() -> str:
    """Return a name that no other thread of this machine has now: two may complete one run at once."""
    return f"{os.getpid()}-{threading.get_ident()}"


def _link_tree(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.is_symlink() or (entry.name in _WORKING_FOLDERS or entry.name.startswith(".")):
            continue
        if entry.is_dir():
            _link_tree(entry, target / entry.name)
        else:
            os.link(entry, target / entry.name)


def _point(link: Path, target: Path) -> None:
    fresh = link.with_name(f".{link.name}.new-{_writer()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
