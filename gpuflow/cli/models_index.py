"""The index of an archive of models, and the check of what was unpacked against it. It moves nothing.

Used by `models_bundle`. Whoever wrote the archive also wrote its index: so besides the digests it is checked that every
file lies in an entry that the index names, and that every entry is one that belongs into a cache.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuflow.cli.models_child import Tell
from gpuflow.errors import ArtifactError

INDEX: Final = "index.json"
_MOST_INDEX_BYTES: Final = 256 << 20
_HUB_ENTRY: Final = re.compile(r"models--[A-Za-z0-9][\w.-]*--[A-Za-z0-9][\w.-]*")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_BLOB: Final = re.compile(r"blobs/[A-Za-z0-9]{1,128}")
_LINK: Final = re.compile(r"(?:\.\./)+(blobs/[A-Za-z0-9]{1,128})")

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^[\w./@-]+$")]


class Model(BaseModel):
    """One model or data set: what it is called, and its entry in the cache of its kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Name
    kind: Literal["models", "datasets", "hub"]
    entry: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$", max_length=255)]
    revision: str = ""


class Index(BaseModel):
    """What an archive holds: `files` with their SHA-256, `links` with where they lead."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1]
    models: Annotated[tuple[Model, ...], Field(min_length=1)]
    files: Mapping[str, _Sha256]
    links: Mapping[str, str]


def checked(folder: Path, archive: str, *, known: Mapping[str, Path], hub: Path | None, tell: Tell) -> Index:
    """Return the index of an unpacked archive whose files are all as it says. Raises ArtifactError, OSError."""
    index = _read(folder / INDEX, archive)
    for model in index.models:
        _check_entry(model, index, known, hub)
    found, links = _walk(folder)
    found.pop(INDEX, None)
    for what, here, listed in (("file", set(found), set(index.files)), ("link", set(links), set(index.links))):
        if here != listed:
            odd = sorted(here ^ listed)[0]
            raise ArtifactError(
                f"{archive} is not what its index says: the {what} {odd!r} is "
                f"{'missing' if odd in listed else 'not listed'}; export it again"
            )
    for place, to in index.links.items():
        if links[place] != to:
            raise ArtifactError(f"{archive} is not what its index says: {place!r} leads elsewhere; export it again")
    for place in (*index.files, *index.links):
        if not any(_belongs(place, model, index) for model in index.models):
            raise ArtifactError(f"{archive} holds {place[:200]!r}, which belongs to none of its models; it is refused")
    total, done = sum(found.values()), 0
    for place, sha256 in index.files.items():
        if sha256_of(folder / place) != sha256:
            raise ArtifactError(
                f"{archive} is damaged: {place!r} is not the file that was exported; copy or export it again"
            )
        done += found[place]
        tell(done, total)
    _check_refs(folder, index)
    return index


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(path: Path, archive: str) -> Index:
    try:
        if path.stat().st_size > _MOST_INDEX_BYTES:
            raise ArtifactError(f"{archive} has an index that is too large; it is refused")
        return Index.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(f"{archive} has no index; give an archive that `gpuflow models export` wrote") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:100]
        raise ArtifactError(
            f"{archive} has an index that this version cannot read ({where}: {first['msg']}); export it again"
        ) from None


def _check_entry(model: Model, index: Index, known: Mapping[str, Path], hub: Path | None) -> None:
    place = f"{model.kind}/{model.entry}"
    if not any(name == place or name.startswith(f"{place}/") for name in index.files):
        raise ArtifactError(f"the archive holds no file of {model.name}; export it again")
    if model.kind != "hub":
        if place not in known:
            raise ArtifactError(
                f"{model.name} in the archive was prepared by another version of gpuflow; export it with this one"
            )
        return
    if not _HUB_ENTRY.fullmatch(model.entry) or not _COMMIT.fullmatch(model.revision):
        raise ArtifactError(f"{model.name} in the archive is no model of the hub: {model.entry[:100]!r}; it is refused")
    if hub is None:
        raise ArtifactError(
            f"{model.name} is a model of the hub, and its library is not here; pip install 'gpuflow[inference]'"
        )


def _check_refs(folder: Path, index: Index) -> None:
    """Raise ArtifactError for a branch or tag that leads to another revision than one of the archive."""
    for place in index.files:
        kind, entry, *inside = place.split("/")
        if kind == "hub" and inside[:1] == ["refs"]:
            revisions = {model.revision for model in index.models if (model.kind, model.entry) == (kind, entry)}
            if (folder / place).stat().st_size != 40 or (folder / place).read_text("latin-1") not in revisions:
                raise ArtifactError(f"the archive holds {place[:200]!r}, which names no revision of it; it is refused")


def _belongs(place: str, model: Model, index: Index) -> bool:
    """Say whether a file or link is one that `model` may have there."""
    base = f"{model.kind}/{model.entry}"
    if model.kind == "datasets":
        return place == base and place in index.files
    if not place.startswith(f"{base}/"):
        return False
    inside = place.removeprefix(f"{base}/")
    if model.kind == "models":
        return place in index.files
    if place in index.files:
        return bool(_BLOB.fullmatch(inside)) or inside.startswith(("refs/", f"snapshots/{model.revision}/"))
    lead = _LINK.fullmatch(index.links[place])
    return (
        lead is not None
        and inside.startswith(f"snapshots/{model.revision}/")
        and os.path.normpath(PurePosixPath(place).parent / index.links[place]) == f"{base}/{lead[1]}"
        and f"{base}/{lead[1]}" in index.files
    )


def _walk(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Return the files with their bytes, and the links with where they lead, by their place."""
    files: dict[str, int] = {}
    links: dict[str, str] = {}
    for at, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(at, name)
            place = path.relative_to(folder).as_posix()
            if path.is_symlink():
                links[place] = str(path.readlink())
            elif not path.is_dir():
                files[place] = path.stat().st_size
    return files, links
