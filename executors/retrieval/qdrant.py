"""Asks a Qdrant server for passages, by its HTTP interface (`POST /collections/{name}/points/query/batch`).

Nothing of the server's is believed: an answer is bounded in size and time and checked in form, and its messages are
repeated in part only. The API key goes into its header and nowhere else.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn
from urllib.parse import quote, urlsplit

from executors import task_access
from executors.base import ExecutorError, bad_input
from executors.retrieval.index import Hit, Passage

#: Longest answer that is read, in bytes.
MAX_ANSWER_BYTES: Final = 64 << 20
#: Longest text of a passage that is kept, in characters.
MAX_TEXT: Final = 100_000
DEFAULT_TIMEOUT_SECONDS: Final = 30
#: Questions of one request to the server.
_QUESTIONS_AT_ONCE: Final = 32
#: Fields of a payload that hold the text of a passage, the first that is there; those of usual clients.
_TEXT_FIELDS: Final = ("text", "page_content", "content", "document", "passage", "chunk", "body")
_SOURCE_FIELDS: Final = ("source", "path", "url", "file", "filename", "title")
#: Longest message of a server that an error repeats, in characters.
_MAX_MESSAGE: Final = 300
_MASK: Final = "***"


class Qdrant:
    """A collection of a server, as the section `qdrant` names it."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._url, self._place = _checked_url(str(section.get("url") or ""))
        self._collection = str(section.get("collection") or "")
        self._key = str(section.get("api_key") or "")
        if not all(" " < character < "\x7f" for character in self._key):
            raise bad_input("qdrant.api_key holds a space or another character that no header takes; correct its value")
        self._timeout = float(section.get("timeout") or DEFAULT_TIMEOUT_SECONDS)
        self._vector = section.get("vector")
        self._text_field = section.get("text_field")

    @property
    def collection(self) -> str:
        """Name of the collection."""
        return self._collection

    def search(self, vectors: Sequence[Sequence[float]], top_k: int, threshold: float | None = None) -> list[list[Hit]]:
        """Return for each vector the passages that the server finds, the best first.

        Raises ExecutorError: BadInput, NotAuthorized, BadAnswer, or Network (retryable).
        """
        found: list[list[Hit]] = []
        for start in range(0, len(vectors), _QUESTIONS_AT_ONCE):
            found += self._search(vectors[start : start + _QUESTIONS_AT_ONCE], top_k, threshold)
        return found

    def _search(self, vectors: Sequence[Sequence[float]], top_k: int, threshold: float | None) -> list[list[Hit]]:
        common: dict[str, Any] = {"limit": top_k, "with_payload": True}
        if threshold is not None:
            common["score_threshold"] = threshold
        if self._vector:
            common["using"] = self._vector
        body = {"searches": [{"query": [float(value) for value in vector], **common} for vector in vectors]}
        answer = self._post(f"/collections/{quote(self._collection, safe='')}/points/query/batch", body)
        results = answer.get("result")
        if not isinstance(results, list) or len(results) != len(vectors):
            self._bad_answer("it has not one result for each question")
        return [self._hits(result, top_k, threshold) for result in results]

    def _hits(self, result: Any, top_k: int, threshold: float | None) -> list[Hit]:
        points = result.get("points") if isinstance(result, Mapping) else None
        if not isinstance(points, list) or len(points) > top_k:
            self._bad_answer("a result is no list of points, or has more of them than were asked for")
        hits = [self._hit(point) for point in points]
        return [hit for hit in hits if threshold is None or hit.score >= threshold]

    def _hit(self, point: Any) -> Hit:
        if not isinstance(point, Mapping):
            self._bad_answer("a point is no object")
        score, name, payload = point.get("score"), point.get("id"), point.get("payload")
        if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
            self._bad_answer("a point has no score")
        if not isinstance(name, int | str) or isinstance(name, bool):
            self._bad_answer("a point has no id")
        payload = payload if isinstance(payload, Mapping) else {}
        fields = (str(self._text_field),) if self._text_field else _TEXT_FIELDS
        text = _first_text(payload, fields)
        if text is None:
            there = ", ".join(str(key)[:40] for key in list(payload)[:12]) or "none"
            raise bad_input(
                f"a point of {self._where} has no text in {' or '.join(fields)}; its fields are: {self._safe(there)}; "
                "set qdrant.text_field"
            )
        metadata = payload.get("metadata")
        about = {**(metadata if isinstance(metadata, Mapping) else {}), **payload}
        return Hit(
            passage=Passage(
                id=str(name)[:200],
                text=text[:MAX_TEXT],
                source=(_first_text(about, _SOURCE_FIELDS) or "")[:1000],
                heading=(_first_text(about, ("heading",)) or "")[:1000],
            ),
            score=float(score),
        )

    def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        import httpx

        from gpuflow.policy.connecting import client

        # Compressed answers are not asked for: their size would be known too late.
        headers = {"Accept-Encoding": "identity", **({"api-key": self._key} if self._key else {})}
        deadline = time.monotonic() + self._timeout
        try:
            with (
                client(task_access.hosts(), timeout=self._timeout, follow_redirects=False) as caller,
                caller.stream("POST", self._url + path, json=body, headers=headers) as answer,
            ):
                if answer.headers.get("content-encoding", "identity") != "identity":
                    self._bad_answer("it is compressed, which was not asked for")
                content = self._read(answer, deadline)
                status = answer.status_code
        except httpx.TimeoutException:
            self._timed_out()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ExecutorError(
                "Network",
                f"{self._place} cannot be reached: {self._safe(str(error) or type(error).__name__)}; check qdrant.url "
                "and that the server runs",
                retryable=True,
            ) from None
        return self._checked(status, content)

    def _read(self, answer: Any, deadline: float) -> bytes:
        blocks, size = [], 0
        for block in answer.iter_raw():
            size += len(block)
            if size > MAX_ANSWER_BYTES:
                self._bad_answer(f"it is longer than {MAX_ANSWER_BYTES >> 20} MiB; lower search.top_k")
            if time.monotonic() > deadline:
                self._timed_out()
            blocks.append(block)
        return b"".join(blocks)

    def _checked(self, status: int, content: bytes) -> Mapping[str, Any]:
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status == 200:
            if not isinstance(answer, Mapping):
                self._bad_answer("it is no JSON object")
            return answer
        said = self._safe(_message(answer))
        if status in (401, 403):
            raise ExecutorError(
                "NotAuthorized",
                f"{self._where} answers {status}{said}; give the key as `secrets: [QDRANT_API_KEY]` with "
                "qdrant.api_key: ${env:QDRANT_API_KEY}",
            )
        if status == 404:
            raise bad_input(f"{self._where}: there is no such collection (404{said}); check qdrant.collection")
        if status == 429 or status >= 500:
            raise ExecutorError("Network", f"{self._where} answers {status}{said}", retryable=True)
        if 300 <= status < 400:
            raise bad_input(f"{self._where} answers with a redirect ({status}); give the final address as qdrant.url")
        raise bad_input(
            f"{self._where} refuses the query ({status}{said}); check that the collection was made with the model of "
            "embedding.model, and qdrant.vector where its vectors have names"
        )

    @property
    def _where(self) -> str:
        return f"collection {self._collection[:200]!r} of {self._place}"

    def _safe(self, text: str) -> str:
        """Return what a server or library says: one line, cut, without the key."""
        text = text.replace(self._key, _MASK) if self._key else text
        return " ".join(text.split())[:_MAX_MESSAGE]

    def _timed_out(self) -> NoReturn:
        raise ExecutorError(
            "Network",
            f"{self._where} has not answered within {self._timeout:g} s; raise qdrant.timeout",
            retryable=True,
        ) from None

    def _bad_answer(self, why: str) -> NoReturn:
        raise ExecutorError("BadAnswer", f"{self._where} gives an answer that cannot be used: {why}")


def _checked_url(url: str) -> tuple[str, str]:
    """Return the URL without a slash at its end, and what may be shown of it. Raises ExecutorError: BadInput."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise bad_input("qdrant.url is no URL; give http://host:6333 or https://host:6333") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise bad_input("qdrant.url is no URL of a server; give http://host:6333 or https://host:6333")
    if parts.username or parts.password:
        raise bad_input("qdrant.url holds a user; give the key by qdrant.api_key")
    return url.rstrip("/"), f"{parts.scheme}://{host}{f':{port}' if port else ''}"


def _first_text(payload: Mapping[str, Any], fields: Sequence[str]) -> str | None:
    for name in fields:
        value = payload.get(name)
        if isinstance(value, str) and value.strip():
            return value
    return None


def _message(answer: Any) -> str:
    status = answer.get("status") if isinstance(answer, Mapping) else None
    error = status.get("error") if isinstance(status, Mapping) else None
    return f": {error}" if isinstance(error, str) else ""
