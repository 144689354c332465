"""What an attempt raises that cannot be made here now, through no fault of its task: it goes back to its queue.

That counts as no failure, as if the worker had given notice.
"""

from __future__ import annotations

from typing import Any

from gpuflow.errors import GPUFlowError


class HandedBack(GPUFlowError):
    """The attempt is not made here; the message says why."""

    def record(self) -> dict[str, Any]:
        """Return the error of the attempt for its history."""
        return {"type": "HandedBack", "message": str(self), "retryable": True}
