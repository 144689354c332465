"""Every command of the runbook, and of the pages that operators follow, is one, with options that it has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from gpuflow.cli import cli

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (
    "runbook.md",
    "howto/upgrade-and-rotate.md",
    "howto/back-up-the-broker.md",
    "howto/limits.md",
    "howto/capacity.md",
)


def commands() -> list[tuple[str, str]]:
    """Return the commands of fenced blocks and of inline code, with their page."""
    found = []
    for page in PAGES:
        text = (DOCS / page).read_text("utf-8")
        lines = [line for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.splitlines()]
        lines += re.findall(r"`(gpuflow [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
        for line in lines:
            words = line.partition("  #")[0].strip()
            if words.startswith("gpuflow "):
                found.append((page, words))
    return sorted(set(found))


def parse(line: str) -> click.Context:
    """Parse a command line as the program would, and run nothing. Raises click.UsageError."""
    context = cli.make_context("gpuflow", shlex.split(line)[1:])
    command: click.Command = cli
    while isinstance(command, click.Group):
        words = [*context._protected_args, *context.args]
        if not words and command.invoke_without_command:
            break
        name, inner, rest = command.resolve_command(context, words)
        assert inner is not None, line
        command, context = inner, inner.make_context(name, rest, parent=context)
    return context


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_of_the_docs_is_one(page: str, line: str) -> None:
    parse(line)


def test_a_command_that_is_none_is_found() -> None:
    for line in (
        "gpuflow wrokers",
        "gpuflow workers list --al",
        "gpuflow workers drain",
        "gpuflow workers drain w --wat",
    ):
        with pytest.raises(click.UsageError):
            parse(line)


def test_the_runbook_has_twenty_nights() -> None:
    nights = re.findall(r"^### (\d+)\. ", (DOCS / "runbook.md").read_text("utf-8"), re.M)
    assert [int(number) for number in nights] == list(range(1, len(nights) + 1)) and len(nights) >= 20
    assert len([page for page, _ in commands() if page == "runbook.md"]) > 30
