"""What each error of the server means for the step that met it: one table for all that talk to the broker.

| code or error | meaning |
|---|---|
| a cut line, a time-out, half an answer, LOADING, TRYAGAIN, NOSCRIPT, too many clients | AGAIN |
| MISCONF, BUSY, UNKILLABLE, NOREPLICAS, READONLY, OOM, MASTERDOWN, CLUSTERDOWN | WAIT |
| NOPERM, NOAUTH, WRONGPASS | DENIED |
| any other (WRONGTYPE, ERR) | GIVE_UP |

The client turns some codes into classes of errors and cuts them off the text; the others stand in it.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from kombu.exceptions import OperationalError
from redis import exceptions as errors


class Meaning(StrEnum):
    """What to do with a step that the server did not take."""

    #: Take it again soon: it may have been taken, and only its answer was lost.
    AGAIN = "again"
    #: The server refuses what it would take in another state; take it again, less often, until somebody mends that.
    WAIT = "wait"
    #: The server refuses this user. At the start of a process that is its end; later, what is held waits for a mend.
    DENIED = "denied"
    #: The step is wrong for what is stored there, and will be each time.
    GIVE_UP = "give up"


_BY_CODE: Final = {
    "MISCONF": Meaning.WAIT,
    "BUSY": Meaning.WAIT,
    "UNKILLABLE": Meaning.WAIT,
    "NOREPLICAS": Meaning.WAIT,
    "OOM": Meaning.WAIT,
    "READONLY": Meaning.WAIT,
    "MASTERDOWN": Meaning.WAIT,
    "CLUSTERDOWN": Meaning.WAIT,
    "LOADING": Meaning.AGAIN,
    "TRYAGAIN": Meaning.AGAIN,
    "NOPERM": Meaning.DENIED,
    "NOAUTH": Meaning.DENIED,
    "WRONGPASS": Meaning.DENIED,
}
#: The first that fits counts: some are kinds of others.
_BY_CLASS: Final = (
    (errors.AuthenticationError, Meaning.DENIED),
    (errors.AuthorizationError, Meaning.DENIED),
    (errors.NoPermissionError, Meaning.DENIED),
    (errors.OutOfMemoryError, Meaning.WAIT),
    (errors.ReadOnlyError, Meaning.WAIT),
    (errors.ClusterDownError, Meaning.WAIT),
    (errors.TryAgainError, Meaning.AGAIN),
    (errors.NoScriptError, Meaning.AGAIN),
    (errors.ConnectionError, Meaning.AGAIN),
    (errors.TimeoutError, Meaning.AGAIN),
    (errors.InvalidResponse, Meaning.AGAIN),
    (OperationalError, Meaning.AGAIN),
    (OSError, Meaning.AGAIN),
)
#: While the server answers so, it takes no write of anybody: no lease can pass to another worker.
_NOBODY_WRITES: Final = frozenset({"MISCONF", "BUSY", "UNKILLABLE", "LOADING"})
#: Where a code stands: at the front, behind the command of a pipeline, or (Redis before 7) of a command in a script.
_CODE: Final = re.compile(r"(?:^|caused error: |@user_script: ?\d+: )-?([A-Z]+) ")


def meaning_of(error: BaseException) -> Meaning:
    """Return what an error of the server, or of the way to it, means for the step that met it."""
    if isinstance(error, OperationalError):
        error = next((one for one in (error.__cause__, error.__context__) if isinstance(one, errors.RedisError)), error)
    code = _code_of(error)
    if code in _BY_CODE:
        return _BY_CODE[code]
    return next((meaning for kind, meaning in _BY_CLASS if isinstance(error, kind)), Meaning.GIVE_UP)


def passes(error: BaseException) -> bool:
    """Whether the same step may well be taken later."""
    return meaning_of(error) is not Meaning.GIVE_UP


def nobody_writes(error: BaseException) -> bool:
    """Whether the server takes no write of anybody now, so that no lease can pass to another worker."""
    return isinstance(error, errors.BusyLoadingError) or _code_of(error) in _NOBODY_WRITES


def still_reads(error: BaseException) -> bool:
    """Whether the server cannot write its append-only file: it refuses writes, and PING with them, and serves reads."""
    return _code_of(error) == "MISCONF"


def _code_of(error: BaseException) -> str:
    found = _CODE.findall(str(error)) if isinstance(error, errors.RedisError) else []
    return next((code for code in found if code in _BY_CODE), "")
