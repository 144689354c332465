"""Users of the broker for clients, operators, gateways, beat and Flower, each with listed commands and keys.

Workers have users with a token (`broker_users`); these are logins of the operator's own processes, and no token of the
gateway. A user is named `gpuflow-<role>-<name>`. What a role may do is a table here, and tests run the life of a whole
fleet under it. Rights to read and to write are told apart, which needs Redis 7 or Valkey.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import redis
from redis.exceptions import NoPermissionError, ResponseError

from gpuflow.errors import GPUFlowError
from gpuflow.tokens import broker_users
from gpuflow.tokens.broker_users import UUID_PATTERN, BrokerRefuses, UsersNotSaved, literal, login_url_of
from gpuflow.tokens.separation import missing_wall, wrong_database
from gpuflow.tokens.store import QUEUE_NAME

#: Name of such a user, behind its role.
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,60}", re.ASCII)


class ServiceRole(StrEnum):
    """What a process does with the broker."""

    CLIENT = "client"
    OPERATOR = "operator"
    GATEWAY = "gateway"
    BEAT = "beat"
    FLOWER = "flower"
    FLOWER_ACTIONS = "flower-actions"


class ServiceUserRefused(GPUFlowError):
    """A user of the broker cannot be made or removed like that."""


@dataclass(frozen=True, kw_only=True)
class Rights:
    """Commands, and families of keys and channels. `<p>` is the prefix, `<db>` the database, `<o>` a Celery process.

    `selectors`: further rights, each of some commands over some keys; the others do not hold there. `listens`: channels
    that may be subscribed to, and not published to.
    """

    commands: tuple[str, ...]
    reads: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    selectors: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    listens: tuple[str, ...] = ()


_CONNECTION: Final = ("ping", "hello", "client|setinfo", "client|setname", "client|id", "quit", "time")
_STEPS: Final = ("multi", "exec", "discard", "watch", "unwatch", "evalsha", "script|load", "script|exists")
_READ: Final = (
    "exists", "ttl", "pttl", "type", "get", "mget",
    "hget", "hmget", "hgetall", "hexists", "hkeys", "hvals", "hlen", "hscan",
    "llen", "lrange", "lindex",
    "smembers", "sismember", "smismember", "scard", "sscan",
    "zrange", "zrangebyscore", "zrevrange", "zrevrangebyscore", "zrank", "zscore", "zmscore", "zcard", "zcount",
    "zdiff", "zscan",
    "xread", "xrange", "xrevrange", "xlen", "xinfo|stream",
)  # fmt: skip
#: The steps of a submit.
_SUBMIT: Final = (
    "set", "expire", "hset", "hdel", "hincrby", "lpush", "lrem", "ltrim", "sadd", "spop", "xadd", "zadd", "zrem",
    "publish", "subscribe", "unsubscribe",
)  # fmt: skip
#: The steps that steer tasks, pipelines and workers.
_STEER: Final = (
    *_SUBMIT, "del", "unlink", "persist", "pexpire", "setex", "setnx", "hsetnx", "hmset", "lpop", "rpop", "blpop",
    "rpush", "srem", "psubscribe", "punsubscribe",
)  # fmt: skip
#: Steps of beat alone.
_REPAIR: Final = (
    "hincrbyfloat", "lpos", "lmove", "xtrim", "srandmember", "zremrangebyscore", "zremrangebyrank", "zpopmin",
)  # fmt: skip
#: A Flower that hears what workers send has a queue for it.
_LISTEN: Final = ("sadd", "srem", "zadd", "zrem", "del", "expire", "blpop", "psubscribe", "punsubscribe")
#: What follows the name of a queue in that of a list of one priority (`broker.priorities`); in a file it is printable.
_PRIORITIES: Final = ("??[0-9]", "??10")
_QUEUES: Final = tuple(f"<p>{family}{more}" for family in ("cpu", "gpu") for more in ("", "-*", ".*", *_PRIORITIES))
_CONTROL_QUEUES: Final = tuple(f"<p>gpuflow.{name}*" for name in ("control", "notices", "callbacks"))
_RECORDS: Final = ("<p>task:*", "<p>pipeline:*", "<p>events:*", "<p>merge:*", "<p>queue:*")
#: All of `gpuflow.*` but the audit log.
_INDEXES: Final = ("<p>gpuflow.[^a]*", "<p>gpuflow.avoided")
_BINDINGS: Final = ("<p>_kombu.binding*",)
_SENT: Final = "<p>/<db>.celeryev/*"
_RESULTS: Final = "<p>celery-task*"
_PIDBOX: Final = "<p>/<db>.celery.pidbox"
_REPLIES: Final = "<p><o>.reply.celery.pidbox*"
_READ_AUDIT: Final = ("exists", "xread", "xrange", "xrevrange", "xlen", "xinfo|stream")
_AUDIT: Final = "<p>gpuflow.audit*"


def _appending(uses: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return what lets a role read and append to the audit log: no command that changes an entry holds over its keys.

    XADD can cut the log's front off (MAXLEN), and an ACL judges no arguments: `gpuflow audit --verify` finds that.

    A step names the log beside other keys, and all keys of a command must be of one selector. EVALSHA itself does
    nothing: each command of the step is judged by itself.
    """
    return (
        (("evalsha",), (*uses, _AUDIT)),
        (("xadd", *_READ_AUDIT), (_AUDIT,)),
        (("set",), ("<p>gpuflow.audit.sent:*",)),
    )


_STEERED: Final = (*_INDEXES, *_RECORDS, *_QUEUES, *_BINDINGS, "<p>worker:*", _RESULTS, _REPLIES)
_OPERATOR: Final = Rights(
    commands=(*_CONNECTION, *_STEPS, *_READ, *_STEER),
    uses=_STEERED,
    channels=(_PIDBOX, _SENT, _RESULTS),
    selectors=_appending(_STEERED),
)
#: That queue, and what kombu notes of it.
_EVENTS: Final = (
    "<p>celeryev.<o>*", *(f"<p>_kombu.binding{name}" for name in (".celeryev*", "_permanent.celeryev*", "_deadlines")),
)  # fmt: skip
RIGHTS: Final[dict[ServiceRole, Rights]] = {
    ServiceRole.CLIENT: Rights(
        commands=(*_CONNECTION, *_STEPS, *_READ, *_SUBMIT),
        reads=(*_INDEXES, "<p>worker:*", "<p>celery-task-meta-*"),
        uses=(
            *(f"<p>gpuflow.{name}" for name in (
                "ready", "delayed", "parked", "unfinished", "tasks", "pipelines", "queues", "fallbacks", "metrics",
                "merge", "merge.*", "sent:*", "bell:*", "waiters:*",
            )),
            *_CONTROL_QUEUES, *_RECORDS, *_QUEUES, *_BINDINGS, "<p>celery-taskset-meta-*",
        ),
        channels=(_SENT,),
        listens=(_RESULTS,),
        selectors=((("del",), ("<p>celery-taskset-meta-*",)),),  # a chord begins with it
    ),
    ServiceRole.OPERATOR: _OPERATOR,
    ServiceRole.GATEWAY: Rights(
        commands=(*_OPERATOR.commands, "info", "zremrangebyscore"),
        uses=(*_STEERED, "<p>access:*"),
        channels=_OPERATOR.channels,
        selectors=_appending((*_STEERED, "<p>access:*")),
    ),
    ServiceRole.BEAT: Rights(
        commands=(*_OPERATOR.commands, *_REPAIR, "info"),
        reads=("<p>access:*",),
        uses=(*_STEERED, _AUDIT, "<p>redbeat:*"),
        channels=_OPERATOR.channels,
    ),
    ServiceRole.FLOWER: Rights(
        commands=(*_CONNECTION, *_STEPS, *_READ, "info", *_LISTEN),
        reads=(*_INDEXES, *_RECORDS, *_QUEUES, "<p>worker:*", _RESULTS),
        uses=_EVENTS,
        channels=(_SENT,),
    ),
    ServiceRole.FLOWER_ACTIONS: Rights(
        commands=(*_OPERATOR.commands, "info"),
        uses=(*_STEERED, *_EVENTS),
        channels=_OPERATOR.channels,
        selectors=_appending(_STEERED),
    ),
}  # fmt: skip
#: What changes users of the server, for a gateway and a beat that look after worker tokens: an administrator's right.
_MANAGE: Final = ("acl|setuser", "acl|getuser", "acl|deluser", "acl|users", "acl|save", "client|kill")
_MAY_MANAGE: Final = (ServiceRole.GATEWAY, ServiceRole.BEAT)
_OPEN: Final = (
    "the broker lets in whoever gives no password, so a user with fewer rights keeps nobody out; set `requirepass`"
)
_OLD: Final = "the broker does not know rights to read and to write keys; it needs Redis 7 or newer, or Valkey"


@dataclass(frozen=True, kw_only=True)
class ServiceLogin:
    """A user of the broker. `url` and `password` are shown once; `line` is for the server's file of users."""

    user: str
    role: ServiceRole
    line: str
    url: str = field(repr=False)
    password: str = field(repr=False)
    connections_cut: int = 0
    is_kept: bool = False
    warnings: tuple[str, ...] = ()

    def public(self) -> dict[str, Any]:
        """Return what is shown once, JSON-able."""
        return {
            "user": self.user,
            "role": str(self.role),
            "redisUrl": self.url,
            "aclLine": self.line,
            "keptByServer": self.is_kept,
            "warnings": list(self.warnings),
        }


def user_of(role: ServiceRole, name: str) -> str:
    """Return the name of a user. Raises ServiceUserRefused."""
    if not NAME.fullmatch(name):
        raise ServiceUserRefused(f"{name[:80]!r} cannot name a user; use up to 60 letters, digits, '.', '_' and '-'")
    user = f"gpuflow-{role}-{name}"
    if role_of_login(f"redis://{user}@x") is not role:
        raise ServiceUserRefused(f"{user} reads like a user of another role; choose another name")
    return user


def role_of_login(url: str | None) -> ServiceRole | None:
    """Return the role of the user in the address of a broker; None for another user."""
    user = unquote(urlsplit(url or "").username or "")
    # The longest first: `gpuflow-flower-actions-x` is no user of the role `flower`.
    for role in sorted(ServiceRole, key=len, reverse=True):
        if user.startswith(f"gpuflow-{role}-"):
            return role
    return None


def rules(
    role: ServiceRole, *, digest: str, prefix: str, database: int, queues: Sequence[str], manages_users: bool = False
) -> list[str]:
    """Return what `ACL SETUSER <name>` and a line of an ACL file are given: all rights are taken away first. Pure.

    `queues` are the plain Celery queues of the fleet. Raises ServiceUserRefused.
    """
    if manages_users and role not in _MAY_MANAGE:
        raise ServiceUserRefused(f"a user of role {role} changes no users; only gateway and beat may")
    for queue in queues:
        if not QUEUE_NAME.fullmatch(queue):
            raise ServiceUserRefused(f"{queue[:100]!a} cannot name a queue here; use visible ASCII without ':'")
    rights, own = RIGHTS[role], literal(prefix)

    def filled(pattern: str) -> str:
        return pattern.replace("<p>", own).replace("<o>", UUID_PATTERN).replace("<db>", str(database))

    of_queues = [f"<p>{literal(name)}{more}" for name in queues for more in ("", *_PRIORITIES)]
    reads, uses = list(rights.reads), list(rights.uses)
    (uses if _QUEUES[0] in uses else reads).extend(of_queues)
    commands = [*rights.commands, *(_MANAGE if manages_users else ()), *([f"select|{database}"] if database else [])]
    return [
        "reset", "on", f"#{digest}",
        *(f"%R~{filled(key)}" for key in reads), *(f"~{filled(key)}" for key in uses),
        *(f"&{filled(channel)}" for channel in rights.channels),
        "-@all", *(f"+{name}" for name in dict.fromkeys(commands)),
        *(
            f"({' '.join(['-@all', *(f'~{filled(key)}' for key in keys), *(f'+{name}' for name in names)])})"
            for names, keys in rights.selectors
        ),
        *(f"(-@all +subscribe +unsubscribe &{filled(channel)})" for channel in rights.listens),
    ]  # fmt: skip


def line_of(user: str, given: Sequence[str]) -> str:
    """Return the line of an ACL file for a user with these rules."""
    return " ".join(["user", user, *given])


def new_login(
    role: ServiceRole,
    name: str,
    *,
    address: str,
    prefix: str,
    database: int,
    queues: Sequence[str],
    manages_users: bool = False,
) -> tuple[ServiceLogin, list[str]]:
    """Return a login with a new password, and its rules; no server is asked. Raises ServiceUserRefused."""
    user, password = user_of(role, name), secrets.token_urlsafe(32)
    given = rules(
        role,
        digest=hashlib.sha256(password.encode()).hexdigest(),
        prefix=prefix,
        database=database,
        queues=queues,
        manages_users=manages_users,
    )
    url = login_url_of(address, user, password)
    return ServiceLogin(user=user, role=role, line=line_of(user, given), url=url, password=password), given


def create(
    client: redis.Redis, login: ServiceLogin, given: Sequence[str], *, prefix: str, replace: bool, only_fleet: bool
) -> ServiceLogin:
    """Make the user at the server, and let the server write it down. Raises ServiceUserRefused, BrokerRefuses.

    `replace`: a user of this name gets this password and these rights, and its connections end. `only_fleet`: the
    operator says that no other fleet is on the server, and that nobody else reaches it.
    """
    asked: Any = client
    warnings = _walls(client, prefix, only_fleet=only_fleet)
    try:
        is_there = login.user in broker_users.names(client)
        if is_there and not replace:
            raise ServiceUserRefused(f"the broker has a user {login.user}; add --replace to give it another password")
        count = int(asked.execute_command("CLIENT", "KILL", "USER", login.user)) if is_there else 0
        asked.execute_command("ACL", "SETUSER", login.user, *_known(client, given))
        count += int(asked.execute_command("CLIENT", "KILL", "USER", login.user)) if is_there else 0
    except NoPermissionError:
        raise BrokerRefuses from None
    except ResponseError as error:
        raise ServiceUserRefused(f"{_OLD} ({error})") from None
    is_kept, not_saved = _saved(client)
    return ServiceLogin(
        user=login.user,
        role=login.role,
        line=login.line,
        url=login.url,
        password=login.password,
        connections_cut=count,
        is_kept=is_kept,
        warnings=(*warnings, *not_saved),
    )


def delete(client: redis.Redis, user: str) -> tuple[str, ...]:
    """Remove a user, which ends its connections; return warnings. Raises ServiceUserRefused, BrokerRefuses."""
    if user not in listed(client):
        raise ServiceUserRefused(
            f"the broker has no user {user[:100]!r} of these; list them with `gpuflow broker-users list`"
        )
    asked: Any = client
    try:
        asked.execute_command("ACL", "DELUSER", user)
    except NoPermissionError:
        raise BrokerRefuses from None
    return _saved(client)[1]


def listed(client: redis.Redis) -> dict[str, ServiceRole]:
    """Return the users of the server that are named like these, with their roles. Raises BrokerRefuses."""
    found = {
        name: role_of_login(f"redis://{name}@x") for name in sorted(broker_users.names(client)) if NAME.fullmatch(name)
    }
    return {name: role for name, role in found.items() if role is not None}


def _walls(client: redis.Redis, prefix: str, *, only_fleet: bool) -> tuple[str, ...]:
    if wrong := wrong_database(prefix, broker_users.database_of(client)):
        raise ServiceUserRefused(wrong)
    is_open = broker_users.is_open(client)
    found = [lack for lack in (missing_wall(prefix), _OPEN if is_open else "") if lack]
    if found and not only_fleet:
        raise ServiceUserRefused(found[0])
    return (_OPEN,) if is_open else ()


def _known(client: redis.Redis, given: Sequence[str]) -> list[str]:
    """Return the rules without the command that servers before Redis 7.2 do not know; clients do without."""
    asked: Any = client
    try:
        asked.execute_command("ACL", "DRYRUN", "default", "CLIENT", "SETINFO", "LIB-NAME", "x")
    except ResponseError:
        return [rule for rule in given if rule != "+client|setinfo"]
    return list(given)


def _saved(client: redis.Redis) -> tuple[bool, tuple[str, ...]]:
    try:
        return broker_users.save(client), ()
    except UsersNotSaved as error:
        return False, (f"the broker has not written its file of users ({error}); see its log, and send `ACL SAVE`",)


__all__ = [
    "RIGHTS", "Rights", "ServiceLogin", "ServiceRole", "ServiceUserRefused", "create", "delete", "line_of", "listed",
    "new_login", "role_of_login", "rules", "user_of",
]  # fmt: skip
