"""What a token says, what each role may, and which rights of the broker a worker is given. Tables, no server."""

from __future__ import annotations

import fnmatch

import pytest

from gpuflow.broker.keys import Keys
from gpuflow.tokens.broker_users import is_worker_login, login_url, rules
from gpuflow.tokens.rights import FLEET, Grant, Right, Role
from gpuflow.tokens.separation import missing_wall, mistaken_family, wrong_database
from gpuflow.tokens.store import QUEUE_NAME, TokenRecord
from gpuflow.tokens.texts import Kind, new_token, read_token, same_digest

WORKER = Grant(role=Role.VIEWER, worker="w1", token_id="1" * 16)
MAY = {
    Role.VIEWER: {Right.ANY, Right.READ, Right.FILES},
    Role.SUBMITTER: {Right.ANY, Right.READ, Right.FILES, Right.SUBMIT},
    Role.OPERATOR: set(Right) - {Right.ADMIN},
    Role.ADMIN: set(Right),
}


@pytest.mark.parametrize("kind", list(Kind))
def test_a_token_is_read_as_it_was_made_and_shows_no_secret(kind: Kind) -> None:
    token = new_token(kind)

    assert read_token(token.text) == token
    assert token.text.startswith(f"{kind}_{token.id}_")
    assert len(token.text.split("_", 2)[2]) == 43, "32 bytes"
    assert token.text not in repr(token)
    assert new_token(kind).digest != token.digest


@pytest.mark.parametrize(
    "text",
    ["", "ut_", "ut_0123456789abcdef_", "xt_0123456789abcdef_" + "a" * 43, "ut_0123456789ABCDEF_" + "a" * 43,
     "ut_0123456789abcdef_" + "a" * 42, "ut_0123456789abcdef_" + "a" * 44, "ut_0123456789abcdef_" + "a" * 42 + "\n",
     "ut_0123456789abcde*_" + "a" * 43, "ut_0123456789abcdef_" + "ä" * 43],
)  # fmt: skip
def test_what_is_no_token_is_none(text: str) -> None:
    assert read_token(text) is None


def test_digests_are_compared_whatever_they_are() -> None:
    assert same_digest("a", "a")
    assert not same_digest("", "a")
    assert not same_digest("\udcff", "a")


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("right", list(Right))
def test_what_a_role_may(role: Role, right: Right) -> None:
    assert Grant(role=role, owner="ana").may(right) is (right in MAY[role])


def test_who_sees_whose_work() -> None:
    assert [Grant(role=role, owner="ana").sees("ben") for role in Role] == [False, False, True, True]
    assert [Grant(role=role, owner="ana").sees("ana") for role in Role] == [True] * 4
    assert not Grant(role=Role.VIEWER, owner="ana").sees("")
    assert Grant(role=Role.VIEWER).sees("ben")
    assert Grant(role=Role.VIEWER).may(Right.READ_ALL)
    assert FLEET.sees("ben") and FLEET.may(Right.ADMIN)


@pytest.mark.parametrize("right", list(Right))
def test_a_worker_has_files_and_sees_no_work(right: Right) -> None:
    assert WORKER.may(right) is (right in (Right.ANY, Right.FILES))
    assert not WORKER.sees("")


@pytest.mark.parametrize(
    ("grant", "named", "expected"),
    [
        (Grant(role=Role.SUBMITTER, owner="ana"), "", "ana"),
        (Grant(role=Role.SUBMITTER, owner="ana"), "ana", "ana"),
        (Grant(role=Role.SUBMITTER, owner="ana"), "ben", None),
        (Grant(role=Role.SUBMITTER), "ben", "ben"),
        (Grant(role=Role.OPERATOR, owner="ana"), "", "ana"),
        (Grant(role=Role.OPERATOR, owner="ana"), "ben", "ben"),
        (FLEET, "", ""),
        (FLEET, "ben", "ben"),
    ],
)
def test_as_whom_it_submits(grant: Grant, named: str, expected: str | None) -> None:
    assert grant.submits_as(named) == expected


# -- the user of a worker ---------------------------------------------------------------------------------------------


def record(prefix: str = "") -> tuple[TokenRecord, list[str]]:
    token = new_token(Kind.WORKER)
    made = TokenRecord(id=token.id, kind=Kind.WORKER, digest=token.digest, name="w1")
    return made, rules(made, prefix=prefix, database=0, queues=["tasks", "od*d"])


@pytest.mark.parametrize("prefix", ["", "t1:"])
def test_a_worker_reaches_no_token_and_no_other_fleet(prefix: str) -> None:
    _, given = record(prefix)
    patterns = [rule[1:] for rule in given if rule.startswith("~")]
    keys, others = Keys(prefix), Keys("t2:")

    def reached(key: str) -> bool:
        return any(fnmatch.fnmatchcase(key, pattern.replace("\\", "")) for pattern in patterns)

    assert [
        key for key in (keys.task("1"), keys.leases, keys.events("1"), keys.pipeline("1")) if not reached(key)
    ] == []
    hidden = (keys.token("1"), keys.tokens, keys.token_workers, keys.token_lock)
    foreign = (others.task("1"), others.leases, others.token("1"), "t2:tasks", "t2:gpu-40g", "t2:w1@h.celery.pidbox")
    assert [key for key in (*hidden, *foreign) if reached(key)] == []


@pytest.mark.parametrize(
    ("prefix", "family"),
    [
        ("", ""), ("t1:", ""), ("team1:", ""), ("prod.eu:", ""), ("beats-yes:", ""), ("my-gpu-lab:", ""),
        ("cpus:", ""),
        ("gpu-lab:", "gpu-"), ("cpu.x:", "cpu."), ("gpuflow.a:", "gpuflow."), ("task:", "task:"),
        ("celery-", "celery-task"), ("celery-tasks:", "celery-task"), ("t1:gpu-lab:", "gpu-"),
        ("t1:worker:", "worker:"), ("a:b:events:", "events:"),
        ("_kombu.binding.x:", "_kombu.binding"), ("gpu:", ""),
    ],
)  # fmt: skip
def test_a_prefix_that_looks_like_a_family_of_keys_is_found(prefix: str, family: str) -> None:
    assert mistaken_family(prefix) == family
    assert bool(missing_wall(prefix)) is (bool(family) or not prefix.endswith(":"))


@pytest.mark.parametrize("prefix", ["t1:", "prod.eu:", "cpus:", "gpu:", "gpuflow:", "tasks:", "a:b:"])
def test_a_worker_without_a_prefix_reaches_no_fleet_whose_prefix_is_a_wall(prefix: str) -> None:
    patterns = [rule[1:].replace("\\", "") for rule in record("")[1] if rule.startswith("~")]
    other = Keys(prefix)
    theirs = (
        other.token("1"), other.tokens, other.task("1"), other.leases, other.events("1"), f"{prefix}tasks",
        f"{prefix}celery-task-meta-1", f"{prefix}gpu-40g",
    )  # fmt: skip

    assert not missing_wall(prefix)
    assert [key for key in theirs if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)] == []


def test_a_fleet_without_a_prefix_is_in_database_0() -> None:
    assert [bool(wrong_database(*where)) for where in (("", 0), ("", 1), ("t1:", 1))] == [False, True, False]


def test_a_queue_names_no_key_of_another_fleet() -> None:
    assert [bool(QUEUE_NAME.fullmatch(name)) for name in ("plain", "a.b-c", "b:access:token:1", ":", "")] == [
        True, True, False, False, False
    ]  # fmt: skip


def test_a_name_is_no_pattern() -> None:
    _, given = record("t?:")

    assert "~t\\?:od\\*d" in given
    assert not [rule for rule in given if rule.startswith("~t?")]


def test_the_rights_begin_with_none_and_hold_nothing_that_reads_or_changes_the_server() -> None:
    made, given = record()
    commands = {rule[1:] for rule in given if rule.startswith("+")}

    assert given[:3] == ["reset", "on", f"#{made.digest}"]
    assert given.index("-@all") < min(given.index(f"+{name}") for name in commands)
    forbidden = {
        "acl", "config", "debug", "eval", "flushall", "flushdb", "keys", "scan", "randomkey", "monitor", "shutdown",
        "select", "swapdb", "script", "script|flush", "function", "client", "client|kill", "client|list", "replicaof",
        "copy", "module", "migrate", "restore", "dump", "reset", "auth",
        "object", "move", "rename", "pubsub", "slowlog", "save", "cluster",
    }  # fmt: skip
    assert commands & forbidden == set()
    assert not [name for name in commands if name.startswith("@")]


def test_the_password_is_not_among_the_rules() -> None:
    token = new_token(Kind.WORKER)
    made = TokenRecord(id=token.id, kind=Kind.WORKER, digest=token.digest, name="w1")

    assert token.text not in " ".join(rules(made, prefix="", database=3, queues=[]))
    assert "+select|3" in rules(made, prefix="", database=3, queues=[])
    assert token.digest not in repr(made)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:1/0", "redis://gpuflow-worker-{id}:{token}@h:1/0"),
        ("rediss://me:s%40@[::1]:1/2?ssl_ca_certs=a", "rediss://gpuflow-worker-{id}:{token}@[::1]:1/2?ssl_ca_certs=a"),
        ("unix:///run/r.sock?db=0&password=x", "unix://gpuflow-worker-{id}:{token}@/run/r.sock?db=0"),
    ],
)
def test_the_login_takes_the_place_of_any_other(url: str, expected: str) -> None:
    token = new_token(Kind.WORKER)
    made = TokenRecord(id=token.id, kind=Kind.WORKER, digest=token.digest, name="w1")

    shown = login_url(url, made, token.text)

    assert shown == expected.format(id=token.id, token=token.text)
    assert is_worker_login(shown)
    assert not is_worker_login(url)
