"""How many threads the libraries of a task use: as many as it has declared CPUs.

A library takes all cores of the machine otherwise, beside other tasks that do the same: threads that wait for each
other then spin, and a quota of CPUs stops all of them at once.
"""

from __future__ import annotations

import math
import os
from typing import Final

#: The CPUs that the task has declared, such as `1.5`; not set if it has declared none.
DECLARED: Final = "GPUFLOW_CPUS"


def declared_cores() -> int | None:
    """Return the CPUs that the task has declared, rounded up; None if it has declared none."""
    cpus = os.environ.get(DECLARED)
    return max(1, math.ceil(float(cpus))) if cpus else None


def limit_threads() -> None:
    """Set OMP_NUM_THREADS to the declared CPUs, unless it is set. To be called before torch or numpy is loaded."""
    cores = declared_cores()
    if cores is not None and not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(cores)
