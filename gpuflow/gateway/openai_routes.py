"""`/v1` as OpenAI's clients know it: chat, completions, embeddings and models, as tasks of the fleet.

A call becomes one task, which may be merged with others and is cancelled when its client leaves. Models are those that
are served (`gpuflow serve`) and those of GPUFLOW_SERVED_MODELS (`openai_models`); others are 404. Called by HTTP alone.
"""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gpuflow.gateway.auth import Gatekeeper
from gpuflow.gateway.bodies import model_of
from gpuflow.gateway.documents import body_of_model
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.openai_errors import OpenAIRoute, error_of
from gpuflow.gateway.openai_models import Models
from gpuflow.gateway.openai_shapes import Chat, Completion, Embeddings, Sampled
from gpuflow.gateway.openai_tasks import ClientLeft, Shared, TaskCall
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.rights import Caller
from gpuflow.gateway.streams import Hub
from gpuflow.ledger.eventlog import LoggedEvent
from gpuflow.settings import Settings

_MAX_BYTES: Final = 10 << 20
_TOLD: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_CHANGED: Final = (
    "what was sent is not how the answer goes: a later attempt of task {} gave another text, or pieces of it were "
    "lost; drop it and send the call again"
)
_ERROR: Final = {
    "content": {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "object"}}}}}
}
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": text, **_ERROR}
    for status, text in {
        400: "The call cannot be read, asks for what no engine here has, or the model refused it.",
        401: "There is no token, or it is not valid.",
        403: "The token may not do this; or the gateway has no token and answers its own machine alone.",
        404: "No such model is served.",
        413: "The call is too large.",
        429: "Too much at once; come again.",
        500: "The task failed.",
        503: "The broker is away, or the gateway stops.",
    }.items()
}


def openai_router(settings: Settings, calls: Calls, hub: Callable[[], Hub], gatekeeper: Gatekeeper) -> APIRouter:
    """Return the routes of `/v1`."""
    router = APIRouter(
        prefix="/v1", dependencies=[Depends(gatekeeper)], tags=["openai"], route_class=OpenAIRoute,
        responses=_RESPONSES,
    )  # fmt: skip
    shared = Shared(calls=calls, hub=hub)
    models = Models(settings, calls)

    @router.get("/models", summary="List models")
    async def list_models(caller: Caller) -> dict[str, Any]:
        """List the models that are kept loaded (`gpuflow serve`) and those of GPUFLOW_SERVED_MODELS."""
        return {"object": "list", "data": await models.listed(caller)}

    @router.get("/models/{name:path}", summary="Show a model")
    async def show_model(name: str, caller: Caller) -> dict[str, Any]:
        """Show one model."""
        return await models.shown(name, caller)

    @router.post("/chat/completions", summary="Answer a chat", openapi_extra=body_of_model(Chat))
    async def chat(request: Request, caller: Caller) -> Response:
        """Answer a chat, whole or as a stream of `data:` lines that ends with `[DONE]`."""
        call = await model_of(request, Chat, max_bytes=_MAX_BYTES)
        return await _generated(request, shared, await models.task(call, call.spec(), caller), call, ChatForm())

    @router.post("/completions", summary="Continue texts", openapi_extra=body_of_model(Completion))
    async def completions(request: Request, caller: Caller) -> Response:
        """Continue one text or several."""
        call = await model_of(request, Completion, max_bytes=_MAX_BYTES)
        return await _generated(request, shared, await models.task(call, call.spec(), caller), call, TextForm())

    @router.post("/embeddings", summary="Make vectors of texts", openapi_extra=body_of_model(Embeddings))
    async def embeddings(request: Request, caller: Caller) -> Response:
        """Make a vector of each text; as numbers, or base64 of float32."""
        call = await model_of(request, Embeddings, max_bytes=_MAX_BYTES)
        async with TaskCall(shared, call.model, *await models.task(call, call.spec(), caller)) as task:
            try:
                async for _ in task.events(request):
                    pass
            except ClientLeft:
                return Response(status_code=499)
            result = await task.result()
        data = []
        for index, item in enumerate(result["items"]):
            vector = item["embedding"]
            if isinstance(vector, Mapping):
                raise Problem(400, "too-many-texts", "these are too many texts for one call; send fewer at once")
            told = vector if call.encoding_format == "float" else _packed(vector)
            data.append({"object": "embedding", "index": index, "embedding": told})
        used = int((result.get("usage") or {}).get("prompt_tokens", 0))
        usage = {"prompt_tokens": used, "total_tokens": used}
        return JSONResponse({"object": "list", "data": data, "model": call.model, "usage": usage})

    return router


class ChatForm:
    """How an answer of a chat is told."""

    prefix = "chatcmpl-"
    whole, piece = "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        """Return one whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def delta(self, index: int, text: str | None, reason: str | None, *, first: bool) -> dict[str, Any]:
        """Return one piece of an answer."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text is not None:
            delta["content"] = text
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


class TextForm:
    """How a continued text is told."""

    prefix = "cmpl-"
    whole = piece = "text_completion"

    def choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        """Return one whole answer."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def delta(self, index: int, text: str | None, reason: str | None, *, first: bool) -> dict[str, Any]:
        """Return one piece of an answer."""
        return {"index": index, "text": text or "", "logprobs": None, "finish_reason": reason}


class SentText:
    """What of each choice was sent already, so that no text is sent twice when an attempt begins anew."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._sent: dict[int, str] = {}
        self._seen: dict[int, str] = {}

    def new_text(self, event: LoggedEvent) -> list[tuple[int, str]]:
        """Return the new text of a choice that an event brings."""
        if event.name == "state":
            self._seen.clear()
        if event.name != "text_delta":
            return []
        index = int(event.data.get("request") or 0) * self._n + int(event.data.get("sample") or 0)
        self._seen[index] = self._seen.get(index, "") + str(event.data.get("delta") or "")
        return self.rest(index, self._seen[index])

    def rest(self, index: int, text: str) -> list[tuple[int, str]]:
        """Return what of the text of a choice was not sent yet; nothing where what was sent is another text."""
        sent = self._sent.get(index, "")
        if not text.startswith(sent) or text == sent:
            return []
        self._sent[index] = text
        return [(index, text[len(sent) :])]

    def belies(self, texts: Mapping[int, str]) -> bool:
        """Whether what was sent is of another answer than `texts`: no rest of it makes it whole."""
        return any(sent and not texts.get(index, "").startswith(sent) for index, sent in self._sent.items())


class _Stream(StreamingResponse):
    """The pieces of a call. Its task is let go of also when the client has left before the first piece."""

    def __init__(self, task: TaskCall, pieces: AsyncIterator[bytes]) -> None:
        super().__init__(pieces, media_type="text/event-stream", headers=_TOLD)
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._task.__aexit__()


async def _generated(
    request: Request,
    shared: Shared,
    asked: tuple[dict[str, Any], str],
    call: Sampled,
    form: ChatForm | TextForm,
) -> Response:
    """Answer a call; `asked` are the spec of its task and whose that is."""
    if call.stream:
        task = TaskCall(shared, call.model, *asked)
        await task.__aenter__()  # what the fleet refuses is a status, not an event of the stream
        return _Stream(task, _streamed(request, task, call, form))
    async with TaskCall(shared, call.model, *asked) as task:
        try:
            async for _ in task.events(request):
                pass
        except ClientLeft:
            return Response(status_code=499)
        result = await task.result()
    choices = [form.choice(*one) for one in _answers(result, call.n or 1)]
    head = {"id": f"{form.prefix}{task.id}", "object": form.whole, "created": int(time.time()), "model": call.model}
    return JSONResponse({**head, "choices": choices, "usage": result.get("usage")})


async def _streamed(request: Request, task: TaskCall, call: Sampled, form: ChatForm | TextForm) -> AsyncIterator[bytes]:
    head = {"id": f"{form.prefix}{task.id}", "object": form.piece, "created": int(time.time()), "model": call.model}
    with_usage = call.stream_options is not None and call.stream_options.include_usage
    sent, begun = SentText(call.n or 1), set[int]()

    def line(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _line({**head, "choices": choices, **({"usage": None} if with_usage else {}), **more})

    def pieces(new: list[tuple[int, str]]) -> list[bytes]:
        found = []
        for index, text in new:
            found.append(line([form.delta(index, text, None, first=index not in begun)]))
            begun.add(index)
        return found

    try:
        async for event in task.events(request):
            for piece in pieces(sent.new_text(event)):
                yield piece
        result = await task.result()
        answers = _answers(result, call.n or 1)
        if sent.belies({index: text for index, text, _ in answers}):
            raise Problem(500, "answer-changed", _CHANGED.format(task.id))
        for index, text, reason in answers:
            for piece in pieces(sent.rest(index, text)):
                yield piece
            yield line([form.delta(index, None, reason, first=index not in begun)])
        if with_usage:
            yield line([], usage=result.get("usage"))
        yield b"data: [DONE]\n\n"
    except Problem as problem:
        yield _line(error_of(problem))
    except ClientLeft:
        return


def _answers(result: Mapping[str, Any], n: int) -> list[tuple[int, str, str]]:
    found = []
    for place, item in enumerate(result["items"]):
        texts = item.get("outputs") or [item["output"]]
        reasons = item.get("finish_reasons") or [item.get("finish_reason")] * len(texts)
        for sample, (text, reason) in enumerate(zip(texts, reasons, strict=False)):
            found.append((place * n + sample, str(text), str(reason or "stop")))
    return found


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


def _line(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
