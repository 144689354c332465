"""`gpuflow workers create`, `rotate-token` and `delete`: workers with a token and a user of the broker of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpuflow.cli.errors import bad_input
from gpuflow.cli.options import json_option

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.tokens.workers import Login, WorkerTokens


@click.command("create")
@click.option("--name", required=True, metavar="NAME", help="Name of the worker; start it with --name NAME.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label that it is to have (repeatable).")
@click.option(
    "--type", "worker_type", type=click.Choice(["persistent", "ephemeral"]), default="persistent", show_default=True,
    help="Ephemeral: it runs one job, then exits.",
)  # fmt: skip
@click.option(
    "--queue", "queues", multiple=True, metavar="NAME", help="A plain Celery queue that it may serve, too (repeatable)."
)
@click.option(
    "--only-fleet", is_flag=True,
    help="The server has no other fleet, and nobody else reaches its port: needed without a GPUFLOW_KEY_PREFIX, and "
    "where it asks for no password.",
)  # fmt: skip
@json_option
def create_worker(
    name: str, labels: tuple[str, ...], worker_type: str, queues: tuple[str, ...], only_fleet: bool, as_json: bool
) -> None:
    """Make a token for a worker, and a user of the broker with the rights that a worker needs. It is shown once."""
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.tokens.store import TokenRefused

    pairs = dict(_label(text) for text in labels)
    with connected() as app, reachable():
        try:
            login = worker_tokens(app).create(
                name, labels=pairs, worker_type=worker_type, queues=queues, only_fleet=only_fleet
            )
        except TokenRefused as error:
            raise bad_input(str(error)) from None
    _show(login, as_json)


@click.command("rotate-token")
@click.argument("name", metavar="NAME")
@json_option
def rotate_worker_token(name: str, as_json: bool) -> None:
    """Give a worker another token and cut its connections now. What it ran runs elsewhere."""
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.tokens.store import TokenRefused

    with connected() as app, reachable():
        try:
            login = worker_tokens(app).rotate(name)
        except TokenRefused as error:
            raise bad_input(str(error)) from None
    _show(login, as_json)


@click.command("delete")
@click.argument("name", metavar="NAME")
@click.option("--force", is_flag=True, help="Also where it works: its connections are cut now.")
def delete_worker(name: str, force: bool) -> None:
    """Remove the token of a worker that has gone, its user of the broker, and its entry."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.fleet.registry import Fleet
    from gpuflow.tokens.store import TokenRefused

    with connected() as app, reachable():
        fleet = Fleet(app.redis, app.keys)
        entry = fleet.find(name)
        if entry is not None and not entry.is_gone and not force:
            raise bad_input(
                f"worker {name} is {entry.state}; stop it first (`gpuflow workers drain {name}`), or add --force"
            )
        try:
            warnings = worker_tokens(app).delete(name)
        except TokenRefused as error:
            raise bad_input(str(error)) from None
        fleet.forget(name)
    output.line(f"{name} has no token any more")
    for warning in warnings:
        output.note(warning)


def worker_tokens(app: GPUFlow) -> WorkerTokens:
    """Return what changes the worker tokens of a fleet, as its operator."""
    from gpuflow.tokens.store import TokenStore
    from gpuflow.tokens.workers import WorkerTokens

    store = TokenStore(app.redis, app.keys)
    return WorkerTokens(app.redis, store, address=app.broker_address(), queues=[app.settings.task_topic])


def _label(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise bad_input(f"--label {text!r} has no value; write --label NAME=VALUE")
    return key.strip(), value.strip()


def _show(login: Login, as_json: bool) -> None:
    from gpuflow.cli import output

    if as_json:
        output.emit_json(login.public())
        return
    record = login.record
    options = [f"--label {key}={value}" for key, value in record.labels.items()]
    options += ["--ephemeral"] if record.worker_type == "ephemeral" else []
    command = " ".join(["celery -A gpuflow worker --name", record.name, *options])
    output.pairs({"token": login.token.text, "REDIS_URL": login.url, "start": command})
    output.note("this is shown once; give both to the worker alone, as REDIS_URL and GPUFLOW_WORKER_TOKEN")
    output.note_login(record.name, login.connections_cut, login.warnings)
    if not login.is_kept:
        output.note("the broker does not keep its users over a restart: `celery -A gpuflow beat` makes them again")
