"""`/v1` by the unmodified client of OpenAI: a real gateway and worker; the session is scripted and holds no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.fixtures.fleets import OPTIONS
from tests.support.engines import SCRIPTED, build
from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    """A fleet whose worker answers by a script."""
    folder = tmp_path_factory.mktemp("answering")
    for variant in ("cpu", "cuda"):
        build(folder / "envs", SCRIPTED, variant=variant)
    env = {"GPUFLOW_ENV_DIR": str(folder / "envs"), "HEARTBEAT_INTERVAL_SEC": "1"}
    made = TestFleet(folder, env=env, options=OPTIONS)
    try:
        made.start_worker("w1")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def front(answering: TestFleet) -> Iterator[Gateway]:
    env = {"REDIS_URL": answering.broker.url, "GPUFLOW_SERVED_MODELS": "one=/models/one,two=/models/broken"}
    with Gateway(answering.folder, env=env) as started:
        yield started


@pytest.fixture
def client(front: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.token, max_retries=0, timeout=patient(60)) as made:
        yield made


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "brief"}, {"role": "user", "content": text}]


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="one", messages=says("echo hello"), temperature=0, max_tokens=8)

    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello", "stop")
    assert answer.model == "one"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 7


def test_a_stream_has_every_piece_once(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="one", messages=says("spell abcdef"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert [text for text in texts if text] == list("abcdef")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 7


def test_a_stream_whose_text_is_not_that_of_the_answer_ends_with_an_error(
    client: openai.OpenAI, front: Gateway, tmp_path: Path
) -> None:
    """As where a worker dies after the first words, and the next attempt answers otherwise."""
    (tmp_path / "there").touch()
    messages = says(f"wait {tmp_path / 'there'}")
    pieces = client.chat.completions.create(model="one", messages=messages, stream=True)
    assert next(pieces).choices[0].delta.content == "..."
    with pytest.raises(openai.APIError, match="send the call again") as error:
        next(pieces)
    assert error.value.code == "answer-changed"
    body = {"model": "one", "messages": messages, "stream": True}
    raw = httpx.post(f"{front.url}/v1/chat/completions", json=body, headers=front.headers, timeout=patient(60)).text
    assert "[DONE]" not in raw
    assert 'finish_reason": "stop' not in raw


def test_a_merged_stream_is_whole_for_each(client: openai.OpenAI) -> None:
    def told() -> str:
        stream = client.chat.completions.create(model="one", messages=says("spell xyz"), temperature=0, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert [told() for _ in range(3)] == ["xyz"] * 3


def test_texts_are_continued(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="one", prompt="echo more", max_tokens=4)
    assert answer.choices[0].text == "more"
    pieces = client.completions.create(model="one", prompt="spell ab", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "ab"


@pytest.mark.parametrize("form", ["float", "base64"])
def test_texts_become_vectors(client: openai.OpenAI, form: str) -> None:
    answer = client.embeddings.create(model="one", input=["a", "b"], encoding_format=form)  # type: ignore[call-overload]
    default = client.embeddings.create(model="one", input=["a", "b"])

    assert [item.index for item in answer.data] == [0, 1]
    assert default.data[1].embedding == [1.0, 0.5]
    assert answer.usage.prompt_tokens == 2


def test_models_are_listed_and_others_are_not_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["one", "two"]
    assert client.models.retrieve("one").id == "one"
    with pytest.raises(openai.NotFoundError, match="is not served"):
        client.models.retrieve("/models/one")
    with pytest.raises(openai.NotFoundError) as told:
        client.chat.completions.create(model="/etc/passwd", messages=says("x"))
    assert told.value.code == "model_not_found"


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI, front: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(model="one", messages=says("x"), temperature=9)
    assert told.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="one", messages=says("x"), tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.InternalServerError, match="no such model"):
        client.chat.completions.create(model="two", messages=says("x"))
    with pytest.raises(openai.APIError, match="no such model"):
        list(client.chat.completions.create(model="two", messages=says("x"), stream=True))
    with (
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_task(
    front: Gateway, answering: TestFleet, tmp_path: Path, stream: bool
) -> None:
    body = {"model": "one", "messages": says(f"wait {tmp_path / 'never'}"), "stream": stream}

    def newest() -> str:
        return str(answering.app.ledger.recent(1)[0].id)

    before = newest() if answering.app.ledger.recent(1) else ""
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", f"{front.url}/v1/chat/completions", json=body, headers=front.headers, timeout=3) as answer,
    ):
        list(answer.iter_lines())
    task = newest()
    assert task != before
    eventually(lambda: str(answering.app.ledger.get(task).state) == "CANCELLED", what="the cancelled task")
