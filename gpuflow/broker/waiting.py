"""Waits for a broker that is away, as every command does before it begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gpuflow.broker.answers import Meaning, meaning_of
from gpuflow.errors import BrokerUnavailable

#: Between two tries to reach a broker that is away.
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 2.0


def until_reached(ping: Callable[[], object], seconds: float, note: Callable[[str], object]) -> None:
    """Call `ping` until it raises no BrokerUnavailable; what is waited for, and how long, is told by `note`.

    Raises BrokerUnavailable after `seconds` (0: at once), and at once where waiting does not help: a wrong password.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while True:
        try:
            ping()
            return
        except BrokerUnavailable as error:
            left = deadline - time.monotonic()
            cause = error.__cause__
            if left <= 0 or cause is None or meaning_of(cause) is Meaning.DENIED:
                raise
            if pause == _FIRST_PAUSE_SECONDS:
                note(
                    f"the broker does not answer ({cause}); waiting {seconds:g} s for it, Ctrl-C ends that; "
                    "GPUFLOW_SUBMIT_TIMEOUT_SEC=0 does not wait"
                )
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
