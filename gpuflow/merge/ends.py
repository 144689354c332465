"""How the calls of a run have ended, by the record of the run. Pure.

A run's result is `{"children": {digest: result, or {"error": {...}}}}`, also where it served one call only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState

#: Field of a run's result that has the results of its calls.
CHILDREN: Final = "children"
#: Field beside it: the digest of each call's own manifest.
MANIFESTS: Final = "manifests"
#: Field of the result of a team's own task that holds what its function returned, which may be anything.
VALUE: Final = "value"
#: The error of a call for which the executor gave no result.
NO_RESULT: Final = "NoResult"


@dataclass(frozen=True, kw_only=True)
class CallEnd:
    """The end of one call. `is_alone`: it is to be answered by a run of its own, as what failed may be another call."""

    state: TaskState = TaskState.SUCCEEDED
    result: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    manifest: str = ""
    is_alone: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether it is for the retry policy to decide what follows."""
        return self.error is not None and self.state is TaskState.SUCCEEDED


def child_error(result: Any) -> Mapping[str, Any] | None:
    """Return the error of a child's result;

    A result of its own that has a field `error` is none (executors/merging.py).
    """
    error = result.get("error") if isinstance(result, Mapping) and len(result) == 1 else None
    return error if isinstance(error, Mapping) and {"type", "message"} <= set(error) else None


def call_ends(run: TaskRecord, digests: Sequence[str]) -> dict[str, CallEnd]:
    """Return the end of each call of a run that has ended.

    A run of several calls that failed as a whole fails none of them: any of them may be to blame, and each is tried
    alone.
    """
    if run.state is TaskState.SUCCEEDED:
        children = (run.result or {}).get(CHILDREN) or {}
        manifests = (run.result or {}).get(MANIFESTS) or {}
        return {digest: _of_child(children.get(digest), manifests.get(digest, "")) for digest in digests}
    error = dict(run.error or {"type": str(run.state), "message": f"the run ended {run.state}", "retryable": False})
    is_alone = len(digests) > 1 and run.state is not TaskState.CANCELLED
    return {digest: CallEnd(state=run.state, error=error, is_alone=is_alone) for digest in digests}


def is_single(run: TaskRecord) -> bool:
    """Whether a run that has succeeded served one call only."""
    return len((run.result or {}).get(CHILDREN) or {}) == 1


def _of_child(result: Any, manifest: str) -> CallEnd:
    if not isinstance(result, Mapping):
        missing = {"type": NO_RESULT, "message": "the run gave no result for this call", "retryable": True}
        return CallEnd(error=missing)
    error = child_error(result)
    if error is None:
        return CallEnd(result=result, manifest=manifest)
    return CallEnd(error={**error, "retryable": bool(error.get("retryable")) or error["type"] == NO_RESULT})
