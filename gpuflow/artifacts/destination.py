"""The fleet's store, and where a task's results go: `output.destination`, and the upload of a closed attempt.

The fleet's store (GPUFLOW_STORE_URL) is for the data of clients, for large values, and the destination of tasks that
name none. `destination_store` and `upload_attempt` are called by the supervisor, the latter between the end of the
child and COMMIT, so that what is committed can be fetched. The names in the store are `<task id>/attempt-<n>/<file>`;
the manifest comes last and says what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from gpuflow.artifacts.here import is_here
from gpuflow.artifacts.http_names import results_name
from gpuflow.artifacts.placeholders import filled, hiding, names_secret
from gpuflow.artifacts.several import several
from gpuflow.artifacts.store import Progress, Store, file_url_path, open_store, shown_url
from gpuflow.artifacts.task_access import judge_bucket, judge_own_service, may_use_token, task_hosts, task_roots
from gpuflow.errors import ArtifactError
from gpuflow.policy.roots import writable
from gpuflow.settings import Settings
from gpuflow.terminal import log_value

MANIFEST: Final = "manifest.json"
#: Field of the result of a task with a callback: the URL of its manifest in the store.
STORED_AT: Final = "manifest_url"
_BEARER: Final = "bearer "


class UploadFailed(ArtifactError):
    """The results could not be stored at the task's destination; another attempt may reach it."""


class FetchFailed(ArtifactError):
    """Data of a task could not be fetched; another attempt may reach it."""


def destination_store(
    spec: Mapping[str, Any], settings: Settings, environment: Mapping[str, str] | None = None
) -> Store | None:
    """Return the store of `output.destination`, None for none.

    Raises ArtifactError for one that cannot be used, UnresolvedReference.

    A task that names none has the store of GPUFLOW_STORE_URL; GPUFLOW_GATEWAY_URL alone does not make results travel.
    `local`: the folder `path`; `http`: a results service at `url`, or the gateway of the settings, with the bearer
    token of `headers.Authorization` or GPUFLOW_WORKER_TOKEN; `s3`: the `url` s3://bucket/prefix; `callback`: none, but
    for a URL of the fleet's own results service, as FlowMesh's templates name theirs. `environment` are the
    values of `${env:NAME}`; the address stands in every result, so it may hold no secret.
    """
    given = (spec.get("output") or {}).get("destination") or {}
    for field in ("url", "path") if given.get("type") != "callback" else ():
        if name := names_secret(spec, given.get(field)):
            raise ArtifactError(
                f"output.destination.{field} holds the secret {name}, and would be shown in every result; give it by "
                "headers.Authorization"
            )
    with hiding(spec, environment):
        return _store(filled(given, environment), settings)


def _store(given: Mapping[str, Any], settings: Settings) -> Store | None:
    if not given and settings.store_url:
        return open_fleet_store(settings.store_url, settings)
    kind = given.get("type", "local")
    if kind == "local":
        place = given.get("path")
        return None if place is None else open_store(_folder(str(place), settings), settings=settings)
    if settings.offline:
        raise ArtifactError(f"output.destination is {kind!r} and this worker is offline; use `local`")
    if kind == "callback" and not is_own_store(given.get("url"), settings):
        return None  # a notice carries the result, see `upkeep.notices`
    if kind == "http" and settings.store_url and not (given.get("url") or settings.gateway_url):
        return open_fleet_store(settings.store_url, settings)
    if kind in ("http", "callback"):
        url = given.get("url") or (settings.gateway_url and f"{settings.gateway_url}/api/v1/results")
        if not url:
            raise ArtifactError(
                "output.destination of type http names no url, and this worker knows no store: give `url`, or set "
                "GPUFLOW_STORE_URL or GPUFLOW_GATEWAY_URL on the worker"
            )
        token = bearer_token(given.get("headers"), "output.destination")
        return open_store(str(url), settings=settings, token=token, hosts=task_hosts(settings))
    url = str(given.get("url") or given.get("path") or "")
    if not url.startswith("s3://"):
        raise ArtifactError("output.destination of type s3 needs `url`: s3://bucket/prefix")
    judge_bucket(url, settings, write=True)
    return open_store(url, settings=settings)


def is_own_store(url: object, settings: Settings) -> bool:
    """Say whether a URL is that of a results service of the fleet: results go there by its protocol."""
    return isinstance(url, str) and results_name(url, settings) == ""


def stored_at(spec: Mapping[str, Any], store: Store | None, task_id: str, attempt: int) -> dict[str, str]:
    """Return what the result of a task with a callback says of its store: where its manifest is."""
    if store is None or not any(one.get("body") == "result" for one in spec.get("notify") or ()):
        return {}
    return {STORED_AT: store.url(stored_name(task_id, attempt, MANIFEST))}


def is_stored_at(url: str, settings: Settings, result: Any, task_id: str, attempt: int) -> bool:
    """Say whether a result shows that its attempt is stored at `url`, a results service of the fleet."""
    try:
        stored = open_store(url, settings=settings).url(stored_name(task_id, attempt, MANIFEST))
    except ArtifactError:
        return False
    return isinstance(result, Mapping) and result.get(STORED_AT) == stored


def fleet_store_url(settings: Settings) -> str | None:
    """Return the URL of the fleet's store: GPUFLOW_STORE_URL, else the results service of GPUFLOW_GATEWAY_URL."""
    if settings.store_url:
        return settings.store_url
    return f"{settings.gateway_url}/api/v1/results" if settings.gateway_url else None


def data_store(settings: Settings, broker_url: str) -> Store | None:
    """Return where data of clients and large values go, None when there is no such place.

    The fleet's store; without one and with a broker on this machine the results folder, which the workers here see.
    Raises ArtifactError for a store that cannot be used.
    """
    url = fleet_store_url(settings)
    if url is None:
        return open_store(settings.results_dir.as_uri(), settings=settings) if is_here(broker_url) else None
    return open_fleet_store(url, settings)


def open_fleet_store(url: str, settings: Settings) -> Store:
    """Return the fleet's store. Raises ArtifactError."""
    if settings.offline and urlsplit(url).scheme != "file":
        raise ArtifactError(f"{shown_url(url)} is not used: this machine is offline; let GPUFLOW_STORE_URL be a folder")
    return open_store(url, settings=settings)  # it sends the worker's token to our own services


def store_token(url: str, settings: Settings) -> str | None:
    """Return the token for a URL of the fleet's results services (http), None for any other.

    Reading for a task, for files that this task gets alone. Raises NotAllowed.
    """
    judge_own_service(url, settings)
    token = settings.worker_token
    return token.get_secret_value() if token and may_use_token(url, settings) else None


def stored_name(task_id: str, attempt: int, name: str) -> str:
    """Return the name in a store of one file of an attempt."""
    return f"{task_id}/attempt-{attempt}/{name}"


def is_at(store: Store, name: str, path: Path) -> bool:
    """Say whether what is `name` in a store is `path` itself: its folder is the results folder of this machine."""
    url = store.url(name)
    return url.startswith("file:") and file_url_path(url).resolve() == path.resolve()


def upload_attempt(
    store: Store,
    folder: Path,
    task_id: str,
    attempt: int,
    names: Iterable[str],
    digests: Mapping[str, str] | None = None,
) -> None:
    """Store the files of a closed attempt, a few at once, and last, when all are there, the manifest.

    No task may exchange files of the folder: `artifacts.held_files` makes one of the attempt. `digests` are the SHA-256
    that the files have to have, in hex.
    Raises UploadFailed.
    """

    def put(name: str, progress: Progress | None = None) -> None:
        stored = store.put(folder / name, stored_name(task_id, attempt, name), progress=progress)
        if stored.sha256 != (digests or {}).get(name, stored.sha256):
            raise ArtifactError(f"{log_value(name)} was written to after the results were sealed; end all processes")

    try:
        several(put, [name for name in names if name != MANIFEST])
        put(MANIFEST)
    except ArtifactError as error:
        raise UploadFailed(str(error)) from error


def _folder(place: str, settings: Settings) -> str:
    if not Path(place).expanduser().is_absolute():
        raise ArtifactError(f"output.destination.path {place!r} is not absolute; give a folder such as /shared/results")
    return writable(place, task_roots(settings), field="output.destination.path").as_uri()


def bearer_token(headers: Mapping[str, str] | None, where: str) -> str | None:
    """Return the bearer token of the headers of `where`, None for none. Raises ArtifactError for any other header."""
    token = None
    for name, value in (headers or {}).items():
        if name.lower() != "authorization" or not value.lower().startswith(_BEARER):
            raise ArtifactError(f"{where}.headers.{name} is not sent: give `Authorization: Bearer ...` alone")
        token = value[len(_BEARER) :].strip()
    return token
