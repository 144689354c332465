"""`gpuflow tokens` and `gpuflow workers create|rotate-token|delete` against a real broker."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner, Result

from gpuflow.broker.keys import Keys
from gpuflow.celery_app import GPUFlow
from gpuflow.cli import cli
from gpuflow.fleet.registry import Fleet, WorkerEntry, WorkerState
from gpuflow.settings import Settings
from gpuflow.upkeep.duties import Duties
from tests.support.fleet import Broker

Invoke = Callable[..., Result]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("broker"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def invoke(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.setenv("REDIS_URL", broker.url)
    monkeypatch.setenv("GPUFLOW_STATE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(cli, list(arguments))
        assert "Traceback" not in result.stderr
        return result

    return run


def test_tokens_of_people_are_made_listed_and_revoked(invoke: Invoke) -> None:
    made = json.loads(
        invoke("tokens", "create", "--role", "submitter", "--owner", "ana", "--expires-in", "30d", "--json").stdout
    )
    shown = invoke("tokens", "create", "--role", "admin", "--label", "ops")
    listed = invoke("tokens", "list")

    assert made["token"].startswith(f"ut_{made['id']}_")
    assert "ut_" in shown.stdout
    assert {"ana", "submitter", "admin", "ops", "never"} <= set(listed.stdout.split())
    assert made["token"] not in listed.stdout
    assert json.loads(invoke("tokens", "list", "--json").stdout)[0]["expiresAt"] > made["createdAt"]
    assert invoke("tokens", "revoke", made["id"]).exit_code == 0
    again = invoke("tokens", "revoke", made["id"])
    assert (again.exit_code, "gpuflow tokens list" in again.stderr) == (2, True)
    told = invoke("audit", "--target", f"token:{made['id']}", "--json").stdout
    entries = json.loads(told)
    assert [entry["action"] for entry in entries] == ["token.revoke", "token.create"]
    assert all("@" in entry["actor"] for entry in entries), "the user of this process"
    assert made["token"] not in told and entries[1]["details"]["role"] == "submitter"


@pytest.mark.parametrize(
    "arguments",
    [
        ("tokens", "create", "--role", "viewer"),
        ("tokens", "create", "--role", "viewer", "--owner", "a", "--all-owners"),
        ("tokens", "create", "--role", "king", "--owner", "a"),
        ("tokens", "create", "--role", "viewer", "--owner", "a\x1b[31m"),
        ("tokens", "create", "--role", "viewer", "--owner", "a", "--expires-in", "soon"),
        ("tokens", "revoke", "*"),
        ("workers", "create", "--only-fleet", "--name", "a b"),
        ("workers", "create", "--name", "shared"),
        ("workers", "create", "--name", "w", "--label", "x"),
        ("workers", "create", "--only-fleet", "--name", "w", "--queue", "b:access:tokens"),
        ("workers", "rotate-token", "nobody"),
        ("workers", "delete", "nobody"),
    ],
)
def test_bad_input_is_exit_2_and_makes_nothing(invoke: Invoke, broker: Broker, arguments: tuple[str, ...]) -> None:
    before = (broker.client.keys("access:*"), broker.client.acl_users())
    result = invoke(*arguments)

    assert result.exit_code == 2, result.output
    assert (broker.client.keys("access:*"), broker.client.acl_users()) == before


def test_a_worker_is_made_rotated_and_deleted(invoke: Invoke, broker: Broker) -> None:
    made = json.loads(invoke("workers", "create", "--only-fleet", "--name", "w1", "--label", "site=b", "--json").stdout)
    shown = invoke("workers", "rotate-token", "w1")
    entry = WorkerEntry(id="w1", state=WorkerState.IDLE, timeout_seconds=60)
    fleet = Fleet(broker.client, Keys())
    fleet.announce(entry)
    there = invoke("workers", "delete", "w1")

    assert made["token"] in made["redisUrl"]
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis.from_url(made["redisUrl"]).ping()
    assert "celery -A gpuflow worker --name w1 --label site=b" in shown.stdout
    assert made["token"] not in shown.stdout
    assert "beat" in shown.stderr, "this server has no ACL file"
    assert (there.exit_code, "drain" in there.stderr) == (2, True)
    assert invoke("workers", "delete", "w1", "--force").exit_code == 0
    assert fleet.find("w1") is None
    assert broker.client.acl_users() == ["default"]
    told = invoke("audit", "--target", "worker:w1", "--action", "worker.*", "--json").stdout
    actions = [entry["action"] for entry in json.loads(told)]
    assert [action for action in actions if action != "worker.register"] == [
        "worker.delete", "worker.rotate", "worker.create"
    ]  # fmt: skip
    assert made["token"] not in told
    assert invoke("workers", "create", "--only-fleet", "--name", "w1").exit_code == 0, "the name is free again"


def test_beat_makes_users_again_that_a_restart_has_lost(invoke: Invoke, broker: Broker, tmp_path: Path) -> None:
    made = json.loads(invoke("workers", "create", "--only-fleet", "--name", "lost", "--json").stdout)
    broker.client.acl_deluser(f"gpuflow-worker-{made['id']}")
    app = GPUFlow("beat", settings=Settings.load(env={"REDIS_URL": broker.url}, cwd=tmp_path))

    Duties(app).reconcile()

    assert redis.Redis.from_url(made["redisUrl"]).ping()
    app.redis.close()


def test_users_of_the_broker_are_made_listed_replaced_and_removed(invoke: Invoke, broker: Broker) -> None:
    made = json.loads(invoke("broker-users", "create", "--role", "gateway", "--only-fleet", "--json").stdout)
    again = invoke("broker-users", "create", "--role", "gateway", "--only-fleet")
    shown = invoke("broker-users", "create", "--role", "gateway", "--only-fleet", "--replace")

    assert made["user"] == "gpuflow-gateway-main" and made["user"] in made["redisUrl"]
    assert (again.exit_code, "--replace" in again.stderr) == (2, True)
    assert "aclfile" in shown.stderr, "this server has no such file"
    assert json.loads(invoke("broker-users", "list", "--json").stdout) == [{"user": made["user"], "role": "gateway"}]
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis.from_url(made["redisUrl"]).ping()
    assert invoke("broker-users", "delete", made["user"]).exit_code == 0
    assert "broker-users create" in invoke("broker-users", "list").output
    told = invoke("audit", "--target", f"user:{made['user']}", "--json").stdout
    actions = [entry["action"] for entry in json.loads(told)]
    assert actions == ["broker-user.delete", "broker-user.create", "broker-user.create"]
    assert made["redisUrl"].partition("@")[0].rpartition(":")[2] not in told


def test_a_line_of_a_file_of_users_needs_no_server(
    invoke: Invoke, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://nowhere.invalid:6379/0")
    monkeypatch.setenv("GPUFLOW_KEY_PREFIX", "t1:")
    made = json.loads(invoke("broker-users", "line", "--role", "client", "--json").stdout)
    old = invoke("broker-users", "line", "--role", "client", "--before-redis-7.2")

    password = made["redisUrl"].partition("@")[0].rpartition(":")[2]
    assert made["aclLine"].startswith("user gpuflow-client-main reset on #") and password not in made["aclLine"]
    assert "client|setinfo" in made["aclLine"] and "client|setinfo" not in old.stdout
    assert broker.client.execute_command(
        "ACL", "SETUSER", *made["aclLine"].split(" ", 2)[1:2], *_rules(made["aclLine"])
    )
    broker.client.acl_deluser("gpuflow-client-main")


def _rules(line: str) -> list[str]:
    """Return the rules of a line as ACL SETUSER takes them: a selector in brackets is one."""
    return re.findall(r"\([^)]*\)|\S+", line.split(" ", 2)[2])


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "--role", "king"),
        ("create", "--role", "client", "--name", "a b", "--only-fleet"),
        ("create", "--role", "client"),
        ("create", "--role", "client", "--manage-users", "--only-fleet"),
        ("create", "--role", "client", "--queue", "b:access:tokens", "--only-fleet"),
        ("line", "--role", "client", "--name", "a\nuser evil on nopass ~* +@all"),
        ("delete", "default"),
        ("delete", "gpuflow-worker-x"),
    ],
)
def test_a_bad_user_of_the_broker_is_exit_2_and_makes_nothing(
    invoke: Invoke, broker: Broker, arguments: tuple[str, ...]
) -> None:
    before = broker.client.acl_list()
    result = invoke("broker-users", *arguments)
    assert result.exit_code == 2, result.output
    assert broker.client.acl_list() == before
