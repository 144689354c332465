"""What a server with users in a file replays of its append-only file, and what doctor says of it before.

Servers replay transactions with the rights of the user `default`; each Lua step of ours is one.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from gpuflow.celery_app import GPUFlow
from gpuflow.cli import checks
from gpuflow.client import submit
from gpuflow.errors import GPUFlowError
from gpuflow.ledger.states import TaskState
from gpuflow.settings import Settings
from gpuflow.worker.preflight import require_durable
from tests.support.tls_server import TlsServer

_FOLDER = Path(__file__).parents[2] / "deploy" / "valkey"
_SHIPPED = (_FOLDER / "users.acl").read_text().replace("@DIGEST@", hashlib.sha256(b"secret").hexdigest()).splitlines()
_NO_RIGHTS = ["user default off resetpass", *_SHIPPED[1:]]
_UNSEEN = [_SHIPPED[0], _SHIPPED[1].replace(" +acl|dryrun", "")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsServer]:
    made = TlsServer(tmp_path / "server")
    try:
        yield made
    finally:
        made.close()


def fleet_settings(server: TlsServer, folder: Path) -> Settings:
    url = server.address("gpuflow:secret@")
    return Settings.load(env={"REDIS_URL": url, "RESULTS_DIR": str(folder / "results")}, cwd=folder)


@pytest.mark.parametrize(
    ("users", "kept", "told"),
    [(_SHIPPED, True, []), (_NO_RIGHTS, False, ["fail"]), (_UNSEEN, True, ["warn"])],
    ids=["as shipped", "default without rights", "not to be seen"],
)
def test_a_restart_keeps_what_was_accepted_or_doctor_has_warned(
    server: TlsServer, tmp_path: Path, users: list[str], kept: bool, told: list[str]
) -> None:
    server.write_users(users, administrator="admin")
    server.restart()
    settings = fleet_settings(server, tmp_path)
    app = GPUFlow("before", settings=settings)
    ids = [submit({"taskType": "echo", "echo": {"output": str(i)}}, app=app).id for i in range(3)]

    found = [check for check in checks.server(settings.redis_url or "", settings) if check.name == "replay"]
    assert [check.status for check in found] == told
    assert all("default" in check.detail and "ACL" in check.mend for check in found)

    refused = contextlib.nullcontext() if kept else pytest.raises(GPUFlowError, match=r"default.*ALLOW_VOLATILE=1")
    with refused:
        require_durable(app.redis, settings)
    require_durable(app.redis, settings.model_copy(update={"allow_volatile": True}))

    app.close()
    server.restart()
    app = GPUFlow("after", settings=fleet_settings(server, tmp_path))
    states = [record and record.state for record in app.ledger.find_many(ids)]
    assert states == [TaskState.QUEUED if kept else None] * 3
    app.close()
    if not kept:  # the file still has everything
        server.write_users(_SHIPPED, administrator="admin")
        server.restart()
        app = GPUFlow("mended", settings=fleet_settings(server, tmp_path))
        assert [record and record.state for record in app.ledger.find_many(ids)] == [TaskState.QUEUED] * 3
        app.close()


def test_nobody_logs_in_as_the_user_that_may_do_everything(server: TlsServer) -> None:
    server.write_users(_SHIPPED, administrator="admin")
    server.restart()
    for login in ("", ":@", "default:@", "default:secret@"):
        with (
            contextlib.closing(redis.Redis.from_url(server.address(login))) as client,
            pytest.raises(redis.AuthenticationError),
        ):
            client.get("gpuflow.x")
