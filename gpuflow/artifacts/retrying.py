"""How often and how patiently a transfer is tried again. Called by the stores that go over a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential, wait_random

#: Tries in a row that bring a transfer no byte further; one that gets on is tried for ever.
MAX_ATTEMPTS: Final = 6
#: Seconds before the second try; each wait after it is twice as long, up to the longest, plus up to as much by chance.
FIRST_WAIT_SECONDS: Final = 0.2
LONGEST_WAIT_SECONDS: Final = 10.0


def retrying(
    is_transient: Callable[[BaseException], bool],
    *,
    offset: Callable[[], int] = lambda: 0,
    first_wait_seconds: float = FIRST_WAIT_SECONDS,
    max_attempts: int = MAX_ATTEMPTS,
) -> Retrying:
    """Return what calls a function again while `is_transient` says so of its exception, which passes in the end.

    `offset` tells how many bytes are over: tries that get on do not count against `max_attempts`.
    """
    furthest, in_vain = offset(), 0

    def stop(_: RetryCallState) -> bool:
        nonlocal furthest, in_vain
        now = offset()
        in_vain = 1 if now > furthest else in_vain + 1
        furthest = max(furthest, now)
        return in_vain >= max_attempts

    return Retrying(
        retry=retry_if_exception(is_transient),
        stop=stop,
        wait=wait_exponential(multiplier=first_wait_seconds, max=LONGEST_WAIT_SECONDS)
        + wait_random(0, first_wait_seconds),
        reraise=True,
    )
