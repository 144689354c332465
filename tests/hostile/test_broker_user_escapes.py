"""What each user of the broker is refused by a real server, and that nothing has changed after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from gpuflow.tokens import service_users
from gpuflow.tokens.broker_users import BrokerRefuses
from gpuflow.tokens.service_users import RIGHTS, ServiceLogin, ServiceRole, ServiceUserRefused
from tests.hostile.test_worker_login import ATTACKS, everything
from tests.support.fleet import Broker

FLEET = ("t1:task:1", "t1:gpuflow.audit", "t1:celery-task-meta-1", "t1:access:token:0")
#: For every role.
SHARED = (
    *(attack for attack in ATTACKS if not any("t1:access" in part for part in attack)),
    ("MODULE", "LOAD", "/tmp/x.so"),
    ("MODULE", "LIST"),
    ("DEBUG", "OBJECT", "t1:task:1"),
    ("SLAVEOF", "127.0.0.1", "1"),
    ("PSYNC", "?", "-1"),
    ("FAILOVER",),
    ("BGSAVE",),
    ("BGREWRITEAOF",),
    ("LASTSAVE",),
    ("LATENCY", "RESET"),
    ("MEMORY", "PURGE"),
    ("COMMAND", "GETKEYS", "GET", "x"),
    ("OBJECT", "ENCODING", "t1:task:1"),
    ("CLIENT", "TRACKING", "ON"),
    ("CLIENT", "UNBLOCK", "1"),
    ("CLIENT", "NO-EVICT", "ON"),
    ("FUNCTION", "FLUSH"),
    ("FUNCTION", "LIST"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
    ("EVAL_RO", "return 1", "0"),
    ("DUMP", "t1:task:1"),
    ("RESTORE", "t1:task:9", "0", "x"),
    ("RENAME", "t1:task:1", "t2:task:1"),
    ("SORT", "t1:gpuflow.tasks", "BY", "t2:task:*", "GET", "t2:task:*"),
    ("SUNIONSTORE", "t2:x", "t1:gpuflow.unfinished"),
    ("ZUNIONSTORE", "t2:x", "1", "t1:gpuflow.tasks"),
    ("BITOP", "AND", "t2:x", "other"),
    ("APPEND", "other", "x"),
    ("XADD", "t2:gpuflow.audit", "*", "a", "b"),
    ("LPUSH", "t2:tasks", "{{}}"),
    ("EXPIRE", "t2:task:1", "1"),
)
AUDIT = tuple(
    (command, "t1:gpuflow.audit", *rest)
    for command, *rest in (("DEL",), ("UNLINK",), ("SET", "x"), ("EXPIRE", "1"), ("XTRIM", "MAXLEN", "0"),
                           ("XDEL", "1-1"), ("PERSIST",), ("HSET", "a", "b"), ("XSETID", "9999999999999-0"))
)  # fmt: skip
TOKENS = (
    ("HGETALL", "t1:access:token:0"),
    ("ZRANGE", "t1:access:tokens", "0", "-1"),
    ("HSET", "t1:access:token:0", "role", "admin"),
    ("DEL", "t1:access:token:0"),
)
FORGED = ("PUBLISH", "t1:/0.celery.pidbox", '{"method": "shutdown"}')
WRITES = (
    ("SET", "t1:celery-task-meta-1", "{}"),
    ("SETEX", "t1:celery-task-meta-1", "1", "{}"),
    ("DEL", "t1:celery-task-meta-1"),
    ("DEL", "t1:task:1"),
    ("HSET", "t1:worker:w1", "state", "IDLE"),
    ("ZADD", "t1:gpuflow.dead", "1", "x"),
    ("HSET", "t1:gpuflow.schedules", "x", "{}"),
    ("ZADD", "t1:gpuflow.leases", "1", "x"),
    ("HSET", "t1:gpuflow.unacked", "x", "{}"),
    ("RPOP", "t1:tasks"),
    ("BRPOP", "t1:tasks", "1"),
    ("LMOVE", "t1:tasks", "t1:cpu", "LEFT", "LEFT"),
)
OF_ROLE: dict[ServiceRole, tuple[tuple[str, ...], ...]] = {
    ServiceRole.CLIENT: (
        *WRITES, *TOKENS, *AUDIT, FORGED, ("XADD", "t1:gpuflow.audit", "*", "action", "forged"),
        ("XRANGE", "t1:gpuflow.audit", "-", "+"), ("INFO",), ("PSUBSCRIBE", "t1:*"),
        ("PUBLISH", "t1:celery-task-meta-1", '{"status": "SUCCESS", "result": "FORGED"}'),
    ),
    ServiceRole.OPERATOR: (*TOKENS, *AUDIT, ("INFO",), ("HSET", "t1:redbeat:x", "a", "b")),
    ServiceRole.GATEWAY: (*AUDIT, ("HSET", "t1:redbeat:x", "a", "b")),
    ServiceRole.BEAT: (*TOKENS[2:], ("ACL", "USERS")),
    ServiceRole.FLOWER: (
        *WRITES, *TOKENS, *AUDIT, FORGED, ("HSET", "t1:task:1", "state", "SUCCEEDED"), ("LPUSH", "t1:tasks", "{}"),
        ("XADD", "t1:events:1", "*", "a", "b"), ("XRANGE", "t1:gpuflow.audit", "-", "+"),
    ),
    ServiceRole.FLOWER_ACTIONS: (*TOKENS, *AUDIT, ("HSET", "t1:redbeat:x", "a", "b")),
}  # fmt: skip
TABLE = [(role, attack) for role in ServiceRole for attack in (*SHARED, *OF_ROLE[role])]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("broker"))
    try:
        client = made.client
        client.set("other", "secret")
        client.hset("t2:task:1", "state", "QUEUED")
        client.hset("t1:task:1", "state", "QUEUED")
        client.set("t1:celery-task-meta-1", "{}")
        client.hset("t1:access:token:0", "role", "viewer")
        client.lpush("t1:tasks", "{}")
        client.xadd("t1:gpuflow.audit", {"action": "a"}, id="1-1")
        yield made
    finally:
        made.close()


def made_login(broker: Broker, role: ServiceRole, name: str = "main", **more: Any) -> ServiceLogin:
    prefix = more.pop("prefix", "t1:")
    options = {"replace": more.pop("replace", False), "only_fleet": more.pop("only_fleet", False)}
    login, given = service_users.new_login(
        role, name, address=broker.url, prefix=prefix, database=0, queues=["tasks"], **more
    )
    return service_users.create(broker.client, login, given, prefix=prefix, **options)


@pytest.fixture(scope="module")
def users(broker: Broker) -> Iterator[dict[ServiceRole, Any]]:
    made = {role: redis.Redis.from_url(made_login(broker, role).url, decode_responses=True) for role in ServiceRole}
    yield made
    for client in made.values():
        client.close()


@pytest.mark.parametrize(("role", "attack"), TABLE, ids=lambda one: one if isinstance(one, str) else " ".join(one)[:40])
def test_a_user_is_refused_and_nothing_has_changed(
    broker: Broker, users: dict[ServiceRole, Any], role: ServiceRole, attack: tuple[str, ...]
) -> None:
    before, user = everything(broker), users[role]
    with pytest.raises(ResponseError, match=r"(?i)no permissions|NOPERM|can't run|not allowed"):
        user.execute_command(*attack)
    assert everything(broker) == before
    assert user.ping()


@pytest.mark.parametrize("role", list(ServiceRole))
def test_a_script_has_no_more_rights_than_its_user(
    broker: Broker, users: dict[ServiceRole, Any], role: ServiceRole
) -> None:
    before, user = everything(broker), users[role]
    for call in ("'FLUSHALL'", "'GET', 'other'", "'DEL', 't2:task:1'", "'CONFIG', 'GET', '*'", "'KEYS', '*'"):
        sha = user.script_load(f"return redis.call({call})")
        with pytest.raises(ResponseError, match=r"(?i)permission|not allowed from script|can't run"):
            user.evalsha(sha, 0)
    if role is not ServiceRole.BEAT:
        sha = user.script_load("return redis.call('DEL', KEYS[1])")
        with pytest.raises(ResponseError, match=r"(?i)permission"):
            user.evalsha(sha, 1, "t1:gpuflow.audit")
    assert everything(broker) == before


def test_the_roles_have_the_commands_of_their_tables_and_no_others(
    broker: Broker, users: dict[ServiceRole, Any]
) -> None:
    dangerous = {
        "flushall",
        "keys",
        "scan",
        "config",
        "acl",
        "eval",
        "debug",
        "monitor",
        "shutdown",
        "replicaof",
        "select",
    }
    for role in ServiceRole:
        there = broker.client.acl_getuser(f"gpuflow-{role}-main")
        given = {part[1:] for part in there["commands"] if part.startswith("+")}
        assert given == set(RIGHTS[role].commands)
        assert not {name.partition("|")[0] for name in given} & dangerous


def test_a_user_that_forgets_its_login_is_nobody(broker: Broker) -> None:
    with redis.Redis.from_url(
        made_login(broker, ServiceRole.CLIENT, "resets").url, single_connection_client=True
    ) as user:
        assert user.execute_command("RESET")
        with pytest.raises(AuthenticationError):
            user.execute_command("GET", "other")


def test_a_replaced_user_is_cut_and_its_former_password_is_dead(broker: Broker) -> None:
    former = made_login(broker, ServiceRole.GATEWAY, "replaced")
    before = everything(broker)
    with pytest.raises(ServiceUserRefused, match="--replace"):
        made_login(broker, ServiceRole.GATEWAY, "replaced")
    assert everything(broker) == before
    with redis.Redis.from_url(former.url, single_connection_client=True) as connected:
        assert connected.ping()
        now = made_login(broker, ServiceRole.GATEWAY, "replaced", replace=True)
        assert now.connections_cut >= 1
        with pytest.raises((AuthenticationError, redis.exceptions.ConnectionError)):
            connected.ping()
    with pytest.raises(AuthenticationError):
        redis.Redis.from_url(former.url).ping()
    assert redis.Redis.from_url(now.url).ping()
    assert now.password not in repr(now) and former.password not in repr(everything(broker))
    service_users.delete(broker.client, now.user)
    with pytest.raises(AuthenticationError):
        redis.Redis.from_url(now.url).ping()


def test_only_who_manages_users_changes_them(broker: Broker) -> None:
    manager = made_login(broker, ServiceRole.GATEWAY, "manager", manages_users=True)
    with redis.Redis.from_url(manager.url, decode_responses=True) as client:
        assert client.execute_command("ACL", "SETUSER", "made", "off") == "OK"
        assert client.execute_command("ACL", "DELUSER", "made") == 1
    for role in set(ServiceRole) - {ServiceRole.GATEWAY, ServiceRole.BEAT}:
        with pytest.raises(ServiceUserRefused, match="only gateway and beat"):
            made_login(broker, role, "manager", manages_users=True)


@pytest.mark.parametrize("name", ["", "a b", "a\n", "../x", "a:b", "x" * 61, "a>b", "ä"])
def test_a_name_that_is_none(broker: Broker, name: str) -> None:
    before = everything(broker)
    with pytest.raises(ServiceUserRefused, match="cannot name a user"):
        made_login(broker, ServiceRole.CLIENT, name)
    assert everything(broker) == before


def test_a_name_that_makes_a_user_of_another_role(broker: Broker) -> None:
    with pytest.raises(ServiceUserRefused, match="another role"):
        made_login(broker, ServiceRole.FLOWER, "actions-main")


@pytest.mark.parametrize("prefix", ["", "gpu-lab:", "t1:task:", "lab1-"])
def test_a_fleet_without_a_wall_needs_a_word_of_its_operator(broker: Broker, prefix: str) -> None:
    before = everything(broker)
    with pytest.raises(ServiceUserRefused, match="--only-fleet"):
        made_login(broker, ServiceRole.CLIENT, "wide", prefix=prefix)
    assert everything(broker) == before
    login = made_login(broker, ServiceRole.CLIENT, "wide", prefix=prefix, only_fleet=True)
    service_users.delete(broker.client, login.user)


def test_others_are_neither_removed_nor_may_they_make_users(broker: Broker, users: dict[ServiceRole, Any]) -> None:
    before = everything(broker)
    for user in ("default", "gpuflow-worker-x", "nobody", "gpuflow-client-"):
        with pytest.raises(ServiceUserRefused, match="broker-users list"):
            service_users.delete(broker.client, user)
    login, given = service_users.new_login(
        ServiceRole.CLIENT, "by-an-operator", address=broker.url, prefix="t1:", database=0, queues=[]
    )
    with pytest.raises((BrokerRefuses, RedisError)):
        service_users.create(users[ServiceRole.OPERATOR], login, given, prefix="t1:", replace=False, only_fleet=False)
    assert everything(broker) == before


def test_a_client_hears_of_results_that_it_cannot_publish(broker: Broker, users: dict[ServiceRole, Any]) -> None:
    with users[ServiceRole.CLIENT].pubsub() as heard:
        heard.subscribe("t1:celery-task-meta-1")
        assert heard.get_message(timeout=5)["type"] == "subscribe"
        broker.client.publish("t1:celery-task-meta-1", "done")
        assert heard.get_message(timeout=5)["data"] == "done"
