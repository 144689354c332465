"""A Python in which a job is handed to a pool of threads, its locks held, as long as the file HOLD_SUBMIT exists.

What stands there says so in a file beside it.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_hold = Path(os.environ["HOLD_SUBMIT"])
_adjust = ThreadPoolExecutor._adjust_thread_count


def _held(pool: ThreadPoolExecutor) -> None:
    if _hold.exists():
        _hold.with_suffix(".held").touch()
    while _hold.exists():
        time.sleep(0.01)
    _adjust(pool)


ThreadPoolExecutor._adjust_thread_count = _held
