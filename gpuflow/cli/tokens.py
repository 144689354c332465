"""`gpuflow tokens`: tokens of people for the gateway, made, listed and revoked at the broker itself."""

from __future__ import annotations

import click

from gpuflow.cli.errors import bad_input
from gpuflow.cli.options import json_option


@click.group(short_help="Make, list and revoke the tokens of people.")
def tokens() -> None:
    """Make, list and revoke the tokens by which people use the gateway."""


@tokens.command("create")
@click.option(
    "--role", required=True, type=click.Choice(["viewer", "submitter", "operator", "admin"]),
    help="What it may do; each role includes those before it.",
)  # fmt: skip
@click.option("--owner", metavar="NAME", help="It reads and submits as this owner; of operators, the default.")
@click.option("--all-owners", is_flag=True, help="It sees the work of all owners (viewer, submitter).")
@click.option("--label", default="", metavar="TEXT", help="What it is for.")
@click.option("--expires-in", metavar="TIME", help="How long it is valid, such as 30d (default: until it is revoked).")
@json_option
def create(role: str, owner: str | None, all_owners: bool, label: str, expires_in: str | None, as_json: bool) -> None:
    """Make a token. It is shown once; the broker keeps its digest alone."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.spec.units import duration_seconds
    from gpuflow.tokens.rights import Role
    from gpuflow.tokens.store import TokenRefused, TokenStore

    try:
        seconds = None if expires_in is None else duration_seconds(expires_in)
    except ValueError as error:
        raise bad_input(f"--expires-in {expires_in!r}: {error}") from None
    if owner is not None and all_owners:
        raise bad_input("--owner and --all-owners contradict each other; give one")
    if role in ("viewer", "submitter") and owner is None and not all_owners:
        raise bad_input(f"a {role} needs --owner NAME; or --all-owners, to see the work of all")
    with connected() as app, reachable():
        try:
            record, token = TokenStore(app.redis, app.keys).create_user_token(
                Role(role), owner=owner, label=label, valid_seconds=seconds
            )
        except TokenRefused as error:
            raise bad_input(str(error)) from None
    if as_json:
        output.emit_json({**record.public(), "token": token.text})
        return
    output.pairs({"token": token.text, "id": record.id, "role": role, "owner": owner or "all"})
    output.note("this is shown once; send it as `Authorization: Bearer TOKEN`")


@tokens.command("list")
@json_option
def list_tokens(as_json: bool) -> None:
    """List the tokens of people."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.explaining import server_time
    from gpuflow.tokens.store import TokenStore
    from gpuflow.tokens.texts import Kind

    with connected() as app, reachable():
        found, now = TokenStore(app.redis, app.keys).all(Kind.USER), server_time(app)
    if as_json:
        output.emit_json([record.public() for record in found])
        return
    output.table(
        ["id", "role", "owner", "label", "made", "expires"],
        [
            [
                record.id,
                str(record.role),
                record.owner or "all",
                record.label,
                output.when_ago(record.created_at, now),
                output.when_due(record.expires_at, now) or "never",
            ]
            for record in found
        ],
        empty="no tokens; make one with `gpuflow tokens create --role submitter --owner NAME`",
    )


@tokens.command("revoke")
@click.argument("token_id", metavar="ID")
def revoke(token_id: str) -> None:
    """Revoke a token: gateways refuse it within seconds, and end its streams."""
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.tokens.store import TokenStore
    from gpuflow.tokens.texts import is_token_id

    with connected() as app, reachable():
        if not is_token_id(token_id) or not TokenStore(app.redis, app.keys).revoke_user_token(token_id):
            raise bad_input(f"no token {token_id!r}; `gpuflow tokens list` lists the ids")
    output.line(f"{token_id} is revoked")
