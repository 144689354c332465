"""`/v1` with a real model: a tiny random Llama on transformers, through a real worker, by OpenAI's own client."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.fixtures.tiny_model import make_tiny_model
from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import patient

pytestmark = pytest.mark.ml


def test_a_real_model_answers_streams_and_counts(fleet: TestFleet, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    fleet.start_worker("w1", env={"GPUFLOW_STATE_DIR": str(tmp_path / "state")})
    env = {"REDIS_URL": fleet.broker.url, "GPUFLOW_SERVED_MODELS": f"tiny={model}"}
    chat = [{"role": "user", "content": "one two three"}]
    with (
        Gateway(fleet.folder, env=env) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.token, timeout=patient(120)) as client,
    ):
        answer = client.chat.completions.create(model="tiny", messages=chat, temperature=0, max_tokens=8)
        pieces = list(
            client.chat.completions.create(
                model="tiny", messages=chat, temperature=0, max_tokens=8, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        texts = client.completions.create(model="tiny", prompt=["one", "two"], temperature=0, max_tokens=4)
        vectors = client.embeddings.create(model="tiny", input=["one", "two", "one"])

    told = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert told == answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    assert pieces[-1].usage == answer.usage
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert vectors.data[0].embedding == pytest.approx(vectors.data[2].embedding, abs=1e-5)
    assert vectors.data[0].embedding != pytest.approx(vectors.data[1].embedding, abs=1e-5)
