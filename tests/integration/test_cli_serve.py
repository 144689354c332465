"""`gpuflow serve` against a real broker, and what beat makes of it: no worker is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuflow.cli import cli
from gpuflow.ledger.records import TaskRecord
from gpuflow.routing.queue_names import queue_name
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.session_names import session_name
from gpuflow.serving.models import ServedModel
from gpuflow.serving.replicas import Replicas
from gpuflow.serving.store import ServedModels
from gpuflow.spec import canonical
from gpuflow.tokens import service_users
from gpuflow.tokens.service_users import ServiceRole
from gpuflow.upkeep.duties import Duties
from tests.support.fleet import TestFleet

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(fleet: TestFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.setenv("REDIS_URL", fleet.broker.url)
    monkeypatch.setenv("GPUFLOW_STATE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli, list(arguments))


def served(fleet: TestFleet) -> ServedModel:
    (model,) = ServedModels(fleet.app.redis, fleet.app.keys).all().values()
    return model


def replicas(fleet: TestFleet) -> tuple[TaskRecord, ...]:
    (status,) = Replicas(fleet.app).statuses()
    return status.replicas


def test_a_model_is_served_listed_scaled_and_stopped(fleet: TestFleet, invoke: Invoke) -> None:
    assert "no models are served" in invoke("serve", "--list").output

    first = invoke("serve", "/models/one", "--name", "one", "--replicas", "2")

    assert first.exit_code == 0, first.output
    assert "one is served by 2 replicas on no GPU" in first.output
    assert len(replicas(fleet)) == 2
    listed = invoke("serve", "--list")
    assert listed.output.splitlines()[1].split()[:4] == ["one", "/models/one", "inference", "0/2"]
    assert "no worker is there" in listed.output
    (row,) = json.loads(invoke("serve", "--list", "--json").output)
    assert (row["name"], row["replicas"], row["loaded"], len(row["tasks"])) == ("one", 2, 0, 2)

    assert "is served already" in invoke("serve", "/models/one", "--name", "one").output
    fewer = invoke("serve", "/models/one", "--name", "one", "--replicas", "1", "--json")
    assert json.loads(fewer.output)["answer"] == "scaled"
    (left,) = replicas(fleet)

    stopped = invoke("serve", "one", "--stop")
    assert stopped.exit_code == 0, stopped.output
    assert fleet.state(left.id) == "CANCELLED"
    again = invoke("serve", "one", "--stop")
    assert again.exit_code != 0
    assert "no model 'one' is served" in again.output or "no model 'one' is served" in str(again.exception)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["two words"], "it is no id of the hub, no shipped preset and no absolute path; give one"),
        (["/models/one", "--replicas", "0", "--name", "one"], "replicas 0: give 1 to"),
        (["/models/one", "--name", "bad name"], "a served model is named by"),
        (["/models/one", "--name", "one", "--set", "inference.max_tokens=3"], "inference is of each call"),
        (["/models/one", "--name", "one", "--accelerators", "nonsense::"], "nonsense"),
        (["/models/one", "--stop", "--replicas", "2"], "--stop takes no other options"),
        (["--stop"], "no MODEL is named"),
        (["one", "--list"], "--list stands alone"),
    ],
)
def test_what_cannot_be_served_is_refused_with_cause_and_fix(
    fleet: TestFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], cause: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("REDIS_URL", fleet.broker.url)
    with pytest.raises(SystemExit) as ended:
        cli.main(args=["serve", *arguments], prog_name="gpuflow")

    assert ended.value.code == 2
    assert cause in capsys.readouterr().err
    assert ServedModels(fleet.app.redis, fleet.app.keys).all() == {}


def test_beat_submits_what_lacks(fleet: TestFleet, invoke: Invoke) -> None:
    invoke("serve", "/models/one", "--name", "one")
    (first,) = replicas(fleet)
    fleet.app.cancel_task(first.id)

    duties = Duties(fleet.app)
    duties.serve()

    (second,) = replicas(fleet)
    assert second.id != first.id
    duties.serve()
    assert [record.id for record in replicas(fleet)] == [second.id]


def test_calls_have_the_session_of_the_replica(fleet: TestFleet, invoke: Invoke) -> None:
    """By one function, whatever each of them says for itself."""
    chats = [
        {"taskType": "inference", "data": {"type": "list", "items": [{"messages": [{"role": "user", "content": "x"}]}]},
         "inference": {"temperature": 0, "stream": True}, "priority": 9},
        {"taskType": "inference", "data": {"type": "list", "items": ["x"]}, "inference": {"max_tokens": 3}},
    ]  # fmt: skip
    vectors = [{"taskType": "embedding", "data": {"type": "list", "items": ["x"]}}]
    for options, calls in (
        (["--set", "model.vllm.max_model_len=128", "--set", "secrets=[HF_TOKEN]", "--owner", "ana"], chats),
        (["--engine", "transformers", "--accelerators", "A100:1"], chats),
        (["--accelerators", "cpu"], chats),
        (["--embedding"], vectors),
    ):
        result = invoke("serve", "Qwen/Qwen3-0.6B", "--name", "one", *options)
        assert result.exit_code == 0, (result.output, result.exception)
        model = served(fleet)
        (replica,) = replicas(fleet)
        queue = queue_name(Requirement.from_dict(replica.requirement or {}))
        assert queue == replica.queue
        name = session_name(replica.spec, [queue])
        assert name
        assert {session_name(canonical(model.call_spec(call)), [queue]) for call in calls} == {name}
        assert replica.owner == model.owner
        invoke("serve", "one", "--stop")


def test_a_client_of_the_broker_serves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who submits tasks has a user of the broker that may not say what is served; an operator's may."""
    fleet = TestFleet(tmp_path, env={"GPUFLOW_KEY_PREFIX": "t1:"})
    try:
        monkeypatch.setenv("GPUFLOW_KEY_PREFIX", "t1:")
        codes = {}
        for role in (ServiceRole.CLIENT, ServiceRole.OPERATOR):
            login, given = service_users.new_login(
                role, "main", address=fleet.broker.url, prefix="t1:", database=0, queues=["tasks"]
            )
            made = service_users.create(fleet.app.redis, login, given, prefix="t1:", replace=False, only_fleet=False)
            monkeypatch.setenv("REDIS_URL", made.url)
            with pytest.raises(SystemExit) as ended:
                cli.main(args=["serve", "/models/one", "--name", str(role)], prog_name="gpuflow")
            codes[role] = ended.value.code

        assert codes == {ServiceRole.CLIENT: 1, ServiceRole.OPERATOR: 0}
        assert "the broker denies this to the user of REDIS_URL" in capsys.readouterr().err
        assert list(ServedModels(fleet.app.redis, fleet.app.keys).all()) == ["operator"]
    finally:
        fleet.close()
