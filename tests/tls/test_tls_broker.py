"""The broker over TLS with certificates of clients, its users in a file: everything works, and nobody else gets in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from click.testing import CliRunner

from gpuflow.cli import cli
from gpuflow.tokens.store import TokenStore
from gpuflow.tokens.workers import WorkerTokens
from tests.fixtures.fleets import OPTIONS
from tests.support.broker_life import Logins, whole_life, worker_environment
from tests.support.fleet import TestFleet
from tests.support.tls_server import Authority, TlsServer

ROLES = ("client", "operator", "gateway", "beat", "flower", "flower-actions")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    made = TlsServer(tmp_path_factory.mktemp("tls"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def fleet(server: TlsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    made = TestFleet(folder, worker_environment(folder), options=OPTIONS, broker=server)
    try:
        yield made
    finally:
        made.close()


def line(server: TlsServer, role: str) -> dict[str, str]:
    """Return what `gpuflow broker-users line` prints; no server is asked."""
    env = {"REDIS_URL": server.address(), "GPUFLOW_KEY_PREFIX": "t1:"}
    done = CliRunner().invoke(cli, ["broker-users", "line", "--role", role, "--before-redis-7.2", "--json"], env=env)
    assert done.exit_code == 0, done.output
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_a_fleet_lives_over_tls_with_users_from_a_file(server: TlsServer, fleet: TestFleet) -> None:
    made = {role: line(server, role) for role in ROLES}
    server.write_users([one["aclLine"] for one in made.values()])
    server.client.execute_command("ACL", "LOAD")
    logins = Logins(**{role.replace("-", "_"): one["redisUrl"] for role, one in made.items()})
    store = TokenStore(fleet.app.redis, fleet.app.keys)
    worker = WorkerTokens(fleet.app.redis, store, address=server.url, queues=["tasks"]).create("w1", labels={})
    assert worker.is_kept, "this server writes its users down"
    fleet.settings = fleet.settings.model_copy(update={"redis_url": worker.url})
    fleet.start_worker("w1", "--max-jobs", "3", "--include", "plain_tasks")
    fleet.settings = fleet.settings.model_copy(update={"redis_url": server.url})
    server.client.acl_log_reset()

    whole_life(fleet, logins)

    unknown = ("client|setinfo", "client")  # Redis 7.0 does not know it, and clients do without
    left = {(one["object"], one["username"]) for one in server.client.acl_log(1000)}
    assert {one for one in left if one[0] not in unknown} <= {("acl|getuser", "gpuflow-beat-main")}
    told = "".join(path.read_text("utf-8", "replace") for path in fleet.folder.glob("*.log"))
    for url in (server.url, worker.url, *(one["redisUrl"] for one in made.values())):
        assert (urlsplit(url).password or "-") not in told


@pytest.mark.parametrize(
    "parameters",
    [
        {"ssl_certfile": "", "ssl_keyfile": ""},
        {"ssl_ca_certs": "{other}"},
        {"ssl_certfile": "{own}", "ssl_keyfile": "{key}"},
    ],
    ids=["no certificate", "a server of another authority", "a certificate of another authority"],
)
def test_who_has_no_certificate_and_whom_nobody_vouches_for(
    server: TlsServer, tmp_path: Path, parameters: dict[str, str]
) -> None:
    other = Authority(tmp_path, "other")
    own = other.sign("stranger")
    filled = {k: v.format(other=other.file, own=own.certificate, key=own.key) for k, v in parameters.items()}
    url = server.address(f"{urlsplit(server.url).netloc.rpartition('@')[0]}@", **filled)
    with pytest.raises((redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)):
        redis.Redis.from_url(url).ping()


def test_a_port_of_tls_answers_no_plain_text(server: TlsServer) -> None:
    with pytest.raises(redis.exceptions.ConnectionError):
        redis.Redis(host="127.0.0.1", port=server.port).ping()


def test_users_of_the_file_are_there_after_a_reload(server: TlsServer) -> None:
    made = line(server, "client")
    server.write_users([made["aclLine"]])
    server.client.execute_command("ACL", "LOAD")
    with redis.Redis.from_url(made["redisUrl"]) as user:
        assert user.ping()
        with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission"):
            user.execute_command("FLUSHALL")
