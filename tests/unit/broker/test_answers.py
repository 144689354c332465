"""One table says what each error of the server means."""

from __future__ import annotations

import pytest
import redis
from kombu.exceptions import OperationalError
from redis import exceptions as errors

from gpuflow.broker.answers import Meaning, meaning_of, nobody_writes, passes


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (errors.ConnectionError("reset"), Meaning.AGAIN),
        (errors.TimeoutError("no answer"), Meaning.AGAIN),
        (errors.BusyLoadingError("loading the dataset in memory"), Meaning.AGAIN),
        (errors.InvalidResponse("Protocol Error: b'x'"), Meaning.AGAIN),
        (errors.NoScriptError("No matching script"), Meaning.AGAIN),
        (errors.TryAgainError("later"), Meaning.AGAIN),
        (OSError(104, "reset"), Meaning.AGAIN),
        (OperationalError("no route"), Meaning.AGAIN),
        (caused(OperationalError("x"), errors.ResponseError("MISCONF no disk")), Meaning.WAIT),
        (errors.OutOfMemoryError("command not allowed"), Meaning.WAIT),
        (errors.ReadOnlyError("You can't write against a read only replica."), Meaning.WAIT),
        (errors.MasterDownError("Link with MASTER is down"), Meaning.WAIT),
        (errors.ClusterDownError("The cluster is down"), Meaning.WAIT),
        (errors.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), Meaning.WAIT),
        (errors.ResponseError("BUSY Valkey is busy running a script."), Meaning.WAIT),
        (errors.ResponseError("NOREPLICAS Not enough good replicas to write."), Meaning.WAIT),
        (errors.ResponseError("Command # 1 (SET a 1) of pipeline caused error: NOREPLICAS Not enough"), Meaning.WAIT),
        (
            errors.ResponseError(
                "Error running script (call to f_12ab): @user_script:7: @user_script: 7: -MISCONF Errors writing"
            ),
            Meaning.WAIT,
        ),
        (errors.ResponseError("Error running script (call to f_1): @user_script:1: -OOM command not"), Meaning.WAIT),
        (errors.NoPermissionError("User default has no permissions"), Meaning.DENIED),
        (errors.AuthenticationError("invalid username-password pair"), Meaning.DENIED),
        (errors.ResponseError("NOAUTH Authentication required."), Meaning.DENIED),
        (errors.ResponseError("WRONGTYPE Operation against a key"), Meaning.GIVE_UP),
        (errors.ResponseError("ERR user_script:1: attempt to index a nil value"), Meaning.GIVE_UP),
        (errors.DataError("invalid input"), Meaning.GIVE_UP),
        (ValueError("MISCONF "), Meaning.GIVE_UP),
    ],
)
def test_what_an_error_means(error: Exception, meaning: Meaning) -> None:
    assert meaning_of(error) is meaning
    assert passes(error) is (meaning is not Meaning.GIVE_UP)


@pytest.mark.parametrize(
    ("error", "nobody"),
    [
        (errors.ResponseError("MISCONF no disk"), True),
        (errors.ResponseError("BUSY a script"), True),
        (errors.BusyLoadingError("loading"), True),
        (errors.ResponseError("NOREPLICAS the others may have another master"), False),
        (errors.ReadOnlyError("a replica by now"), False),
        (redis.ConnectionError("reset"), False),
    ],
)
def test_when_no_lease_can_pass_to_another(error: Exception, nobody: bool) -> None:
    assert nobody_writes(error) is nobody
