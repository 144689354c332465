"""`/api/admin/audit`, and how wrong tokens come into the audit log: counted, one entry for all of some seconds."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError

from gpuflow.audit.entries import ID, record
from gpuflow.audit.reading import AuditLog, Filter
from gpuflow.celery_app import GPUFlow
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.documents import answers
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.shapes import AuditPage
from gpuflow.gateway.tasks import Cursor, Limit
from gpuflow.gateway.wrong_tokens import OTHERS, WrongTokens
from gpuflow.logs import get_logger

log = get_logger("gpuflow.gateway")

#: One entry of the audit log tells of the wrong tokens of so many seconds.
_NOTE_SECONDS: Final = 10.0

Glob = Annotated[str, Query(max_length=200, description="A name, or a glob such as `task.*`")]


def audit_router(calls: Calls, gatekeeper: Gatekeeper) -> APIRouter:
    """Return the routes of the audit log."""
    router = APIRouter(prefix="/api/admin", dependencies=[Depends(gatekeeper)], tags=["admin"])

    @router.get("/audit", response_model=AuditPage, summary="List the audit log", responses=answers())
    async def audit(
        limit: Limit = 50,
        cursor: Cursor = None,
        actor: Glob = "",
        action: Glob = "",
        target: Glob = "",
        since: Annotated[float, Query(ge=0, le=1e11, description="Only from this time on, Unix seconds")] = 0.0,
    ) -> JSONResponse:
        """List what was done to the fleet, the newest first. A page with filters may hold fewer than `limit`."""
        if cursor is not None and not ID.fullmatch(cursor):
            raise Problem(400, "bad-cursor", "the cursor is none of this list; take it from `next` of an answer")
        wanted = Filter(actor=actor, action=action, target=target, since=since)

        def listed(app: GPUFlow) -> dict[str, Any]:
            found, after = AuditLog(app.redis, app.keys).newest(wanted, limit, cursor or "")
            return {"entries": [entry.public() for entry in found], "next": after or None}

        return JSONResponse(await calls.run(listed))

    return router


async def note_wrong_tokens(wrong: WrongTokens, calls: Calls) -> None:
    """Write the counts of wrong tokens into the audit log until cancelled, and then what is left."""
    try:
        while True:
            await asyncio.sleep(_NOTE_SECONDS)
            await _note(wrong, calls)
    finally:
        await _note(wrong, calls)


async def _note(wrong: WrongTokens, calls: Calls) -> None:
    counts = wrong.take_unaudited()
    if not counts:
        return
    addresses = ", ".join(f"{address}: {times}" for address, times in counts.items() if address != OTHERS)
    details = {"times": sum(counts.values()), "addresses": addresses, "others": counts.get(OTHERS, 0)}

    def write(app: GPUFlow) -> None:
        record(app.redis, app.keys, "gateway.wrong_token", "gateway", details, actor="gateway:unknown")

    try:
        await calls.run(write)
    except (Problem, RedisError) as error:
        wrong.put_back(counts)
        log.warning("wrong_tokens_not_noted", cause=str(error))
    except Exception:  # the next round comes in any case
        wrong.put_back(counts)
        log.exception("wrong_tokens_not_noted")
