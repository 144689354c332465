"""Archives of models: what `gpuflow models export` writes and `gpuflow models import` reads.

An archive holds one folder: `index.json` (which models, and the SHA-256 of every file), `models/` and `datasets/` with
entries of our own cache, `hub/` with entries of the Hugging Face cache in its own layout. Nothing of an archive comes
into a cache before all of it was checked. It knows no library of the executors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpuflow.artifacts.archive import Packed, pack, unpack
from gpuflow.artifacts.extraction import Limits
from gpuflow.cli.models_child import progress
from gpuflow.cli.models_index import INDEX, Index, checked, sha256_of
from gpuflow.errors import ArtifactError

_FOLDER: Final = "gpuflow-models"
_LIMITS: Final = Limits(max_bytes=16 * 1024**4, max_members=500_000)
#: A link to a file of the cache is made instead of a copy, where the disk can.
_NO_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EMLINK})


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A model that is in the cache now; `new` says that it was not before."""

    name: str
    path: Path
    new: bool


def write(entries: Sequence[Mapping[str, Any]], target: Path, cache_dir: Path) -> Packed:
    """Write the archive of `entries`, as the child describes them; it appears by rename.

    Raises ArtifactError, OSError.
    """
    with _staging(cache_dir) as work:
        folder = work / _FOLDER
        folder.mkdir()
        index: dict[str, Any] = {"format": 1, "models": [], "files": {}, "links": {}}
        total = sum(Path(source).stat().st_size for entry in entries for _, source in entry["files"])
        done = 0
        with progress("checking") as tell:
            for entry in entries:
                _stage(entry, folder)
                index["models"].append({key: entry[key] for key in ("name", "kind", "entry", "revision")})
                for place, _ in entry["files"]:
                    index["files"][place] = sha256_of(folder / place)
                    done += (folder / place).stat().st_size
                    tell(done, total)
                for place, commit in _refs(entry):
                    (folder / place).parent.mkdir(parents=True, exist_ok=True)
                    (folder / place).write_text(commit, "ascii")
                    index["files"][place] = sha256_of(folder / place)
                index["links"].update(dict(entry["links"]))
        (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", "utf-8")
        return pack(folder, target)


def _stage(entry: Mapping[str, Any], folder: Path) -> None:
    for place, source in entry["files"]:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / place).exists():  # two revisions of a model share files
            _link_or_copy(Path(source), folder / place)
    for place, to in entry["links"]:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / place).is_symlink():
            (folder / place).symlink_to(to)


def _refs(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for ref in entry.get("refs", ()):
        yield f"hub/{entry['entry']}/refs/{ref}", entry["revision"]


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise ArtifactError(f"{source} was removed from the cache meanwhile; pull the model and export again") from None
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(source, target)


def read(archive: Path, cache_dir: Path, *, known: Mapping[str, Path], hub: Path | None) -> list[Imported]:
    """Bring the models of an untrusted archive into the caches, and return them.

    `known` gives the entries that this version prepares (`models/<entry>`) and their paths, `hub` the folder of the
    hub's cache. What is there already stays as it is. Raises ArtifactError, before anything is in a cache, for an
    archive that is damaged, holds what no export writes, or belongs to another version; OSError from the disk.
    """
    with _staging(cache_dir) as work:
        unpack(archive, work / "unpacked", limits=_LIMITS)
        folder = work / "unpacked" / _FOLDER
        with progress("checking") as tell:
            index = checked(folder, archive.name, known=known, hub=hub, tell=tell)
        return [imported for entry in index.models for imported in [_place(entry, folder, index, known, hub)]]


def _place(entry: Any, folder: Path, index: Index, known: Mapping[str, Path], hub: Path | None) -> Imported:
    if entry.kind != "hub":
        target = known[f"{entry.kind}/{entry.entry}"]
        return Imported(name=entry.name, path=target, new=_move(folder / entry.kind / entry.entry, target))
    assert hub is not None  # noqa: S101  (checked with the index)
    prefix = f"hub/{entry.entry}/"
    target, snapshot = hub / entry.entry, hub / entry.entry / "snapshots" / entry.revision
    if _move(folder / "hub" / entry.entry, target):
        return Imported(name=entry.name, path=snapshot, new=True)
    # Another revision is here, or this one in part: first the files, then the names that lead to them.
    names = [name.removeprefix(prefix) for name in (*index.files, *index.links) if name.startswith(prefix)]
    new = False
    for part in ("blobs/", f"snapshots/{entry.revision}/"):
        for name in names:
            if name.startswith(part):
                new |= _move(folder / prefix / name, target / name)
    for name in names:
        ref = folder / prefix / name
        if name.startswith("refs/") and ref.is_file() and ref.read_text("ascii") == entry.revision:
            fresh = target / f".{name.replace('/', '-')}.new"
            fresh.write_text(entry.revision, "ascii")
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            fresh.replace(target / name)
    return Imported(name=entry.name, path=snapshot, new=new)


def _move(source: Path, target: Path) -> bool:
    """Put a file or folder where it belongs, by rename; say False, and change nothing, where something is there."""
    if target.exists() or target.is_symlink() or not (source.exists() or source.is_symlink()):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
        return True
    except OSError as error:
        if target.exists():
            return False
        if error.errno != errno.EXDEV:
            raise
    with _staging(target.parent) as work:
        copy = work / target.name
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, copy, symlinks=True)
        else:
            shutil.copyfile(source, copy, follow_symlinks=False)
        copy.rename(target)
    return True


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Give an empty folder on the disk of `folder`; removed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
