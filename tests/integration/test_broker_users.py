"""Users of the broker for every kind of process: under them a fleet lives as ever, and nobody does more than that."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from gpuflow.tokens import service_users
from gpuflow.tokens.service_users import RIGHTS, ServiceRole
from gpuflow.tokens.store import TokenStore
from gpuflow.tokens.workers import WorkerTokens
from tests.fixtures.fleets import OPTIONS
from tests.support.broker_life import Logins, whole_life, worker_environment
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

PREFIX = "t1:"


def login_of(fleet: TestFleet, role: ServiceRole, name: str = "main", **more: Any) -> service_users.ServiceLogin:
    login, given = service_users.new_login(
        role, name, address=fleet.broker.url, prefix=PREFIX, database=0, queues=["tasks"], **more
    )
    return service_users.create(fleet.app.redis, login, given, prefix=PREFIX, replace=False, only_fleet=False)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    folder = tmp_path_factory.mktemp("rights")
    made = TestFleet(folder, worker_environment(folder), options=OPTIONS)
    try:
        made.broker.client.config_set("acllog-max-len", 1000)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def logins(fleet: TestFleet) -> Logins:
    return Logins(**{str(role).replace("-", "_"): login_of(fleet, role).url for role in ServiceRole})


class Steps:
    """Which Lua steps each user of the server has called, by their digests. A context manager."""

    def __init__(self, broker: Any) -> None:
        self._url, self._client = broker.url, broker.client
        #: Address -> from when until when (monotonic seconds) whose connection it was.
        self._spans: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        self._calls: list[tuple[float, str, str]] = []
        self._stop = threading.Event()
        self._reads = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._listen, self._look)]

    def __enter__(self) -> Steps:
        for thread in self._threads:
            thread.start()
        eventually(self._reads.is_set, what="the log of the broker")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._client.echo("the end")
        for thread in self._threads:
            thread.join(timeout=patient(30))

    def _listen(self) -> None:
        with redis.Redis.from_url(self._url, decode_responses=True) as client, client.monitor() as monitor:
            self._reads.set()
            for told in monitor.listen():
                if told["client_type"] != "lua" and told["command"][:8].upper() == "EVALSHA ":
                    address = f"{told['client_address']}:{told['client_port']}"
                    self._calls.append((time.monotonic(), address, told["command"].split(" ", 2)[1]))
                if self._stop.is_set():
                    return

    def _look(self) -> None:
        with redis.Redis.from_url(self._url, decode_responses=True) as client:
            while not self._stop.wait(0.01):
                found, now = client.client_list(), time.monotonic()
                for one in found:
                    spans = self._spans[one["addr"]]
                    same = bool(spans) and spans[-1][2] == one["user"]
                    spans[-1 if same else len(spans) :] = [(spans[-1][0] if same else now, now, one["user"])]

    def by_user(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for at, address, sha in self._calls:
            found[self._user_at(address, at)].add(sha)
        return found

    def _user_at(self, address: str, at: float) -> str:
        """The user whose connection this was at that moment: an address is given again, and begins as `default`."""
        spans = [
            (max(start - at, at - end, 0.0), user) for start, end, user in self._spans[address] if user != "default"
        ]
        seconds, user = min(spans, default=(math.inf, ""))
        return user if seconds < 1 else ""


def refusals(fleet: TestFleet) -> list[tuple[str, str, str]]:
    return [(one["reason"], one["object"], one["username"]) for one in fleet.broker.client.acl_log(1000)]


#: Commands of a step that a role calls in another mode: the operator seals the audit log and never trims it.
UNUSED = {
    ServiceRole.OPERATOR: {"XTRIM"},
}


def test_a_fleet_lives_with_every_process_as_its_own_user(fleet: TestFleet, logins: Logins, tmp_path: Path) -> None:
    client = fleet.broker.client
    tokens = WorkerTokens(
        fleet.app.redis, TokenStore(fleet.app.redis, fleet.app.keys), address=fleet.broker.url, queues=["tasks"]
    )
    fleet.settings = fleet.settings.model_copy(update={"redis_url": tokens.create("w1", labels={}).url})
    fleet.start_worker("w1", "--max-jobs", "3", "--include", "plain_tasks")
    fleet.settings = fleet.settings.model_copy(update={"redis_url": fleet.broker.url})
    client.acl_log_reset()

    with Steps(fleet.broker) as steps:
        whole_life(fleet, logins)

    # Beat looks after the users of workers where it may: here it may not, and says so once a round in its debug log.
    left = [one for one in refusals(fleet) if one[1:] != ("acl|getuser", "gpuflow-beat-main")]
    assert left == []
    called = steps.by_user()
    for role in ServiceRole:
        allowed = {
            name.upper()
            for name in (*RIGHTS[role].commands, *(n for names, _ in RIGHTS[role].selectors for n in names))
        }
        for sha in called[f"gpuflow-{role}-main"]:
            text = str(client.execute_command("SCRIPT", "SHOW", sha))
            needed = set(re.findall(r"redis\.p?call\(\s*['\"]([A-Z]+)['\"]", text))
            lacks = {one for one in needed if one not in allowed and f"{one}|STREAM" not in allowed}
            assert lacks <= UNUSED.get(role, set()), (role, text[:300])
    assert {role for role in ServiceRole if called[f"gpuflow-{role}-main"]} == {*ServiceRole}
