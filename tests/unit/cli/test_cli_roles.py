"""What `gpuflow broker-users --role` offers is what there is."""

from __future__ import annotations

from click import Choice

from gpuflow.cli.broker_users import broker_users
from gpuflow.tokens.service_users import ServiceRole


def test_every_role_can_be_asked_for() -> None:
    """The command names them itself, so that `--help` connects to nothing and imports little."""
    offered = {
        name: tuple(option.type.choices)
        for name, command in broker_users.commands.items()
        for option in command.params
        if option.name == "role" and isinstance(option.type, Choice)
    }
    assert offered and set(offered.values()) == {tuple(ServiceRole)}, offered
