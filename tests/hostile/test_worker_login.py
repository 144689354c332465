"""What the login of a worker is refused by a real server, and that nothing has changed after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis
from redis.exceptions import AuthenticationError, ResponseError

from gpuflow.broker.keys import Keys
from gpuflow.tokens import broker_users
from gpuflow.tokens.rights import Role
from gpuflow.tokens.store import TokenRefused, TokenStore
from gpuflow.tokens.texts import Kind, TokenText, new_token, read_token
from gpuflow.tokens.workers import WorkerTokens
from tests.support.fleet import Broker

KEYS = Keys("t1:")
#: Each is a command that a worker that means harm might send.
ATTACKS: tuple[tuple[str, ...], ...] = (
    ("ACL", "LIST"),
    ("ACL", "WHOAMI"),
    ("ACL", "SETUSER", "me", "on", "nopass", "+@all", "~*"),
    ("ACL", "SETUSER", "default", "off"),
    ("ACL", "DELUSER", "default"),
    ("ACL", "GETUSER", "default"),
    ("CONFIG", "GET", "requirepass"),
    ("CONFIG", "SET", "dir", "/tmp"),
    ("CONFIG", "REWRITE"),
    ("SCRIPT", "FLUSH"),
    ("SCRIPT", "KILL"),
    ("FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('x', function() return 1 end)"),
    ("EVAL", "return redis.call('GET', 'other')", "0"),
    ("DEBUG", "SLEEP", "0"),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("SWAPDB", "0", "1"),
    ("SELECT", "1"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("RANDOMKEY",),
    ("DBSIZE",),
    ("MONITOR",),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("CLIENT", "PAUSE", "1000"),
    ("SHUTDOWN", "NOSAVE"),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("SLOWLOG", "GET"),
    ("MIGRATE", "127.0.0.1", "1", "t1:task:1", "0", "10"),
    ("PUBSUB", "CHANNELS"),
    ("GET", "other"),
    ("SET", "other", "x"),
    ("GET", "t2:task:1"),
    ("DEL", "t2:task:1"),
    ("COPY", "t2:task:1", "t1:task:stolen"),
    ("COPY", "t1:task:1", "t1:task:1", "DB", "1"),
    ("MOVE", "t1:task:1", "1"),
    ("FCALL", "x", "0"),
    ("COPY", "t1:access:tokens", "t1:task:stolen"),
    ("LMOVE", "t1:tasks", "t2:tasks", "LEFT", "LEFT"),
    ("HGETALL", "t1:access:token:{person}"),
    ("HSET", "t1:access:token:{person}", "role", "admin"),
    ("DEL", "t1:access:token:{person}"),
    ("ZRANGE", "t1:access:tokens", "0", "-1"),
    ("HGETALL", "t1:access:workers"),
    ("SET", "t1:access:lock", "mine"),
    ("SUBSCRIBE", "t2:/0.celery.pidbox"),
    ("PUBLISH", "t2:/0.celery.pidbox", "{{}}"),
    ("PSUBSCRIBE", "*"),
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("broker"))
    try:
        made.client.set("other", "secret")
        made.client.hset("t2:task:1", "state", "QUEUED")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def store(broker: Broker) -> TokenStore:
    return TokenStore(broker.client, KEYS)


@pytest.fixture(scope="module")
def tokens(broker: Broker, store: TokenStore) -> WorkerTokens:
    return WorkerTokens(broker.client, store, address=broker.url, queues=["tasks"])


@pytest.fixture(scope="module")
def person(store: TokenStore) -> TokenText:
    return store.create_user_token(Role.SUBMITTER, owner="ana")[1]


@pytest.fixture(scope="module")
def worker(tokens: WorkerTokens, person: TokenText) -> Iterator[Any]:
    with redis.Redis.from_url(tokens.create("w1", labels={}).url, decode_responses=True) as made:
        assert made.ping()
        yield made


def everything(broker: Broker) -> dict[str, Any]:
    client = broker.client
    kinds = {"string": client.get, "hash": client.hgetall, "list": lambda k: client.lrange(k, 0, -1)}
    return {
        **{key: kinds.get(client.type(key), client.dump)(key) for key in client.keys("*")},
        "users": client.acl_list(),
    }


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: " ".join(attack)[:40])
def test_a_worker_is_refused_and_nothing_has_changed(
    broker: Broker, worker: Any, person: TokenText, attack: tuple[str, ...]
) -> None:
    before = everything(broker)

    with pytest.raises(ResponseError, match=r"(?i)no permissions|NOPERM|can't run|not allowed"):
        worker.execute_command(*(part.format(person=person.id) if "{" in part else part for part in attack))

    assert everything(broker) == before
    assert worker.ping()


def test_a_script_has_no_more_rights_than_its_worker(broker: Broker, worker: Any, person: TokenText) -> None:
    for command, key in (("GET", "other"), ("HGETALL", f"t1:access:token:{person.id}"), ("HGETALL", "t2:task:1")):
        sha = worker.script_load(f"return redis.call('{command}', KEYS[1])")
        for number, keys in ((1, [key]), (0, [])):
            body = sha if number else worker.script_load(f"return redis.call('{command}', '{key}')")
            with pytest.raises(ResponseError, match=r"(?i)permission"):
                worker.evalsha(body, number, *keys)


def test_the_server_and_the_store_hold_no_token(broker: Broker, tokens: WorkerTokens, person: TokenText) -> None:
    login = tokens.create("canary", labels={"site": "a"})
    rotated = tokens.rotate("canary")
    held = repr(everything(broker)) + repr(broker.client.slowlog_get(1000)) + repr(login) + repr(rotated)

    for secret in (login.token.text, rotated.token.text, person.text):
        assert secret not in held
        assert secret.split("_", 2)[2] not in held
    assert rotated.token.digest in held, "the digest is the password of the user"


def test_a_rotated_token_is_dead_and_its_connections_are_cut(
    broker: Broker, store: TokenStore, tokens: WorkerTokens
) -> None:
    login = tokens.create("rotated", labels={})
    with redis.Redis.from_url(login.url, single_connection_client=True) as open_connection:
        assert open_connection.ping()
        assert tokens.rotate("rotated").connections_cut == 1
        with pytest.raises(redis.exceptions.ConnectionError):
            open_connection.ping()
    assert store.check(login.token) is None


def test_a_deleted_worker_is_gone_everywhere(broker: Broker, store: TokenStore, tokens: WorkerTokens) -> None:
    login = tokens.create("gone", labels={})
    tokens.delete("gone")

    with pytest.raises(AuthenticationError):
        redis.Redis.from_url(login.url).ping()
    assert store.check(login.token) is None
    assert store.find_worker("gone") is None
    assert broker_users.user_of(login.record) not in broker_users.names(broker.client)
    with pytest.raises(TokenRefused):
        tokens.rotate("gone")


def test_users_that_a_restart_has_lost_are_made_again_and_void_ones_are_not(
    broker: Broker, store: TokenStore, tokens: WorkerTokens
) -> None:
    login, void = tokens.create("kept", labels={}), tokens.create("void", labels={})
    store.replace(void.record.id, "")
    broker.client.acl_deluser(broker_users.user_of(login.record), broker_users.user_of(void.record))

    assert tokens.restore() == ["kept"]
    assert tokens.restore() == []
    assert redis.Redis.from_url(login.url).ping()
    with pytest.raises(AuthenticationError):
        redis.Redis.from_url(void.url).ping()


def tokens_of(broker: Broker, prefix: str, *, url: str = "", client: Any = None) -> WorkerTokens:
    url = url or broker.url
    client = client or redis.Redis.from_url(url, decode_responses=True)
    return WorkerTokens(client, TokenStore(client, Keys(prefix)), address=url, queues=["tasks"])


@pytest.mark.parametrize("prefix", ["", "gpu-lab:", "t1:task:", "celery-", "lab1-"])
def test_a_worker_that_would_reach_other_fleets_needs_a_word_of_its_operator(broker: Broker, prefix: str) -> None:
    tokens, before = tokens_of(broker, prefix), broker.client.acl_users()
    with pytest.raises(TokenRefused, match="--only-fleet"):
        tokens.create("wide", labels={})
    assert broker.client.acl_users() == before
    assert not broker.client.keys(f"{prefix}access:*")

    login = tokens.create("wide", labels={}, only_fleet=True)
    with redis.Redis.from_url(login.url) as worker:
        assert worker.ping()
    tokens.delete("wide")


def test_a_worker_without_a_prefix_reaches_no_other_fleet_and_no_token(broker: Broker, person: TokenText) -> None:
    login = tokens_of(broker, "").create("bare", labels={}, only_fleet=True)
    before = everything(broker)
    with redis.Redis.from_url(login.url, decode_responses=True) as worker:
        assert worker.hget("task:1", "state") is None
        for command in (
            ("HGETALL", f"t1:access:token:{person.id}"), ("HSET", f"t1:access:token:{person.id}", "role", "admin"),
            ("HGETALL", "t2:task:1"), ("LPUSH", "t1:tasks", "x"), ("HGETALL", f"access:token:{login.record.id}"),
            ("ZRANGE", "access:tokens", "0", "-1"), ("GET", "other"), ("SELECT", "1"), ("KEYS", "*"),
        ):  # fmt: skip
            with pytest.raises(ResponseError, match=r"(?i)no permissions|NOPERM"):
                worker.execute_command(*command)
    assert everything(broker) == before


def test_a_worker_that_forgets_its_login_is_nobody(broker: Broker, tokens: WorkerTokens) -> None:
    """Every server lets RESET through; it leaves a connection of the default user, which has a password."""
    with redis.Redis.from_url(tokens.create("resets", labels={}).url, single_connection_client=True) as worker:
        assert worker.execute_command("RESET")
        with pytest.raises(AuthenticationError):
            worker.execute_command("GET", "other")


def test_a_fleet_without_a_prefix_has_no_worker_tokens_beside_database_0(broker: Broker) -> None:
    url = broker.url.rpartition("/")[0] + "/1"
    with pytest.raises(TokenRefused, match="database 0"):
        tokens_of(broker, "", url=url).create("aside", labels={}, only_fleet=True)

    login = tokens_of(broker, "t3:", url=url).create("aside", labels={})
    with redis.Redis.from_url(login.url.rpartition("/")[0] + "/0") as worker, pytest.raises(ResponseError):
        worker.hgetall("task:1")


@pytest.mark.parametrize("queue", ["t2:access:token:1", "t2:task:1", "access:tokens", "a b", ""])
def test_a_queue_of_a_worker_is_no_key_of_another_fleet(tokens: WorkerTokens, queue: str) -> None:
    with pytest.raises(TokenRefused, match="cannot name a queue"):
        tokens.create("queues", labels={}, queues=[queue])


def test_a_server_that_asks_for_no_password_is_refused_or_told(broker: Broker, tokens: WorkerTokens) -> None:
    broker.client.execute_command("ACL", "SETUSER", "default", "nopass")
    try:
        with pytest.raises(TokenRefused, match="requirepass"):
            tokens.create("open", labels={})
        assert "requirepass" in tokens.create("open", labels={}, only_fleet=True).warnings[0]
    finally:
        password = broker.url.partition("redis://:")[2].partition("@")[0]
        broker.client.execute_command("ACL", "SETUSER", "default", "resetpass", f">{password}")
    assert tokens.create("closed", labels={}).warnings == ()


def test_a_rotation_that_is_refused_changes_nothing(broker: Broker, store: TokenStore, tokens: WorkerTokens) -> None:
    login = tokens.create("held", labels={})
    client, before = broker.client, everything(broker)
    for denied in ("acl", "client|kill"):
        client.execute_command("ACL", "SETUSER", "less", "on", "nopass", "~*", "&*", "+@all", f"-{denied}")
        url = broker.url.replace("redis://:", "redis://less:")
        with redis.Redis.from_url(url, decode_responses=True) as less:
            for change in ("rotate", "delete"):
                with pytest.raises(broker_users.BrokerRefuses):
                    getattr(tokens_of(broker, "t1:", client=less), change)("held")
        client.acl_deluser("less")

    assert everything(broker) == before
    assert store.check(login.token) is not None
    assert redis.Redis.from_url(login.url).ping()


@pytest.mark.parametrize("step", ["replace", "apply"])
def test_a_rotation_that_dies_leaves_nobody_in_and_can_be_given_again(
    tokens: WorkerTokens, store: TokenStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = tokens.create(f"dies-{step}", labels={})

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store if step == "replace" else broker_users, step, dies)
        with pytest.raises(KeyboardInterrupt):
            tokens.rotate(login.record.name)
    with pytest.raises(AuthenticationError):
        redis.Redis.from_url(login.url).ping()

    rotated = tokens.rotate(login.record.name)
    assert redis.Redis.from_url(rotated.url).ping()
    with pytest.raises(AuthenticationError):
        redis.Redis.from_url(login.url).ping()
    assert tokens.restore() == []


def test_users_from_an_older_file_of_the_server_are_mended(broker: Broker, tokens: WorkerTokens) -> None:
    former, gone, ruled = (tokens.create(name, labels={}) for name in ("stale", "stale-gone", "stale-rules"))
    now = tokens.rotate("stale")
    tokens.delete("stale-gone")
    setuser, client = ("ACL", "SETUSER"), broker.client
    client.execute_command(*setuser, broker_users.user_of(former.record), "resetpass", f"#{former.token.digest}")
    client.execute_command(*setuser, broker_users.user_of(gone.record), "on", f"#{gone.token.digest}", "~*", "+@all")
    client.execute_command(*setuser, broker_users.user_of(ruled.record), "~*", "+@all")

    with redis.Redis.from_url(former.url, single_connection_client=True) as connected:
        assert connected.ping()
        assert sorted(tokens.restore()) == ["stale", "stale-rules"]
        with pytest.raises(redis.exceptions.ConnectionError):
            connected.ping()
    assert tokens.restore() == []
    assert redis.Redis.from_url(now.url).ping()
    for old in (former, gone):
        with pytest.raises(AuthenticationError):
            redis.Redis.from_url(old.url).ping()
    with redis.Redis.from_url(ruled.url) as worker, pytest.raises(ResponseError):
        worker.get("other")


def test_a_server_that_cannot_write_its_file_of_users_is_told(broker: Broker) -> None:
    class Failing:
        def execute_command(self, *_: str) -> None:
            raise ResponseError("There was an error trying to save the ACLs. Please check the server logs")

    with pytest.raises(broker_users.UsersNotSaved, match="server logs"):
        broker_users.save(cast("redis.Redis", Failing()))
    assert broker_users.save(broker.client) is False, "this server has no such file"


def test_a_name_is_taken_once_and_a_refused_server_leaves_nothing(
    broker: Broker, store: TokenStore, tokens: WorkerTokens
) -> None:
    tokens.create("once", labels={})
    with pytest.raises(TokenRefused, match="rotate-token once"):
        tokens.create("once", labels={})
    for name in ("", "a b", "a:b", "a\n", "x" * 101, "../x"):
        with pytest.raises(TokenRefused):
            tokens.create(name, labels={})
    client = broker.client
    client.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-acl"])
    url = broker.url.replace("redis://:", "redis://limited:")
    with redis.Redis.from_url(url, decode_responses=True) as limited:
        own = WorkerTokens(limited, TokenStore(limited, KEYS), address=url, queues=[])
        with pytest.raises(broker_users.BrokerRefuses):
            own.create("nobody", labels={})
    assert store.find_worker("nobody") is None


def test_a_create_that_is_sent_again_changes_nothing(broker: Broker, store: TokenStore) -> None:
    token = new_token(Kind.USER)
    for _ in range(2):
        assert store._create(token, "", {"role": "viewer", "owner": "ana"}, 60.0) == "created"
    first = broker.client.hgetall(KEYS.token(token.id))
    other = new_token(Kind.USER, token.id)
    assert store._create(other, "", {"role": "admin"}, None) == "taken", "an id is never given twice"
    assert broker.client.hgetall(KEYS.token(token.id)) == first


def test_a_token_ends_by_the_servers_clock(broker: Broker, store: TokenStore) -> None:
    record, token = store.create_user_token(Role.ADMIN, owner=None, valid_seconds=3600)
    grant = store.check(token)
    assert grant is not None
    assert store.still_valid([grant]) == [True]
    broker.client.hset(KEYS.token(record.id), "expires_at", "1.0")

    assert store.check(token) is None
    assert store.still_valid([grant]) == [False]
    assert store.check(new_token(Kind.USER)) is None
    swapped = read_token(token.text.replace("ut_", "wt_", 1))
    assert swapped is not None and store.check(swapped) is None
