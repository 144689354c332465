"""A module of a team that takes long to import in a child, and no time in its worker."""

from __future__ import annotations

import sys
import time

from gpuflow import app

if "gpuflow.functions" in sys.orig_argv:
    time.sleep(600)


@app.task(child=True)
def never() -> None:
    """Is never called."""
