"""Large JSON values by reference: written to a store once, loaded where they are needed.

Called by the client, the submission, the pipelines and the worker. A reference is data that anybody may have written,
so nothing is believed of it: what is loaded has the SHA-256 and the size that it names, and a file: URL must lie below
the results folder or the fleet's store.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from gpuflow.artifacts.destination import FetchFailed, fleet_store_url, store_token
from gpuflow.artifacts.marking import mark_used
from gpuflow.artifacts.reading import fetch
from gpuflow.artifacts.store import Store, TooLarge, file_url_path, shown_url
from gpuflow.errors import ArtifactError, NotAllowed
from gpuflow.policy.hosts import Hosts
from gpuflow.policy.roots import Roots, opened
from gpuflow.settings import Settings
from gpuflow.spec.artifact_reference import MAX_BYTES, ArtifactReference, is_reference, read_reference

__all__ = ["INLINE_BYTES", "References", "is_reference", "json_bytes", "make_reference", "store_value"]

#: A value whose JSON is larger than this travels by reference, in bytes.
INLINE_BYTES: Final = 1 << 20
#: First part of the names of what is uploaded.
UPLOADS: Final = "uploads"


def json_bytes(value: Any) -> bytes:
    """Return the JSON that a reference stands for."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def make_reference(value: Any, content: bytes, url: str) -> dict[str, Any]:
    """Return the reference to `value`, whose JSON `content` lies at `url`."""
    return ArtifactReference(
        url=url,
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        count=len(value) if isinstance(value, list) else None,
    ).to_dict()


def store_value(value: Any, content: bytes, name: str, store: Store) -> dict[str, Any]:
    """Store the JSON of a value, unless it is there, and return its reference. Raises ArtifactError, OSError."""
    if len(content) > MAX_BYTES:
        raise ArtifactError(
            f"{name} has {len(content) >> 20} MiB of JSON; put it into a file and name that by data.path"
        )
    digest = hashlib.sha256(content).hexdigest()
    with tempfile.TemporaryDirectory(prefix="gpuflow-value-") as folder:
        source = Path(folder, "value.json")
        source.write_bytes(content)
        stored = store.put(source, f"{UPLOADS}/{digest}/{name}.json")
    return make_reference(value, content, stored.url)


class References:
    """Loads references; each content once, kept below `cache_dir`. For one thread.

    `hosts` is what URLs may reach where no reader reads (None: everything).
    """

    def __init__(self, settings: Settings, *, hosts: Hosts | None = None) -> None:
        self._settings, self._hosts = settings, hosts
        self._loaded: dict[str, Any] = {}
        self._left = MAX_BYTES

    def load(self, value: Any) -> Any:
        """Return what a reference stands for; any other value as it is. Raises ArtifactError."""
        if not is_reference(value):
            return value
        try:
            reference = read_reference(value)
        except ValueError as error:
            raise ArtifactError(f"a reference is malformed: {error}") from None
        if reference.sha256 not in self._loaded:
            self._loaded[reference.sha256] = _decoded(self._content(reference), reference)
        found = self._loaded[reference.sha256]
        if reference.slice is None:
            return found
        if not isinstance(found, list):
            raise ArtifactError(f"{shown_url(reference.url)} holds no list, so there is no part of it; store it again")
        return found[slice(*reference.slice)]

    def fields(self, value: Any) -> Any:
        """Return a result with those of its fields loaded that are references. Raises ArtifactError."""
        if not isinstance(value, Mapping) or not any(is_reference(item) for item in value.values()):
            return value
        return {key: self.load(item) for key, item in value.items()}

    def everywhere(self, value: Any, put_in: Callable[[Any], Any] = lambda found: found) -> Any:
        """Return data with every reference in it replaced by `put_in` of what it stands for.

        What is loaded is not searched again. Raises ArtifactError.
        """
        if is_reference(value):
            found = self.load(value)
            self._left -= read_reference(value).size  # each time: the same one may stand in many places
            if self._left < 0:
                raise ArtifactError(
                    f"references to more than {MAX_BYTES >> 30} GiB in one task; name a file by data.path"
                )
            return put_in(found)
        if isinstance(value, Mapping):
            return {key: self.everywhere(item, put_in) for key, item in value.items()}
        if isinstance(value, list):
            return [self.everywhere(item, put_in) for item in value]
        return value

    def _content(self, reference: ArtifactReference) -> bytes:
        settings, url = self._settings, reference.url
        if urlsplit(url).scheme == "file":
            return _file_content(url, _folders(settings), reference)
        if settings.offline:
            raise ArtifactError(f"{shown_url(url)} is not fetched: this machine is offline (GPUFLOW_OFFLINE)")
        target = settings.cache_dir / "references" / reference.sha256
        if target.is_file() and target.stat().st_size == reference.size:
            content = target.read_bytes()
            if hashlib.sha256(content).hexdigest() == reference.sha256:
                mark_used(target)
                return content
        target.parent.mkdir(parents=True, exist_ok=True)
        _fetch(reference, target, settings, self._hosts)
        return _checked(target.read_bytes(), reference)


def _fetch(reference: ArtifactReference, target: Path, settings: Settings, hosts: Hosts | None) -> None:
    """Fetch what a reference names, and no more than it says. Raises FetchFailed, ArtifactError."""
    url, token = reference.url, store_token(reference.url, settings)
    try:
        fetch(
            url,
            target,
            settings=settings,
            sha256=reference.sha256,
            token=token or "",
            max_bytes=reference.size,
            hosts=hosts,
        )
    except TooLarge:
        raise ArtifactError(
            f"{shown_url(url)} is larger than its reference says ({reference.size} bytes); store it again"
        ) from None
    except ArtifactError as error:
        raise FetchFailed(str(error)) from error


def _folders(settings: Settings) -> Roots:
    """Return where a file: reference may lie."""
    store = fleet_store_url(settings) or ""
    return Roots(
        read=(str(settings.results_dir), *([str(file_url_path(store))] if store.startswith("file:") else [])),
    )


def _file_content(url: str, folders: Roots, reference: ArtifactReference) -> bytes:
    path = file_url_path(url)
    try:
        with opened(path, folders) as found:
            if found.is_file:
                if found.place.stat().st_size != reference.size:
                    raise ArtifactError(f"{path} has another size than its reference says; store it again")
                return _checked(found.place.read_bytes(), reference)
    except NotAllowed:
        raise ArtifactError(
            f"{shown_url(url)} lies outside of RESULTS_DIR ({folders.read[0]}) and of the fleet's store, so it is "
            "not read; set GPUFLOW_STORE_URL to a store that all machines reach, the same on clients and workers"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}; give this user the right to it") from error
    raise ArtifactError(
        f"{path} is not on this machine; set GPUFLOW_STORE_URL to a store that all machines reach (a shared folder, "
        "the gateway, a bucket), the same on clients and workers"
    )


def _checked(content: bytes, reference: ArtifactReference) -> bytes:
    if len(content) != reference.size or hashlib.sha256(content).hexdigest() != reference.sha256:
        raise ArtifactError(f"{shown_url(reference.url)} is not what its reference says (SHA-256); store it again")
    return content


def _decoded(content: bytes, reference: ArtifactReference) -> Any:
    try:
        return json.loads(content.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{shown_url(reference.url)} holds no JSON: {error}; store it again") from None
