"""Rows of data sets of the Hugging Face hub, and what their absence means: a token, a name, or the network.

The library `datasets` hides the answer of the hub behind errors of its own; here it is found again, so that a refusal
is not tried again and says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from executors import task_access
from executors.base import ExecutorError, bad_input
from executors.offline import not_here, offline
from gpuflow.errors import NotAllowed

_GATED: Final = frozenset({"GatedRepoError", "DisabledRepoError", "LocalTokenNotFoundError"})
_MISSING: Final = frozenset({"RepositoryNotFoundError", "RevisionNotFoundError", "DatasetNotFoundError"})
_UNREACHED: Final = frozenset({"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "TimeoutException"})
_GIVE_ACCESS: Final = (
    "name the token in the task (`secrets: [HF_TOKEN]`) and give it to the worker (GPUFLOW_SECRET_HF_TOKEN in its "
    "environment, or a file HF_TOKEN in its GPUFLOW_SECRETS_DIR)"
)


def hub_rows(data: Mapping[str, Any], split: str) -> list[Any]:
    """Return the rows of one split of a hub data set, or of a folder of this machine that the task may read.

    Raises ExecutorError: BadInput for a split or configuration that it has not, NotAuthorized, NotFound, Offline, and
    Network, which alone is worth another attempt.
    """
    import datasets

    datasets.disable_progress_bars()
    options = {key: data[key] for key in ("name", "revision") if data.get(key)}
    try:
        place = _place(str(data["url"]))
        _judge_files(datasets.load_dataset_builder(place, **options).config.data_files, place)
        return list(datasets.load_dataset(place, split=split, **options))
    except ValueError as error:
        raise bad_input(f"data set {data['url']}: {error}") from error
    except (OSError, RuntimeError) as error:
        known = _known(error, str(data["url"]))
        if known is None:
            raise
        raise known from error


def _place(url: str) -> str:
    """Return the id of a data set as it is, and the real path of what the library would open. Raises NotAllowed."""
    if url[:1] in ("/", "~", ".") or url.count("/") > 1 or Path(url).exists():
        return str(task_access.folder(url, "data.url"))
    return url


def _judge_files(data_files: Mapping[str, Iterable[str]] | None, place: str) -> None:
    """Raise NotAllowed for files beside the data set: its README.md may name any file of this machine, or any URL."""
    is_folder = Path(place).is_dir()
    for file in (str(one) for files in (data_files or {}).values() for one in files):
        address = file.rpartition("::")[2]
        if is_folder and "://" not in address:
            inside = Path(address).resolve().is_relative_to(Path(place).resolve())
        else:
            inside = not is_folder and address.startswith(f"hf://datasets/{place}@")
        if not inside:
            raise NotAllowed(
                f"data set {place!r}: its README.md names {_shown(address)}, which is none of its own files; correct "
                "data_files there, or name that file by data.path"
            )


def _shown(address: str) -> str:
    """Return a path, or a URL without what may be secret in it."""
    scheme, mark, rest = address.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}" if mark else address


def _known(error: BaseException, name: str) -> ExecutorError | None:
    """Return what the hub said, found in the causes of an error; None when it was not about the hub."""
    links = list(_links(error))
    names = {kind.__name__ for link in links for kind in type(link).__mro__}
    statuses = {status for link in links if isinstance(status := _status(link), int)}
    what = f"data set {name!r}"
    if names & _UNREACHED and not statuses and offline():
        return ExecutorError("Offline", not_here(what))
    if names & _GATED or any("is a gated dataset" in str(link) for link in links):
        mend = f"ask for access on its page with your account, then {_GIVE_ACCESS}"
        return ExecutorError("NotAuthorized", f"{what} is gated on the hub; {mend}")
    if names & _MISSING or 404 in statuses:
        return ExecutorError(
            "NotFound", f"the hub has no {what}, or hides it; check the name; if it is private, {_GIVE_ACCESS}"
        )
    if statuses & {401, 403}:
        return ExecutorError(
            "NotAuthorized", f"the hub refuses {what} (HTTP {max(statuses & {401, 403})}); {_GIVE_ACCESS}"
        )
    if names & _UNREACHED or any(status == 429 or status >= 500 for status in statuses):
        told = f"answered HTTP {max(statuses)}" if statuses else "cannot be reached"
        return ExecutorError("Network", f"{what} was not fetched: the hub {told}; try again later", retryable=True)
    return None


def _links(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and all that stands behind it, what was hidden with `from None` too."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += [link.__context__, link.__cause__]


def _status(error: BaseException) -> Any:
    return getattr(getattr(error, "response", None), "status_code", None)
