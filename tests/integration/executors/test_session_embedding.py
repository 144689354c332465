"""Embedding on transformers: as a task of its own, and on a warm session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.executor_child import Ended
from tests.fixtures.session_child import Caller, SessionChild
from tests.fixtures.tiny_adapter import make_tiny_adapter

pytestmark = pytest.mark.ml

TEXTS = ["Hello Ana", "Where is the red car?", "Good morning Dmitri, the green lamp is over there."]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[SessionChild]:
    """Its model is named by a variable of the opening's `env`, which is made of one of the process."""
    variables = {"TINY_MODEL": str(tiny_model)}
    with SessionChild(tmp_path_factory.mktemp("warm") / "session.log", environment=variables) as session:
        model = {"source": {"type": "local", "identifier": "${env:MODEL}"}}
        env = {"MODEL": "${env:TINY_MODEL}"}
        session.send("open", engine="transformers", spec={"taskType": "embedding", "env": env, "model": model})
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


def test_an_adapter_acts_as_if_it_were_merged(
    caller: Caller, run: Callable[..., Ended], tiny_model: Path, tmp_path: Path
) -> None:
    tuned = make_tiny_adapter(tiny_model, tmp_path / "adapter", tmp_path / "merged")
    whole = expected(tmp_path / "merged", TEXTS)
    model = {"source": {"type": "local", "identifier": str(tiny_model)}, "adapters": [{"path": str(tuned)}]}
    data = {"type": "list", "items": TEXTS}

    plain = vectors(caller.ask("plain", *TEXTS))
    assert close(vectors(caller.ask("tuned", *TEXTS, spec={"model": model})), whole)
    assert close(vectors(run("embedding", {"model": model, "data": data}).result), whole)

    config = json.loads((tuned / "adapter_config.json").read_text())
    (tuned / "adapter_config.json").write_text(json.dumps({**config, "task_type": None}))
    assert close(vectors(caller.ask("no-task-type", *TEXTS, spec={"model": model})), whole)
    assert close(vectors(caller.ask("plain-again", *TEXTS)), plain)
    assert not close(plain, whole)


def test_a_model_that_counts_positions_from_behind_the_padding_takes_so_many_tokens_less() -> None:
    import torch
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    from executors.vectors.encoder import Encoder
    from executors.vectors.pooling import Pooling

    class Pads:
        def pad(self, batch: Any, **_: Any) -> Any:
            from transformers import BatchEncoding

            tokens = torch.tensor(batch["input_ids"])
            return BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})

    shape: dict[str, Any] = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 12,
    }
    for model, most in (
        (RobertaModel(RobertaConfig(**shape, pad_token_id=1)), 10),
        (BertModel(BertConfig(**shape)), 12),
    ):
        encoder = Encoder(model, Pads(), Pooling())  # type: ignore[arg-type]
        assert encoder.max_tokens == most
        assert encoder.embed([[5] * most]).shape == (1, 8)


def test_sampling_of_an_embedding_is_told_of(caller: Caller) -> None:
    caller.ask("told", "Hello", spec={"inference": {"temperature": 1}})

    assert [event["message"][:21] for event in caller.session.of("told", "log")] == ["inference is not used"]


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


def test_shards_of_a_file_make_up_the_whole(caller: Caller, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    whole = caller.ask("whole", *({"text": text} for text in TEXTS))

    for index in range(4):
        shard = {"index": index, "count": 4}
        caller.run(f"part-{index}", spec={"data": {"type": "jsonl", "path": str(file), "shard": shard}})
    parts = [caller.session.result(f"part-{index}") for index in range(4)]

    assert close([vector for part in parts for vector in vectors(part)], vectors(whole))
    seen = [part["shard"] for part in parts]
    assert [(one["start"], one["end"], one["total"]) for one in seen] == [(0, 1, 3), (1, 2, 3), (2, 3, 3), (3, 3, 3)]
    assert len({one["digest"] for one in seen}) == 1
    assert json.loads((caller.out("part-3") / "responses.json").read_text()) == {"items": []}
