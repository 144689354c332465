"""Embedding on transformers: as a task of its own, and on a warm session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.executor_child import Ended
from tests.fixtures.session_child import Caller, SessionChild

pytestmark = pytest.mark.ml

TEXTS = ["Hello Ana", "Where is the red car?", "Good morning Dmitri, the green lamp is over there."]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[SessionChild]:
    with SessionChild(tmp_path_factory.mktemp("warm") / "session.log") as session:
        model = {"source": {"type": "local", "identifier": str(tiny_model)}}
        session.send("open", engine="transformers", spec={"taskType": "embedding", "model": model})
        session.until("ready")
        yield session


@pytest.fixture
def caller(warm: SessionChild, tmp_path: Path) -> Caller:
    warm.forget()
    return Caller(warm, tmp_path, "embedding")


def vectors(result: dict[str, Any]) -> list[list[float]]:
    return [item["embedding"] for item in result["items"]]


def close(left: list[list[float]], right: list[list[float]]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(one == pytest.approx(other, abs=1e-5) for one, other in pairs)


def expected(model: Path, texts: list[str]) -> list[list[float]]:
    """The mean of the last states of the tokens, of length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, encoder = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    found = []
    with torch.inference_mode():
        for text in texts:
            states = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            found.append((states / states.norm()).tolist())
    return found


def test_a_task_of_its_own_and_a_session_give_the_same_vectors(
    caller: Caller, run: Callable[..., Ended], tiny_model: Path, tmp_path: Path
) -> None:
    alone = run("embedding", {"data": {"type": "list", "items": TEXTS}}).result

    result = caller.ask("warm", *TEXTS)

    assert close(vectors(result), expected(tiny_model, TEXTS))
    assert close(vectors(alone), vectors(result))
    assert (result["engine"], result["dimensions"]) == ("transformers", 128)
    assert result["usage"] == alone["usage"]
    assert result["usage"]["completion_tokens"] == 0
    assert json.loads((caller.out("warm") / "responses.json").read_text()) == result


def test_what_a_request_says_holds_for_it_alone(caller: Caller) -> None:
    caller.run("raw", "Hello Ana", spec={"embedding": {"model": "x", "normalize": False}, "model": None})
    caller.run("prefixed", "Ana", spec={"embedding": {"model": "x", "query_prefix": "Hello "}, "model": None})
    plain = caller.ask("plain", "Hello Ana")

    assert caller.session.error("raw")["type"] == "BadRequest"
    caller.session.forget()
    here = {"model": {"source": {"type": "local", "identifier": plain["model"]}}}
    raw = caller.ask("raw", "Hello Ana", spec={"embedding": {"model": "x", "normalize": False}, **here})
    prefixed = caller.ask("prefixed", "Ana", spec={"embedding": {"model": "x", "query_prefix": "Hello "}, **here})

    length = sum(value**2 for value in vectors(raw)[0]) ** 0.5
    assert length != pytest.approx(1, abs=1e-2)
    assert close([[value / length for value in vectors(raw)[0]]], vectors(plain))
    assert close(vectors(prefixed), vectors(plain))


def test_a_long_text_is_cut_and_says_so(caller: Caller) -> None:
    result = caller.ask("long", "Hello " * 400, "Hello")

    assert [item.get("truncated", False) for item in result["items"]] == [True, False]
    assert result["items"][0]["usage"]["prompt_tokens"] == 256


def test_many_vectors_are_a_file(caller: Caller) -> None:
    import numpy

    few = vectors(caller.ask("few", *TEXTS))

    result = caller.ask("many", *(TEXTS * 300))

    assert result["items"][4]["embedding"] == {"file": "embeddings.npy", "row": 4}
    matrix = numpy.load(caller.out("many") / "embeddings.npy")
    assert (matrix.shape, str(matrix.dtype)) == ((900, 128), "float32")
    assert close(matrix[:3].tolist(), few)
    paths = [event["path"] for event in caller.session.of("many", "artifact")]
    assert paths == ["embeddings.npy", "responses.json"]
