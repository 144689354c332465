"""`/v1` with models that are kept loaded: listed while they are served, answered without a load, 404 when stopped.

The session is scripted and holds no model (tests/support/scripted_session.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from gpuflow.serving.models import ServedModel, served_spec, source_of
from gpuflow.serving.replicas import Replicas
from gpuflow.serving.store import ServedModels
from gpuflow.tokens.rights import Role
from gpuflow.tokens.store import TokenStore
from tests.support.engines import SCRIPTED, build
from tests.support.fleet import TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient


@pytest.fixture
def answering(fleet: TestFleet, tmp_path: Path) -> TestFleet:
    """A fleet whose worker answers by a script."""
    for variant in ("cpu", "cuda"):
        build(tmp_path / "envs", SCRIPTED, variant=variant)
    fleet.start_worker("w1", env={"GPUFLOW_ENV_DIR": str(tmp_path / "envs"), "HEARTBEAT_INTERVAL_SEC": "1"})
    return fleet


@pytest.fixture
def front(answering: TestFleet) -> Iterator[Gateway]:
    env = {"REDIS_URL": answering.broker.url, "GPUFLOW_SERVED_MODELS": "listed=/models/listed"}
    with Gateway(answering.folder, env=env) as started:
        yield started


def client_of(front: Gateway, token: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{front.url}/v1", api_key=token or front.token or "", max_retries=0, timeout=patient(60)
    )


def serve(fleet: TestFleet, name: str, *, owner: str = "", task_type: str = "inference") -> None:
    spec = {
        "taskType": task_type,
        "model": {"source": source_of(f"/models/{name}")},
        "resources": {"hardware": {"gpu": {"count": 0}}},
    }
    model = ServedModel(name=name, spec=served_spec(spec, owner=owner), owner=owner)
    assert ServedModels(fleet.app.redis, fleet.app.keys).serve(model) == "served"
    Replicas(fleet.app).reconcile(wait=True)
    eventually(lambda: any(one.model.name == name and one.warm for one in Replicas(fleet.app).statuses()), what=name)


def stop(fleet: TestFleet, name: str) -> None:
    assert ServedModels(fleet.app.redis, fleet.app.keys).stop(name)
    Replicas(fleet.app).reconcile(wait=True)


def loads(fleet: TestFleet) -> int:
    return fleet.workers[0].log().count("event=session_opened")


def test_a_served_model_is_listed_and_answers_without_a_load(answering: TestFleet, front: Gateway) -> None:
    with client_of(front) as client:
        assert [model.id for model in client.models.list()] == ["listed"]
        serve(answering, "one")
        assert [model.id for model in client.models.list()] == ["one", "listed"]
        assert client.models.retrieve("one").created > 0

        chat = client.chat.completions.create(
            model="one", messages=[{"role": "user", "content": "echo hello"}], temperature=0, max_tokens=8
        )
        text = client.completions.create(model="one", prompt="echo again", temperature=0)
        stream = client.chat.completions.create(
            model="one", messages=[{"role": "user", "content": "spell abc"}], stream=True
        )
        told = "".join(piece.choices[0].delta.content or "" for piece in stream if piece.choices)

        assert (chat.choices[0].message.content, text.choices[0].text, told) == ("hello", "again", "abc")
        assert loads(answering) == 1
        with pytest.raises(openai.BadRequestError, match="answers chats and continues texts here"):
            client.embeddings.create(model="one", input="x")

        stop(answering, "one")
        assert [model.id for model in client.models.list()] == ["listed"]
        with pytest.raises(openai.NotFoundError, match="'one' is not served here; there are: listed"):
            client.models.retrieve("one")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="one", prompt="echo x")
    odd = b'{"model": "\\u0000\\ud800 odd", "prompt": "echo x"}'
    headers = {**front.headers, "Content-Type": "application/json"}
    assert httpx.post(f"{front.url}/v1/completions", content=odd, headers=headers).status_code in (400, 404)


def test_models_and_calls_are_counted_for_prometheus(answering: TestFleet, front: Gateway) -> None:
    """By model and outcome, and for streamed calls how long their first text took; a model that is unknown is not."""
    serve(answering, "one")
    chat: list[ChatCompletionMessageParam] = [{"role": "user", "content": "spell abc"}]

    def found() -> dict[str, float]:
        answer = httpx.get(f"{front.url}/metrics", headers=front.headers)
        return {
            " ".join(
                [one.name.removeprefix("gpuflow_served_"), *(one.labels[name] for name in sorted(one.labels))]
            ): one.value
            for family in text_string_to_metric_families(answer.text)
            for one in family.samples
            if one.name.startswith("gpuflow_served_")
        }

    before = found()
    with client_of(front) as client:
        client.chat.completions.create(model="one", messages=chat)
        list(client.chat.completions.create(model="one", messages=chat, stream=True))
        with pytest.raises(openai.APIStatusError):
            client.completions.create(model="one", prompt="fail it")
        with client.completions.create(model="one", prompt=f"wait {answering.folder}/never", stream=True) as left:
            next(iter(left))
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="x")

    expected = {"answered": 2, "failed": 1, "cancelled": 1}
    after = eventually(
        lambda: (now := found()) and all(now.get(f"calls_total one {key}") == n for key, n in expected.items()) and now,
        within=30,
        what="the counts of all calls",
    )
    assert (before["models"], before["replicas one"], before["replicas_loaded one"]) == (1, 1, 1)
    assert (before["calls_total one answered"], before["calls_total one failed"]) == (0, 0)
    assert after["first_token_seconds_count one"] == 2
    assert not [name for name in after if "nobody" in name]
    stop(answering, "one")
    gone = eventually(lambda: (now := found()) and not now["models"] and now, within=15, what="no served model")
    assert (gone.get("replicas one"), gone["calls_total one answered"]) == (None, 2)


def test_vectors_are_made_by_a_model_that_is_served_for_them(answering: TestFleet, front: Gateway) -> None:
    serve(answering, "vectors", task_type="embedding")
    with client_of(front) as client:
        made = client.embeddings.create(model="vectors", input=["a", "b"])
        with pytest.raises(openai.BadRequestError, match="makes vectors here"):
            client.completions.create(model="vectors", prompt="x")

    assert [item.index for item in made.data] == [0, 1]
    assert loads(answering) == 1


def test_a_model_of_one_owner_is_not_there_for_others(answering: TestFleet, front: Gateway) -> None:
    store = TokenStore(answering.app.redis, answering.app.keys)
    tokens = {
        owner: store.create_user_token(Role.SUBMITTER, owner=owner, label=owner, valid_seconds=None)[1].text
        for owner in ("ana", "bo")
    }
    serve(answering, "mine", owner="ana")

    with client_of(front, tokens["ana"]) as ana, client_of(front, tokens["bo"]) as bo, client_of(front) as admin:
        assert [model.id for model in ana.models.list()] == ["mine", "listed"]
        assert [model.id for model in bo.models.list()] == ["listed"]
        with pytest.raises(openai.NotFoundError, match="'mine' is not served here; there are: listed"):
            bo.completions.create(model="mine", prompt="echo x")
        for client in (ana, admin):
            answer = client.completions.create(model="mine", prompt="echo x")
            record = answering.app.ledger.get(answer.id.removeprefix("cmpl-"))
            assert (answer.choices[0].text, record.owner) == ("x", "ana")
    assert loads(answering) == 1
    with httpx.Client(base_url=front.url) as nobody:
        assert nobody.get("/v1/models").status_code == 401


def test_operators_serve_scale_and_stop_over_http(answering: TestFleet, front: Gateway) -> None:
    store = TokenStore(answering.app.redis, answering.app.keys)

    def headers(role: Role, owner: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {store.create_user_token(role, owner=owner)[1].text}"}

    address = "/api/admin/models"
    ask = {"model": "/models/one", "name": "group/one", "accelerators": "cpu"}
    with httpx.Client(base_url=front.url, timeout=patient(60), headers=headers(Role.SUBMITTER, "ana")) as submitter:
        assert submitter.post(address, json=ask).status_code == 403
        assert submitter.get(address).status_code == 403
        assert submitter.delete(f"{address}/group/one").status_code == 403
    assert ServedModels(answering.app.redis, answering.app.keys).all() == {}
    with httpx.Client(base_url=front.url, timeout=patient(60), headers=headers(Role.OPERATOR)) as operator:
        made = operator.post(address, json=ask)
        assert (made.status_code, made.json()["replicas"]) == (201, 1)
        eventually(lambda: operator.get(address).json()["models"][0]["loaded"] == 1, what="the model loaded")
        scaled = operator.post(address, json={**ask, "replicas": 2})
        assert (scaled.status_code, len(scaled.json()["tasks"])) == (201, 2)
        (listed,) = operator.get(address).json()["models"]
        assert (listed["name"], listed["workers"], listed["error"]) == ("group/one", ["w1"], "")
        assert operator.get("/v1/models/group/one").json()["id"] == "group/one"
        unknown = operator.get("/v1/models/two%0Alines")
        assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "not_found_error"
        other = operator.post(address, json={**ask, "model": "/models/two"})
        assert (other.status_code, other.json()["type"]) == (409, "urn:gpuflow:problem:model-served")
        for bad in ({"model": "two words"}, {"model": "/m", "name": "a b"}, {**ask, "replicas": 0}, {**ask, "x": 1}):
            assert operator.post(address, json=bad).status_code == 422, bad
        assert operator.delete(f"{address}/group/one").status_code == 204
        assert operator.delete(f"{address}/group/one").status_code == 404
        assert operator.get(address).json() == {"models": []}
