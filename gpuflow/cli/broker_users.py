"""`gpuflow broker-users`: logins at the broker for clients, operators, gateways, beat and Flower, with least rights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from gpuflow.cli.errors import bad_input
from gpuflow.cli.options import json_option

if TYPE_CHECKING:
    from gpuflow.settings import Settings
    from gpuflow.tokens.service_users import ServiceLogin

_ROLES = ("client", "operator", "gateway", "beat", "flower", "flower-actions")


@click.group("broker-users", short_help="Make, list and remove users of the broker with least rights.")
def broker_users() -> None:
    """Make, list and remove users of the broker with least rights, one for each kind of process.

    \b
    client          submits, follows and reads; it writes no result of Celery, and no command of gpuflow cancels by it
    operator        also cancels, retries, resumes, schedules, and orders workers
    gateway         the same, and tokens of people
    beat            what beat does
    flower          pages that are read-only; no worker is asked or told anything
    flower-actions  with the buttons

    Workers have users with a token: `gpuflow workers create`. It needs Redis 7 or newer, or Valkey.
    """


def _described(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--role", required=True, type=click.Choice(_ROLES), help="What the process does."),
        click.option(
            "--name", default="main", show_default=True, metavar="NAME", help="The user is gpuflow-ROLE-NAME."
        ),
        click.option(
            "--queue", "queues", multiple=True, metavar="NAME", help="A Celery queue beside TASK_TOPIC (repeatable)."
        ),
        click.option(
            "--manage-users", is_flag=True,
            help="It may change users of the broker, for worker tokens (gateway, beat): the right of an administrator.",
        ),
        json_option,
    ):  # fmt: skip
        command = option(command)
    return command


@broker_users.command("create")
@_described
@click.option("--replace", is_flag=True, help="Give a user that is there another password, and cut its connections.")
@click.option(
    "--only-fleet", is_flag=True, help="The server has no other fleet, and nobody else reaches its port."
)  # fmt: skip
def create_user(
    role: str, name: str, queues: tuple[str, ...], manage_users: bool, replace: bool, only_fleet: bool, as_json: bool
) -> None:
    """Make a user at the broker. Its address is shown once; the broker keeps the SHA-256 of its password alone."""
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.tokens import service_users
    from gpuflow.tokens.changes import Change, note_change

    with connected() as app, reachable():
        login, given = _new(app.settings, app.broker_address(), role, name, queues, manage_users)
        try:
            login = service_users.create(
                app.redis, login, given, prefix=app.keys.prefix, replace=replace, only_fleet=only_fleet
            )
        except service_users.ServiceUserRefused as error:
            raise bad_input(str(error)) from None
        note_change(app.redis, app.keys, Change(action="broker-user.create", target=f"user:{login.user}", detail={
            "role": role, "manages_users": manage_users, "connections_cut": login.connections_cut,
        }))  # fmt: skip
    _show(login, as_json, with_line=False)


@broker_users.command("line")
@_described
@click.option(
    "--before-redis-7.2", "is_old", is_flag=True, help="Leave out a command that such a server does not know."
)
def user_line(role: str, name: str, queues: tuple[str, ...], manage_users: bool, is_old: bool, as_json: bool) -> None:
    """Print the line of a user for the server's ACL file, and its address. No server is asked.

    The line holds the SHA-256 of the password, the address the password itself.
    """
    from dataclasses import replace

    from gpuflow.settings import Settings
    from gpuflow.tokens.separation import missing_wall

    settings = Settings.load()
    if settings.redis_url is None:
        raise bad_input("REDIS_URL is not set; set it to the address of the broker, with any login or none")
    login, _ = _new(settings, settings.redis_url, role, name, queues, manage_users)
    if is_old:
        login = replace(login, line=login.line.replace(" +client|setinfo", ""))
    lack = missing_wall(settings.key_prefix)
    _show(replace(login, warnings=(lack,) if lack else (), is_kept=True), as_json, with_line=True)


@broker_users.command("list")
@json_option
def list_users(as_json: bool) -> None:
    """List the users that were made so, of all fleets of the server."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.tokens import service_users

    with connected() as app, reachable():
        found = service_users.listed(app.redis)
    if as_json:
        output.emit_json([{"user": user, "role": str(role)} for user, role in found.items()])
        return
    output.table(
        ["user", "role"],
        [[user, str(role)] for user, role in found.items()],
        empty="no such users; make one with `gpuflow broker-users create --role client`",
    )


@broker_users.command("delete")
@click.argument("user", metavar="USER")
def delete_user(user: str) -> None:
    """Remove a user and end its connections now."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.tokens import service_users
    from gpuflow.tokens.changes import Change, note_change

    with connected() as app, reachable():
        try:
            warnings = service_users.delete(app.redis, user)
        except service_users.ServiceUserRefused as error:
            raise bad_input(str(error)) from None
        note_change(app.redis, app.keys, Change(action="broker-user.delete", target=f"user:{user}", detail={}))
    output.line(f"{user} is removed")
    for warning in warnings:
        output.note(warning)


def _new(
    settings: Settings, address: str, role: str, name: str, queues: tuple[str, ...], manage_users: bool
) -> tuple[ServiceLogin, list[str]]:
    from gpuflow.tokens import service_users

    if urlsplit(address).scheme == "unix":
        raise bad_input(
            "the broker is reached by a socket, which has one user; give REDIS_URL as redis:// or rediss://"
        )
    try:
        return service_users.new_login(
            service_users.ServiceRole(role),
            name,
            address=address,
            prefix=settings.key_prefix,
            database=_database(address),
            queues=[settings.task_topic, *queues],
            manages_users=manage_users,
        )
    except service_users.ServiceUserRefused as error:
        raise bad_input(str(error)) from None


def _database(address: str) -> int:
    from redis.connection import parse_url

    parts: Any = parse_url(address)  # type: ignore[no-untyped-call]
    return int(parts.get("db") or 0)


def _show(login: ServiceLogin, as_json: bool, *, with_line: bool) -> None:
    from gpuflow.cli import output

    if as_json:
        output.emit_json(login.public())
        return
    output.pairs({"user": login.user, "REDIS_URL": login.url, **({"line": login.line} if with_line else {})})
    output.note("the address is shown once; give it to that process alone, as REDIS_URL")
    output.note_login(login.user, login.connections_cut, login.warnings)
    if not login.is_kept:
        output.note(
            "the broker forgets its users when it is restarted; set `aclfile` there, or put the line of "
            "`gpuflow broker-users line` into its configuration"
        )
