"""From an exception to the error record of a finish event: type, message, and whether another attempt may help.

Called by the entry points alone, once a task has failed. Libraries are known by the names of their classes, so that
nothing heavy is imported here.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any, Final

from executors.base import ExecutorError
from executors.offline import not_here, offline
from gpuflow.errors import GPUFlowError, NotAllowed

#: Longest message of an error record, in characters; the traceback in the log has the rest.
MAX_MESSAGE: Final = 2000

_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_OUT_OF_MEMORY: Final = (
    "out of memory",
    "defaultcpuallocator: can't allocate memory",
    "cublas_status_alloc_failed",
    "cannot allocate memory",
)
#: Faults of a device or of the link between devices: another process, or another GPU, may do. After any CUDA error but
#: that of memory, the process can use its GPUs no more.
_DEVICE_FAULTS: Final = (
    "uncorrectable ecc",
    "unspecified launch failure",
    "cuda driver",
    "cuda error:",
    "nccl error",
    "no cuda gpus are available",
)
_HUB_AUTH: Final = frozenset({"GatedRepoError", "DisabledRepoError", "LocalTokenNotFoundError"})
_HUB_MISSING: Final = frozenset({"RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError"})
_OFFLINE: Final = frozenset({"OfflineModeIsEnabled", "LocalEntryNotFoundError"})
_NETWORK: Final = frozenset(
    {
        "ConnectError", "ConnectTimeout", "ReadTimeout", "ReadError", "RemoteProtocolError", "TransportError",
        "NetworkError", "ProxyError", "URLError", "IncompleteRead", "ChunkedEncodingError", "OfflineModeIsEnabled",
        "LocalEntryNotFoundError", "SSLError", "ProtocolError", "MaxRetryError", "NewConnectionError",
    }
)  # fmt: skip
#: A file that a model may have or not: its absence is no answer about the model.
_OPTIONAL_FILE: Final = "RemoteEntryNotFoundError"
#: What transformers says of a repository that is not there, in a process (of vLLM's) whose causes are lost.
_NO_MODEL: Final = "is not a valid model identifier listed on"
_MENDS: Final = {
    "NotAuthorized": (
        "; name the token in the task (`secrets: [HF_TOKEN]`) and give it to the worker (GPUFLOW_SECRET_HF_TOKEN "
        "in its environment, or a file HF_TOKEN in its GPUFLOW_SECRETS_DIR); for a gated model, accept its "
        "terms with that account first"
    ),
    "NotFound": "; check the name; a private one also needs a token (`secrets: [HF_TOKEN]`) on the worker",
}


def classify(error: BaseException) -> dict[str, Any]:
    """Return `{type, message, retryable}` of a failure; causes are looked at too, the nearest first."""
    for link in causes(error):
        known = _known(link, first=link is error)
        if known is not None:
            kind, retryable = _answered(error) or known if known[0] in ("Network", "Offline") else known
            return _record(kind, link if isinstance(link, ExecutorError) else error, retryable)
    return _record(type(error).__name__, error, False)


def _answered(error: BaseException) -> tuple[str, bool] | None:
    """Return what a server has said for good, behind an error that tells of a connection; None for nothing.

    A hub or a mirror that answers a bare 404 is for its library a hub that cannot be reached.
    """
    links = [link for link in causes(error) if type(link).__name__ != _OPTIONAL_FILE]
    statuses = {_http_status(link) for link in links}
    if 404 in statuses:
        return "NotFound", False
    return ("NotAuthorized", False) if statuses & {401, 403} else None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, the nearest first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _known(error: BaseException, *, first: bool) -> tuple[str, bool] | None:
    if isinstance(error, ExecutorError):
        return error.type, error.retryable
    if isinstance(error, NotAllowed):
        return "NotAllowed", False
    if isinstance(error, GPUFlowError):
        return "BadInput", False
    if isinstance(error, ImportError) and first:  # deeper down it is a fallback that a library tried
        return "MissingDependency", False
    text = str(error).lower()
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names or any(part in text for part in _OUT_OF_MEMORY):
        return "OutOfMemory", True
    if (isinstance(error, OSError) and error.errno in _DISK_FULL) or "no space left on device" in text:
        return "DiskFull", True
    if isinstance(error, RuntimeError) and any(part in text for part in _DEVICE_FAULTS):
        return "DeviceFault", True
    return _known_remote(error, names)


def _known_remote(error: BaseException, names: set[str]) -> tuple[str, bool] | None:
    status = _http_status(error)
    if names & _OFFLINE and offline():
        return "Offline", False
    if names & _HUB_AUTH or (status in (401, 403) and not names & _HUB_MISSING):
        return "NotAuthorized", False
    if names & _HUB_MISSING or status == 404 or _NO_MODEL in str(error):
        return "NotFound", False
    if status is not None and (status == 429 or status >= 500):
        return "Network", True
    if isinstance(error, ConnectionError | TimeoutError) or names & _NETWORK:
        return "Network", True
    return None


def _http_status(error: BaseException) -> int | None:
    """The HTTP status of an error of httpx, requests, huggingface_hub or urllib."""
    response = getattr(error, "response", None)
    for place, name in ((response, "status_code"), (error, "code")):
        status = getattr(place, name, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None


def _record(kind: str, error: BaseException, retryable: bool) -> dict[str, Any]:
    message = str(error).strip() or type(error).__name__
    if isinstance(error, KeyError):
        message = f"{type(error).__name__}: {message}"
    if kind == "MissingDependency":
        message = f"{message}; install the libraries of this task type beside the worker (see `gpuflow doctor`)"
    if kind == "Offline" and not isinstance(error, ExecutorError):
        message = f"{not_here('something that this task needs')}: {message}"
    mend = _MENDS.get(kind, "") if not isinstance(error, ExecutorError) else ""
    room = MAX_MESSAGE - len(mend)
    if len(message) > room:
        message = _cut(message, room - 4) + " ..."
    return {"type": kind, "message": message + mend, "retryable": retryable}


def _cut(text: str, length: int) -> str:
    """Cut between two words where there are any: half a token would not be found by what hides tokens."""
    cut = text[:length]
    before = max(cut.rfind(" "), cut.rfind("\n"))
    return cut[:before] if before > length // 2 else cut
