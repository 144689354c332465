"""The Qdrant client against a strict server: what it asks, and what it makes of wrong and hostile answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from executors.base import ExecutorError
from executors.failures import classify
from executors.retrieval import qdrant
from executors.retrieval.qdrant import Qdrant
from tests.fixtures.fake_qdrant import Behaviour, FakeQdrant, fake_qdrant

KEY = "canary-key-of-the-qdrant-tests"
POINTS = [
    {"id": 1, "vector": [1.0, 0.0], "payload": {"text": "east", "source": "a.md", "heading": "A"}},
    {"id": "u-2", "vector": [0.0, 1.0], "payload": {"page_content": "north", "metadata": {"source": "b.md"}}},
    {"id": 3, "vector": [0.6, 0.6], "payload": {"text": "between"}},
]


@pytest.fixture
def server() -> Iterator[FakeQdrant]:
    with fake_qdrant(collections={"demo": {"size": 2, "points": POINTS}}, key=KEY) as running:
        yield running


def client(server: FakeQdrant, **fields: Any) -> Qdrant:
    return Qdrant({"url": server.url, "collection": "demo", "api_key": KEY, **fields})


def failure(server: FakeQdrant, vector: tuple[float, ...] = (1.0, 0.0), **fields: Any) -> dict[str, Any]:
    with pytest.raises(ExecutorError) as caught:
        client(server, **fields).search([vector], 2)
    record = classify(caught.value)
    assert KEY not in json.dumps(record)
    assert KEY not in repr(caught.value.__context__ if not caught.value.__suppress_context__ else None)
    return record


def test_it_finds_what_is_nearest(server: FakeQdrant) -> None:
    found = client(server).search([[1.0, 0.0], [0.0, 1.0]], 2)

    assert [[hit.passage.text for hit in hits] for hits in found] == [["east", "between"], ["north", "between"]]
    assert (found[0][0].passage.id, found[0][0].passage.source, found[0][0].passage.heading) == ("1", "a.md", "A")
    assert (found[1][0].passage.id, found[1][0].passage.source, found[1][0].score) == ("u-2", "b.md", 1.0)
    (request,) = server.seen
    assert request["path"] == "/collections/demo/points/query/batch"
    assert request["headers"]["api-key"] == KEY


def test_a_threshold_leaves_out_and_names_are_passed_on(server: FakeQdrant) -> None:
    server.collections["demo"]["vector"] = "dense"

    ((hit,),) = client(server, vector="dense").search([[1.0, 0.0]], 3, 0.9)

    assert hit.passage.text == "east"
    assert failure(server)["type"] == "BadInput"


def test_many_questions_are_several_requests(server: FakeQdrant) -> None:
    found = client(server).search([[1.0, 0.0]] * 70, 1)

    assert [hits[0].passage.text for hits in found] == ["east"] * 70
    assert [len(json.loads(one["body"])["searches"]) for one in server.seen] == [32, 32, 6]


def test_a_missing_or_wrong_key(server: FakeQdrant) -> None:
    for key in ("", "another"):
        record = failure(server, api_key=key)
        assert (record["type"], record["retryable"]) == ("NotAuthorized", False)
        assert "${env:QDRANT_API_KEY}" in record["message"]


def test_a_missing_collection_and_another_dimension_are_said(server: FakeQdrant) -> None:
    missing = failure(server, collection="other/../demo")
    assert (missing["type"], missing["retryable"]) == ("BadInput", False)
    assert "there is no such collection" in missing["message"]
    assert server.seen[-1]["path"] == "/collections/other%2F..%2Fdemo/points/query/batch"

    wrong = failure(server, (1.0, 0.0, 0.0))
    assert wrong["type"] == "BadInput"
    assert "expected dim: 2, got 3" in wrong["message"]


def test_a_payload_without_text_names_its_fields(server: FakeQdrant) -> None:
    record = failure(server, text_field="body")

    assert record["type"] == "BadInput"
    assert "no text in body; its fields are: text, source, heading" in record["message"]


def says(status: int, content: bytes, **headers: str) -> Behaviour:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"content_length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return behave


def result(*points: Any) -> bytes:
    return json.dumps({"result": [{"points": list(points)}]}).encode()


GOOD = {"id": 1, "score": 0.5, "payload": {"text": "x"}}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"null", b"[]", b"{}", b"not json", b"[" * 100_000, b'{"result": {}}', b'{"result": []}',
        b'{"result": [1]}', b'{"result": [{"points": {}}]}', b'{"result": [{"points": [1]}]}', result(GOOD, GOOD, GOOD),
        result({**GOOD, "score": "high"}), result({**GOOD, "score": float("nan")}), result({**GOOD, "id": [1]}),
        result({**GOOD, "score": True}),
    ],
    ids=range(16),
)  # fmt: skip
def test_an_answer_of_another_form_is_refused(server: FakeQdrant, content: bytes) -> None:
    server.behaviour = says(200, content)

    assert failure(server)["type"] == "BadAnswer"


def test_huge_and_compressed_answers_are_refused(server: FakeQdrant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qdrant, "MAX_ANSWER_BYTES", 100_000)
    written = 0

    def flood(handler: BaseHTTPRequestHandler) -> None:
        nonlocal written
        handler.send_response(200)
        handler.end_headers()
        while True:  # until the client goes
            written += handler.wfile.write(b" " * 65_536)

    server.behaviour = flood
    assert "longer than" in failure(server)["message"]
    server.behaviour = says(200, b"\x1f\x8b", content_encoding="gzip")
    assert "compressed" in failure(server)["message"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_in_trouble_is_tried_again(server: FakeQdrant, status: int) -> None:
    server.behaviour = says(status, b'{"status": {"error": "busy ' + KEY.encode() + b" " + b"y" * 10_000 + b'"}}')

    record = failure(server)

    assert (record["type"], record["retryable"]) == ("Network", True)
    assert "busy ***" in record["message"]
    assert len(record["message"]) < 600


def test_a_redirect_is_not_followed(server: FakeQdrant) -> None:
    server.behaviour = says(307, b"", location=f"{server.url}/elsewhere")

    assert "redirect" in failure(server)["message"]
    assert len(server.seen) == 1


def test_a_server_that_never_ends_is_left_after_the_timeout(server: FakeQdrant) -> None:
    gone = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not gone.wait(0.02):
            handler.wfile.write(b" ")

    server.behaviour = drip
    record = failure(server, timeout=0.2)
    gone.set()

    assert (record["type"], record["retryable"]) == ("Network", True)
    assert "has not answered within 0.2 s" in record["message"]


def test_nobody_there_is_a_network_error(server: FakeQdrant) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        record = failure(server, url=f"http://127.0.0.1:{free.getsockname()[1]}")

    assert (record["type"], record["retryable"]) == ("Network", True)
    assert "cannot be reached" in record["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "qdrant:6333"}, {"url": "ftp://h"}, {"url": "http://h:99999"}, {"url": "http://me:word@h"},
        {"url": "http://h/?a=b"}, {"url": ""}, {"api_key": "two\nlines"}, {"api_key": "umlaut-ä"},
    ],
)  # fmt: skip
def test_what_no_request_could_be_made_of(fields: dict[str, str]) -> None:
    with pytest.raises(ExecutorError) as caught:
        Qdrant({"url": "http://h", "collection": "c", **fields})

    assert caught.value.type == "BadInput"
    assert "word" not in caught.value.message
    assert "two" not in caught.value.message
