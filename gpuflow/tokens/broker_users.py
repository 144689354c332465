"""Users of the broker that workers log in as, with the least rights that a worker needs.

A user is named by the id of its token, and its password is the token; the server gets the SHA-256 alone. Its keys are
those of one fleet (one GPUFLOW_KEY_PREFIX) without `access:*`, its commands are listed one by one: none of them lists
keys, changes the server or its users, or reads what others do.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import redis
from redis.exceptions import NoPermissionError, ResponseError

from gpuflow.errors import GPUFlowError
from gpuflow.tokens.store import TokenRecord

_USER_PREFIX: Final = "gpuflow-worker-"
#: What of a text is a pattern to Redis.
_MAGIC: Final = re.compile(r"([\\*?\[\]])")
UUID_PATTERN: Final = "-".join("?" * count for count in (8, 4, 4, 4, 12))
#: Families of keys of a fleet. `<p>` is its prefix, `<name>` that of the worker, `<o>` the id of a Celery process that
#: waits for answers.
_KEYS: Final = (
    "<p>gpuflow.*",
    "<p>task:*",
    "<p>pipeline:*",
    "<p>events:*",
    "<p>merge:*",
    "<p>queue:*",
    "<p>worker:*",
    "<p>celery-task*",
    *(f"<p>{family}{more}" for family in ("cpu", "gpu") for more in ("", "-*", ".*", "\x06\x16*")),
    "<p>_kombu.binding*",
    "<p><name>@*.celery.pidbox*",
    "<p><o>.reply.celery.pidbox*",
)
#: Channels: Celery's commands and events, of one database, and its results.
_CHANNELS: Final = ("<p>/<db>.celery.pidbox", "<p>/<db>.celeryev/*", "<p>celery-task*")
_COMMANDS: Final = (
    # the connection
    "ping", "hello", "client|setinfo", "client|setname", "client|getname", "client|id", "quit", "time", "info",
    # keys
    "exists", "del", "unlink", "expire", "pexpire", "expireat", "persist", "ttl", "pttl", "type",
    # strings
    "get", "mget", "set", "setex", "psetex", "setnx", "append", "incr", "incrby", "incrbyfloat", "decr",
    # hashes
    "hget", "hmget", "hgetall", "hset", "hmset", "hsetnx", "hdel", "hexists", "hkeys", "hvals", "hlen", "hincrby",
    "hincrbyfloat", "hscan", "hstrlen",
    # lists
    "lpush", "rpush", "lpop", "rpop", "blpop", "brpop", "lrange", "lrem", "llen", "ltrim", "lindex", "lmove", "lpos",
    "lset",
    # sets
    "sadd", "srem", "smembers", "sismember", "smismember", "scard", "spop", "srandmember", "sscan",
    # sorted sets
    "zadd", "zrem", "zrange", "zrangebyscore", "zrevrange", "zrevrangebyscore", "zrangebylex", "zscore", "zmscore",
    "zcard", "zcount", "zincrby", "zpopmin", "zremrangebyscore", "zremrangebyrank", "zrank", "zscan", "zdiff",
    # streams
    "xadd", "xread", "xrange", "xrevrange", "xlen", "xtrim", "xinfo|stream",
    # messages to all
    "publish", "subscribe", "psubscribe", "unsubscribe", "punsubscribe",
    # steps
    "multi", "exec", "discard", "watch", "unwatch", "evalsha", "script|load", "script|exists",
)  # fmt: skip


#: What ACL GETUSER tells of a user.
Described = Mapping[str, Any]
#: A server without a file for its users says so, when it is asked to write them.
_NO_FILE: Final = "not configured to use an ACL file"


class BrokerRefuses(GPUFlowError):
    """The broker does not let this user change its users; use the administrator's REDIS_URL."""


class UsersNotSaved(GPUFlowError):
    """The server has a file for its users and could not write it: they are as before after its restart."""


def user_of(record: TokenRecord) -> str:
    """Return the name of a worker's user of the broker."""
    return user_of_id(record.id)


def user_of_id(token_id: str) -> str:
    """Return the name of the user of the worker whose token has an id."""
    return f"{_USER_PREFIX}{token_id}"


def rules(record: TokenRecord, *, prefix: str, database: int, queues: Sequence[str]) -> list[str]:
    """Return what `ACL SETUSER <name>` is given: it takes all rights away first. Pure.

    `queues` are the plain Celery queues that the worker may serve beside demand queues.
    """
    own = literal(prefix)
    filled = [
        pattern.replace("<p>", own)
        .replace("<o>", UUID_PATTERN)
        .replace("<db>", str(database))
        .replace("<name>", record.name)
        for pattern in (*(f"~{key}" for key in _KEYS), *(f"&{channel}" for channel in _CHANNELS))
    ]
    # A priority of a queue is a list of its own (`broker.priorities`).
    named = [pattern for queue in queues for pattern in (f"~{own}{literal(queue)}", f"~{own}{literal(queue)}\x06\x16*")]
    # SELECT is no right over keys: a worker of another database than 0 may select that one alone.
    select = [f"+select|{database}"] if database else []
    return ["reset", "on", f"#{record.digest}", *filled, *named, "-@all", *(f"+{name}" for name in _COMMANDS), *select]


def apply(client: redis.Redis, record: TokenRecord, given: Sequence[str]) -> None:
    """Make the user of a worker, or give it the password and the rights of `rules`. Raises BrokerRefuses."""
    try:
        _asked(client, "ACL", "SETUSER", user_of(record), *given)
    except ResponseError:
        # A server before Redis 7.2 does not know the command by which a client says what it is; clients do without.
        _asked(client, "ACL", "SETUSER", user_of(record), *(rule for rule in given if rule != "+client|setinfo"))


def database_of(client: redis.Redis) -> int:
    """Return the number of the database that a client uses."""
    raw: Any = client
    return int(raw.connection_pool.connection_kwargs.get("db") or 0)


def described(client: redis.Redis, records: Sequence[TokenRecord]) -> list[Described | None]:
    """Return what the server says of the user of each worker, None where it has none. Raises BrokerRefuses."""
    return _users(client, [user_of(record) for record in records])


def fingerprint(given: Sequence[str], there: Described) -> str:
    """Return a digest of the rules that a user was given and of what the server makes of them. Pure.

    It is another one when either has changed: an upgrade gives other rules, an old file of the server other rights.
    """
    return hashlib.sha256(json.dumps([list(given), there], sort_keys=True, default=str).encode()).hexdigest()


def takes_only(there: Described, record: TokenRecord) -> bool:
    """Say whether a user logs in by the token of a worker and by nothing else. Pure."""
    return there.get("passwords") == [record.digest] and "nopass" not in there.get("flags", ())


def is_open(client: redis.Redis) -> bool:
    """Say whether the server lets in whoever gives no password. Raises BrokerRefuses."""
    flags = (_users(client, ["default"])[0] or {}).get("flags", ())
    return "on" in flags and "nopass" in flags


def shut(client: redis.Redis, record: TokenRecord) -> int:
    """Let nobody in as a worker's user, end its connections, and return how many there were.

    The connections are cut first, so that a server that refuses that has changed nothing. Raises BrokerRefuses.
    """
    count = cut(client, record)
    _asked(client, "ACL", "SETUSER", user_of(record), "off", "resetpass")
    return count + cut(client, record)


def cut(client: redis.Redis, record: TokenRecord) -> int:
    """End all connections of a worker's user now, and return how many there were. Raises BrokerRefuses."""
    return int(_asked(client, "CLIENT", "KILL", "USER", user_of(record)))


def delete(client: redis.Redis, token_id: str) -> None:
    """Remove the user of a worker by the id of its token, which ends its connections. Raises BrokerRefuses."""
    _asked(client, "ACL", "DELUSER", user_of_id(token_id))


def names(client: redis.Redis) -> set[str]:
    """Return the names of the broker's users. Raises BrokerRefuses."""
    return {name.decode() if isinstance(name, bytes) else str(name) for name in _asked(client, "ACL", "USERS")}


def save(client: redis.Redis) -> bool:
    """Write the users to the server's ACL file; False where it has none, and forgets them when it ends.

    Raises UsersNotSaved.
    """
    try:
        _asked(client, "ACL", "SAVE")
    except (ResponseError, BrokerRefuses) as error:
        if _NO_FILE in str(error):
            return False
        raise UsersNotSaved(str(error) or "this user of the broker may not") from None
    return True


def login_url(url: str, record: TokenRecord, token: str) -> str:
    """Return the address of a broker with the login of a worker in the place of any other."""
    return login_url_of(url, user_of(record), token)


def login_url_of(url: str, user: str, password: str) -> str:
    """Return the address of a broker with this login in the place of any other."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("username", "password")]
    netloc = f"{quote(user, safe='')}:{quote(password, safe='')}@{host}"
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(query)))


def is_worker_login(url: str) -> bool:
    """Say whether the address of a broker has the login of a worker with a token of its own."""
    return unquote(urlsplit(url).netloc).startswith(_USER_PREFIX)


def _users(client: Any, names: Sequence[str]) -> list[Described | None]:
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.acl_getuser(name)
    try:
        found: list[Described | None] = pipe.execute()
    except NoPermissionError:
        raise BrokerRefuses from None
    return found


def literal(text: str) -> str:
    """Return a pattern of Redis that this text alone matches."""
    return _MAGIC.sub(r"\\\1", text)


def _asked(client: Any, *command: str) -> Any:
    try:
        return client.execute_command(*command)
    except NoPermissionError:
        raise BrokerRefuses from None
