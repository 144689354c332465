"""`/api/admin`: workers with tokens of their own and how they are steered, and the tokens of people.

Called by HTTP alone. Tokens are in the answer that makes them, and nowhere after it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import JSONResponse, Response

from gpuflow.celery_app import GPUFlow
from gpuflow.fleet.desired import DesiredState
from gpuflow.fleet.registry import Fleet
from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.bodies import model_of
from gpuflow.gateway.documents import answers, body_of_model
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.rights import Caller
from gpuflow.gateway.shapes import (
    AdminWorkerList,
    NewToken,
    NewUserToken,
    NewWorker,
    NewWorkerToken,
    Steered,
    UserTokenList,
)
from gpuflow.gateway.tasks import RecordId, is_id
from gpuflow.protocol import whole_text
from gpuflow.tokens.broker_users import BrokerRefuses
from gpuflow.tokens.rights import Grant, Role
from gpuflow.tokens.store import TokenRefused, TokenStore
from gpuflow.tokens.texts import Kind, is_token_id
from gpuflow.tokens.workers import Login, WorkerTokens

_ONCE: Final = {"Cache-Control": "no-store"}
TokenId = Annotated[str, Path(description="Id of a token: its part between the underscores")]


def admin_router(calls: Calls, gatekeeper: Gatekeeper) -> APIRouter:
    """Return the routes of administrators."""
    router = APIRouter(prefix="/api/admin", dependencies=[Depends(gatekeeper)], tags=["admin"])
    _add_workers(router, calls)
    _add_tokens(router, calls)
    return router


def _add_workers(router: APIRouter, calls: Calls) -> None:

    @router.get("/workers", response_model=AdminWorkerList, summary="List worker tokens", responses=answers())
    async def list_workers() -> JSONResponse:
        """List the workers that have a token of their own, with the state of each."""

        def listed(app: GPUFlow) -> list[dict[str, Any]]:
            states = {worker.id: str(worker.state) for worker in Fleet(app.redis, app.keys).workers()}
            found = TokenStore(app.redis, app.keys).all(Kind.WORKER)
            return [{**record.public(), "state": states.get(record.name, "OFFLINE")} for record in found]

        return JSONResponse({"workers": await calls.run(listed)})

    @router.post(
        "/workers",
        status_code=201,
        response_model=NewWorkerToken,
        summary="Make a worker token",
        responses=answers(409, 413, 422),
        openapi_extra=body_of_model(NewWorker),
    )
    async def create_worker(request: Request) -> JSONResponse:
        """Make a token of a worker, and its user of the broker. The answer is the only place where the token stands."""
        ask = await model_of(request, NewWorker)

        def made(app: GPUFlow) -> Login:
            return _tokens(app).create(
                ask.name, labels=ask.labels, worker_type=ask.type, queues=ask.queues, only_fleet=ask.only_fleet
            )

        return await _shown(calls, made, 201)

    @router.delete(
        "/workers/{id}", status_code=204, summary="Remove a worker token", responses=answers(404, 409),
    )  # fmt: skip
    async def delete_worker(
        id: RecordId, force: Annotated[bool, Query(description="Also where it works")] = False
    ) -> Response:
        """Remove the token of a worker that has gone, its user of the broker, and its entry."""

        def removed(app: GPUFlow) -> None:
            fleet = Fleet(app.redis, app.keys)
            name = _name_of(app, id)
            if is_id(id) and TokenStore(app.redis, app.keys).find_worker(name) is None:
                raise _no_worker(id)
            entry = fleet.find(name) if is_id(id) else None
            if entry is not None and not entry.is_gone and not force:
                detail = f"worker {name} is {entry.state}; drain it first, or add force=true"
                raise Problem(409, "worker-is-there", detail)
            _tokens(app).delete(name)
            fleet.forget(name)

        await _done(calls, removed)
        return Response(status_code=204)

    @router.post(
        "/workers/{id}/token", status_code=201, response_model=NewWorkerToken, summary="Replace a worker token",
        responses=answers(404, 409),
    )  # fmt: skip
    async def rotate_worker(id: RecordId) -> JSONResponse:
        """Give a worker another token and cut its connections now."""

        def rotated(app: GPUFlow) -> Login:
            name = _name_of(app, id)
            if not is_id(id) or TokenStore(app.redis, app.keys).find_worker(name) is None:
                raise _no_worker(id)
            return _tokens(app).rotate(name)

        return await _shown(calls, rotated, 201)

    @router.post("/workers/{id}/drain", response_model=Steered, summary="Drain a worker", responses=answers(404, 409))
    async def drain(
        id: RecordId,
        caller: Caller,
        deadline_seconds: Annotated[
            float | None, Query(ge=0, le=1e9, allow_inf_nan=False, description="When the machine goes away")
        ] = None,
    ) -> JSONResponse:
        """Let a worker finish what it runs, take nothing new, and stop."""
        return await _steered(calls, id, caller, DesiredState.DRAINING, deadline_seconds)

    @router.post("/workers/{id}/enable", response_model=Steered, summary="Enable a worker", responses=answers(404, 409))
    async def enable(id: RecordId, caller: Caller) -> JSONResponse:
        """Let a worker take work."""
        return await _steered(calls, id, caller, DesiredState.ENABLED, None)

    @router.post(
        "/workers/{id}/disable", response_model=Steered, summary="Disable a worker", responses=answers(404, 409)
    )
    async def disable(id: RecordId, caller: Caller) -> JSONResponse:
        """Let a worker take nothing new; what runs there ends as it would have."""
        return await _steered(calls, id, caller, DesiredState.DISABLED, None)


def _add_tokens(router: APIRouter, calls: Calls) -> None:
    @router.get("/tokens", response_model=UserTokenList, summary="List tokens of people", responses=answers())
    async def list_tokens() -> JSONResponse:
        """List the tokens of people, without their secrets."""
        found = await calls.run(lambda app: TokenStore(app.redis, app.keys).all(Kind.USER))
        return JSONResponse({"tokens": [record.public() for record in found]})

    @router.post(
        "/tokens",
        status_code=201,
        response_model=NewToken,
        summary="Make a token",
        responses=answers(409, 413, 422),
        openapi_extra=body_of_model(NewUserToken),
    )
    async def create_token(request: Request) -> JSONResponse:
        """Make a token of a person. The answer is the only place where it stands."""
        ask = await model_of(request, NewUserToken)
        if ask.role in ("viewer", "submitter") and (ask.owner is None) is not ask.all_owners:
            found = [{"path": "owner", "message": f"a {ask.role} has an owner, or allOwners true; give one of them"}]
            raise Problem(422, "invalid-body", "the body has mistakes; `errors` lists them", errors=found)

        def made(app: GPUFlow) -> dict[str, Any]:
            record, token = TokenStore(app.redis, app.keys).create_user_token(
                Role(ask.role), owner=ask.owner, label=ask.label, valid_seconds=ask.expires_in_seconds
            )
            return {**record.public(), "token": token.text}

        return JSONResponse(await _done(calls, made), status_code=201, headers=_ONCE)

    @router.delete("/tokens/{id}", status_code=204, summary="Revoke a token", responses=answers(404))
    async def revoke_token(id: TokenId) -> Response:
        """Revoke the token of a person: gateways refuse it within seconds, and end its streams."""

        def revoked(app: GPUFlow) -> bool:
            return is_token_id(id) and TokenStore(app.redis, app.keys).revoke_user_token(id)

        if not await _done(calls, revoked):
            raise Problem(404, "unknown", f"no token {whole_text(id[:100])!r}; GET /api/admin/tokens lists them")
        return Response(status_code=204)


def _tokens(app: GPUFlow) -> WorkerTokens:
    store = TokenStore(app.redis, app.keys)
    return WorkerTokens(app.redis, store, address=app.broker_address(), queues=[app.settings.task_topic])


async def _done(calls: Calls, change: Any) -> Any:
    """Return what a change of tokens returns. Raises Problem 409 for one that is refused."""

    def run(app: GPUFlow) -> Any:
        try:
            return change(app)
        except TokenRefused as error:
            raise Problem(409, "token-refused", whole_text(str(error))) from None
        except BrokerRefuses:
            detail = "the gateway's user of the broker may not change its users; see the reference of the HTTP API"
            raise Problem(409, "broker-refuses", detail) from None

    return await calls.run(run)


async def _shown(calls: Calls, change: Any, status: int) -> JSONResponse:
    login: Login = await _done(calls, change)
    return JSONResponse(login.public(), status_code=status, headers=_ONCE)


async def _steered(
    calls: Calls, id: str, caller: Grant, state: DesiredState, deadline_seconds: float | None
) -> JSONResponse:
    def steered(app: GPUFlow) -> str:
        fleet = Fleet(app.redis, app.keys)
        name = _name_of(app, id)
        entry = fleet.find(name) if is_id(id) else None
        if entry is None or entry.is_gone:
            raise _no_worker(id)
        answer = fleet.desire(name, state, reason=f"asked for by {caller.actor}", deadline_seconds=deadline_seconds)
        if answer == "gone":
            raise _no_worker(id)
        if answer == "draining":
            raise Problem(409, "draining", f"worker {name} is draining and will stop; start it again to change that")
        if state is DesiredState.DRAINING:
            app.control.broadcast("gpuflow_drain", arguments={"worker_id": name, "deadline_seconds": deadline_seconds})
        else:
            app.control.broadcast("gpuflow_follow", arguments={"worker_ids": [name]})
        return str(state)

    return JSONResponse({"id": id, "desired": await calls.run(steered)})


def _name_of(app: GPUFlow, id: str) -> str:
    """Return the name of a worker by the id of its token; any other text is the name itself."""
    found = TokenStore(app.redis, app.keys).find(id) if is_id(id) else None
    return found.name if found is not None and found.kind is Kind.WORKER and found.name else id


def _no_worker(id: str) -> Problem:
    return Problem(404, "unknown", f"no worker {whole_text(id[:100])!r}; GET /api/workers lists them")
