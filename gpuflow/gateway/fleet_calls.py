"""How the routes of the HTTP API reach the fleet: by a Celery app of the gateway, in a bounded number of threads.

`Calls.run` turns what goes wrong into problems (RFC 9457). Nothing is kept here but connections, so that several
gateways may serve one fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, TypeVar

from anyio import CapacityLimiter, to_thread
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from gpuflow.celery_app import GPUFlow
from gpuflow.errors import (
    ArtifactError,
    BrokerUnavailable,
    InvalidTemplate,
    NoCapableWorker,
    NotAllowed,
    UnknownTask,
)
from gpuflow.gateway.problems import Problem
from gpuflow.handles import reachable
from gpuflow.logs import get_logger
from gpuflow.outages import outage
from gpuflow.protocol import whole_text
from gpuflow.settings import Settings
from gpuflow.signatures import SignatureRefused
from gpuflow.tokens.rights import Grant
from gpuflow.tokens.store import TokenStore
from gpuflow.tokens.texts import TokenText

T = TypeVar("T")

#: So many calls go to the broker at the same time; the others wait for a thread.
THREADS: Final = 32
#: Threads that look tokens up: no request of anybody who has a token keeps another's token from being checked.
TOKEN_THREADS: Final = 4
#: Threads of calls that go through all tasks of the fleet.
SCAN_THREADS: Final = 3
#: How long a submit is tried while the broker is away, in seconds: the client is told, and comes again.
SUBMIT_SECONDS: Final = 3.0
#: Most mistakes of a template that one answer lists.
MOST_MISTAKES: Final = 100

log = get_logger("gpuflow.gateway")


class Calls:
    """Runs what blocks in threads of its own, with an app for the fleet of `settings`."""

    def __init__(self, settings: Settings) -> None:
        seconds = min(settings.submit_timeout_seconds, SUBMIT_SECONDS)
        self._settings = settings.model_copy(update={"submit_timeout_seconds": seconds})

    @cached_property
    def app(self) -> GPUFlow:
        """The Celery app; it connects when it is first used."""
        return GPUFlow("gpuflow", settings=self._settings)

    @cached_property
    def _limiter(self) -> CapacityLimiter:
        return CapacityLimiter(THREADS)

    @cached_property
    def _token_limiter(self) -> CapacityLimiter:
        return CapacityLimiter(TOKEN_THREADS)

    @cached_property
    def _scan_limiter(self) -> CapacityLimiter:
        return CapacityLimiter(SCAN_THREADS)

    async def find_token(self, token: TokenText) -> Grant | None:
        """Return what a token stands for, None for one that is unknown, void or has expired. Raises Problem 503."""
        return await self._run_in(self._token_limiter, lambda app: TokenStore(app.redis, app.keys).check(token))

    async def still_valid(self, grants: Sequence[Grant]) -> list[bool]:
        """Say of each grant whether its token is valid still. Raises Problem 503."""
        return await self._run_in(self._token_limiter, lambda app: TokenStore(app.redis, app.keys).still_valid(grants))

    async def run(self, call: Callable[[GPUFlow], T]) -> T:
        """Return what `call` returns for the app of the fleet. Raises Problem."""
        return await self._run_in(self._limiter, call)

    async def scan(self, call: Callable[[GPUFlow], T]) -> T:
        """Do as `run` does for what goes through all tasks of the fleet, a few of them at a time."""
        return await self._run_in(self._scan_limiter, call)

    async def _run_in(self, limiter: CapacityLimiter, call: Callable[[GPUFlow], T]) -> T:
        return await to_thread.run_sync(self._run, call, limiter=limiter)

    def _run(self, call: Callable[[GPUFlow], T]) -> T:
        try:
            with reachable():
                found = call(self.app)
        except BrokerUnavailable as error:
            note_outage(error.__cause__ or error)
            raise broker_away() from None
        except _KNOWN as error:
            raise problem_of(error) from None
        except (RedisError, OperationalError) as error:
            log.error("gateway.broker", error=f"{type(error).__name__}: {error}")
            raise broker_away() from None
        outage.answered()
        return found


def note_outage(error: BaseException) -> None:
    """Say once, with its cause, that the broker is away; the next call that it serves says that it is back."""
    log.warning("broker_away", cause=str(error))


#: Errors of the library that have an answer of their own.
_KNOWN: Final = (*(InvalidTemplate, NoCapableWorker, NotAllowed, UnknownTask, ArtifactError, SignatureRefused),)


def problem_of(error: Exception) -> Problem:
    """Return the answer for an error of the library."""
    if isinstance(error, InvalidTemplate):
        return invalid_template(error)
    if isinstance(error, UnknownTask):
        return Problem(404, "unknown", whole_text(str(error)))
    if isinstance(error, NoCapableWorker):
        return Problem(409, "no-capable-worker", whole_text(str(error)))
    if isinstance(error, SignatureRefused):
        return Problem(409, "not-signed", whole_text(str(error)))
    if isinstance(error, NotAllowed):  # what it names is an address that this machine knows: for its log alone
        log.error("gateway.not_allowed", error=str(error))
        setting = f" ({error.setting} of the gateway)" if error.setting else ""
        return Problem(502, "not-allowed", f"a result names what the gateway does not follow{setting}; see its log")
    if isinstance(error, ArtifactError):
        log.error("gateway.store", error=str(error))
        return Problem(503, "store-away", "the fleet's store does not take or give this; see the gateway's log", _LATER)
    return broker_away()


_LATER: Final = {"Retry-After": "1"}


def broker_away() -> Problem:
    """Return the answer while the broker cannot be used; what it said may name addresses and is left out."""
    detail = "the broker of the fleet does not answer; try again, or see `gpuflow doctor` where the gateway runs"
    return Problem(503, "broker-away", detail, _LATER)


def invalid_template(error: InvalidTemplate) -> Problem:
    """Return the answer that lists every mistake of a template."""
    found = [{"path": whole_text(one.path), "message": whole_text(one.message)} for one in error.mistakes]
    listed = found[:MOST_MISTAKES] or [{"path": "", "message": whole_text(str(error))}]
    count = len(found) or 1
    detail = f"the template has {count} mistake{'s' if count > 1 else ''}; `errors` lists them"
    if count > len(listed):
        detail += f", the first {len(listed)}"
    return Problem(422, "invalid-template", detail, errors=listed)


__all__ = ["THREADS", "Calls", "broker_away", "invalid_template", "note_outage", "problem_of"]
