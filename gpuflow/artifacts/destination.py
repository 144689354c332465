"""Where a task's results go besides the results folder: `output.destination`, and the upload of a closed attempt.

Called by the supervisor between the end of the child and COMMIT, so that what is committed can be fetched. The names in
the store are `<task id>/attempt-<n>/<file>`; the manifest comes last and says what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from gpuflow.artifacts.store import Store, open_store
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings

MANIFEST: Final = "manifest.json"
_BEARER: Final = "bearer "


class UploadFailed(ArtifactError):
    """The results could not be stored at the task's destination; another attempt may reach it."""


def destination_store(spec: Mapping[str, Any], settings: Settings) -> Store | None:
    """Return the store of `output.destination`, None for none. Raises ArtifactError for one that cannot be used.

    `local`: the folder `path`; `http`: a results service at `url`, or the gateway of the settings, with the bearer
    token of `headers.Authorization` or GPUFLOW_WORKER_TOKEN; `s3`: the `url` s3://bucket/prefix.
    """
    given = (spec.get("output") or {}).get("destination") or {}
    kind = given.get("type", "local")
    if kind == "local":
        place = given.get("path")
        return None if place is None else open_store(_folder(str(place)), settings=settings)
    if settings.offline:
        raise ArtifactError(f"output.destination is {kind!r} and this worker is offline; use `local`")
    if kind == "http":
        url = given.get("url") or (settings.gateway_url and f"{settings.gateway_url}/api/v1/results")
        if not url:
            raise ArtifactError("output.destination of type http needs `url`, or GPUFLOW_GATEWAY_URL on the worker")
        return open_store(str(url), settings=settings, token=_token(given.get("headers") or {}))
    url = str(given.get("url") or given.get("path") or "")
    if not url.startswith("s3://"):
        raise ArtifactError("output.destination of type s3 needs `url`: s3://bucket/prefix")
    return open_store(url, settings=settings)


def stored_name(task_id: str, attempt: int, name: str) -> str:
    """Return the name in a store of one file of an attempt."""
    return f"{task_id}/attempt-{attempt}/{name}"


def upload_attempt(store: Store, folder: Path, task_id: str, attempt: int, names: Iterable[str]) -> None:
    """Store the files of a closed attempt, the manifest last. Raises UploadFailed."""
    try:
        for name in [*(name for name in names if name != MANIFEST), MANIFEST]:
            store.put(folder / name, stored_name(task_id, attempt, name))
    except ArtifactError as error:
        raise UploadFailed(str(error)) from error


def _folder(place: str) -> str:
    path = Path(place).expanduser()
    if not path.is_absolute():
        raise ArtifactError(f"output.destination.path {place!r} is not absolute; give a folder such as /shared/results")
    return path.as_uri()


def _token(headers: Mapping[str, str]) -> str | None:
    """Return the bearer token of the headers. Raises ArtifactError for headers that a results service does not read."""
    token = None
    for name, value in headers.items():
        if name.lower() != "authorization" or not value.lower().startswith(_BEARER):
            raise ArtifactError(
                f"output.destination.headers.{name}: a results service reads `Authorization: Bearer ...` alone"
            )
        token = value[len(_BEARER) :].strip()
    return token
