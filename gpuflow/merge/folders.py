"""The results folder of a caller: the files of its call in the run's folder, by hard links.

So they take no space of their own, and stay when the run's folder goes. A machine that has not run it has none of
them; the result itself stands in the record.
"""

from __future__ import annotations

import errno
import shutil
import uuid
from pathlib import Path
from typing import Final

from gpuflow.artifacts.held_files import hold_tree
from gpuflow.artifacts.links import point
from gpuflow.errors import ArtifactError
from gpuflow.logs import get_logger
from gpuflow.protocol import is_safe_id

log = get_logger("gpuflow.merge")

#: Folder of an attempt that has one folder for each of several calls.
CHILDREN_FOLDER: Final = "children"
#: Folders of an attempt that are no results.
_WORKING_FOLDERS: Final = frozenset({"checkpoints", "work"})


def link_results(
    results_dir: Path, run_id: str, attempt: int, digest: str, caller_id: str, *, single: bool
) -> Path | None:
    """Link the files of one call into `<results_dir>/<caller>/attempt-N`; return that folder.

    `single`: the run had no other call. None where they are not on this machine, or cannot be linked. May be done
    again.
    """
    if not is_safe_id(caller_id):
        return None
    source = call_folder(results_dir, run_id, attempt, digest, single=single)
    root = results_dir / caller_id
    target = root / f"attempt-{attempt}"
    fresh = root / f".attempt-{attempt}.new-{uuid.uuid4().hex}"
    try:
        if target.is_dir() or not source.is_dir():
            return target if target.is_dir() else None
        # The session that answered may live on, and exchange what it has left for links.
        inside = source.relative_to(results_dir).parts
        hold_tree(results_dir, inside, fresh, leave_out=_is_no_result, links=False)
        fresh.rename(target)
        for entry in sorted(target.iterdir()):
            point(root / entry.name, Path(target.name) / entry.name)
        return target
    except (OSError, ValueError, ArtifactError) as error:
        # Some mean that another thread was first: two may complete one run at once.
        if getattr(error, "errno", None) not in (errno.EEXIST, errno.ENOTEMPTY):
            log.warning("results_not_linked", run=run_id, caller=caller_id, cause=str(error))
        shutil.rmtree(fresh, ignore_errors=True)
        return _whole(target)


def call_folder(results_dir: Path, run_id: str, attempt: int, digest: str, *, single: bool) -> Path:
    """Return the folder of one call in that of its run."""
    folder = results_dir / run_id / f"attempt-{attempt}"
    return folder if single else folder / CHILDREN_FOLDER / digest


def _whole(folder: Path) -> Path | None:
    """Return the folder if it is there: it appears by rename, whole."""
    try:
        return folder if folder.is_dir() else None
    except OSError:
        return None


def _is_no_result(name: str) -> bool:
    return name in _WORKING_FOLDERS or name.startswith(".")
