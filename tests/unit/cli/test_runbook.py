"""Every command of the runbook, and of the pages that operators follow, is one, with options that it has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from gpuflow.cli import cli
from gpuflow.routing.capability import Capability
from gpuflow.routing.explain import explain
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.situation import IN_WORDS, Kind
from gpuflow.routing.views import QueueView, RunningTask, TaskView, WorkerView
from tests.support.runbook import PAGE, nights, pattern

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
#: Nights that end by asking, not by doing.
ASK_ONLY = (9, 27)
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
    assert [night.number for night in nights()] == list(range(1, len(nights()) + 1)) and len(nights()) >= 20
    assert len([page for page, _ in commands() if page == "runbook.md"]) > 30


def index() -> str:
    """Return the part of the page by which a night is found."""
    text = PAGE.read_text("utf-8")
    return text[text.index("## Find the night") : text.index("## The broker")]


def test_each_night_is_found_by_what_one_sees() -> None:
    anchors = {night.anchor: night.number for night in nights()}
    linked = re.findall(r"\[(\d+)\]\(#([^)]+)\)", index())
    assert all(anchors.get(anchor) == int(number) for number, anchor in linked), linked
    assert {int(number) for number, _ in linked} == set(anchors.values())


def test_each_alert_is_in_the_index_and_leads_to_the_same_night() -> None:
    content = yaml.safe_load((ROOT / "configs" / "alerts" / "gpuflow.rules.yaml").read_text("utf-8"))
    rows = [line for line in index().splitlines() if line.startswith("| Gpuflow")]
    for rule in [rule for group in content["groups"] for rule in group["rules"]]:
        (row,) = [row for row in rows if re.search(rf"\b{rule['alert']}\b", row)]
        assert rule["annotations"]["runbook_url"].endswith(re.search(r"\((#[^)]+)\)", row)[1])  # type: ignore[index]


def test_each_word_of_a_log_is_one_that_the_product_writes() -> None:
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "gpuflow").rglob("*.py"))
    table = index().split("| line of a log | night |")[1].split("\n\n")[0]
    words = re.findall(r"`([a-z]+(?:_[a-z]+)+)[`\s]", table)
    words += [word for night in nights() for word in re.findall(r"`event=([a-z_]+)", night.text)]
    assert len(words) > 30
    assert [word for word in words if f'"{word}"' not in source] == []


def worker_view(name: str, **fields: Any) -> WorkerView:
    return WorkerView(id=name, capability=Capability(cpu_count=8, disk_free_mib=800), **fields)


def full(name: str) -> WorkerView:
    return WorkerView(id=name, capability=Capability(cpu_count=8, disk_free_mib=800, disk_floor_mib=1024))


STOPPED = {"state": "OFFLINE", "stopped": True, "silent_seconds": 9.0}
GONE = {"state": "OFFLINE", "silent_seconds": 300.0}
GPU, BIG = Requirement(gpu_count=1), Requirement(cpu=900)
#: What keeps a task of type `command`, and the nights that are found by what `explain` says of it.
ANSWERS: list[tuple[Requirement, list[WorkerView], set[int]]] = [
    (Requirement(), [], {6}),
    (Requirement(), [worker_view("w1", **STOPPED)], {6}),
    (Requirement(), [worker_view("w1", **STOPPED), worker_view("w2", **STOPPED)], {6}),
    (Requirement(), [worker_view("w1", **GONE)], {20}),
    (Requirement(), [worker_view("w1", **GONE), worker_view("w2", **STOPPED)], {20}),
    (Requirement(), [worker_view("w1", state="SILENT", silent_seconds=50.0)], {20}),
    (BIG, [worker_view("w1")], {7}),
    (BIG, [worker_view("w1"), worker_view("w2"), worker_view("w3", **STOPPED)], {7}),
    (Requirement(), [worker_view("w1", families=("gpu-a100",))], {8}),
    (Requirement(), [worker_view("w1", allows_code=()), worker_view("w2", **STOPPED)], {9}),
    (Requirement(), [worker_view("w1", enabled=False), worker_view("w2", **STOPPED)], {10}),
    (Requirement(), [worker_view("w1", free_jobs=0, tasks=(RunningTask(id="t"),))], {11}),
    (Requirement(), [full("w1"), worker_view("w2", **STOPPED)], {12}),
    (Requirement(), [worker_view("w1", record_schema=0)], {13}),
    (GPU, [worker_view("w1", gpu_problems=("the GPU is lost",))], {7, 22}),
]


@pytest.mark.parametrize(("ask", "workers", "expected"), ANSWERS, ids=range(len(ANSWERS)))
def test_what_explain_says_leads_to_its_night(ask: Requirement, workers: list[WorkerView], expected: set[int]) -> None:
    task = TaskView(id="t1", name="t", state="QUEUED", executor="command")
    lines = explain(ask, task, QueueView(name=ask.queue_name()), workers).to_lines()
    said = "\n".join([lines[0], *(line for line in lines if line.startswith("  workers with"))])
    found = set()
    for row in index().split("| a view says | night |")[1].splitlines():
        seen, _, leads = row.replace("`none` in", "").strip("| ").rpartition(" | ")
        night = re.match(r"(?:all at once: .*; else )?\[(\d+)\]", leads)
        if night and any(pattern(quote).search(said) for quote in re.findall(r"`([^`]+)`", seen)):
            found.add(int(night[1]))
    assert found == expected, said


def test_each_word_by_which_workers_are_counted_leads_to_its_night() -> None:
    (row,) = [row for row in index().splitlines() if "none of them now" in row]
    kinds: dict[Kind, int] = {"disabled": 10, "disk_full": 12, "outdated": 13, "restricted": 8, "offline": 20}
    for kind, number in kinds.items():
        assert re.search(rf"{IN_WORDS[kind]} \[{number}\]", row), kind


def test_each_night_says_what_to_do_and_how_one_sees_that_it_is_over() -> None:
    for night in nights():
        assert night.commands and night.quotes, f"night {night.number} has no command, or quotes nothing"
        assert "**Do:**" in night.text or night.number in ASK_ONLY, night.number
        assert "**Over:**" in night.text or night.number in ASK_ONLY, night.number
        assert len(night.text.splitlines()) <= 32, f"night {night.number} is too long for 3 a.m."


def test_services_and_units_that_it_names_are_those_of_deploy() -> None:
    text = PAGE.read_text("utf-8")
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
    kinds = [
        document["metadata"]["name"]
        for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text("utf-8"))
        if document["kind"] == "Deployment"
    ]
    named = re.findall(
        r"docker compose (?:up -d|restart(?: -t 5)?|stop|unpause|exec(?: -T)?|logs --tail 50|ps -a)"
        r" ([a-z-]+)((?: worker-gpu)?)",
        text,
    )
    assert len(named) > 8 and {service for service, _ in named} <= set(compose)
    deployments = re.findall(r"deploy/(gpuflow-[a-z]+)", text)
    assert len(deployments) > 4 and set(deployments) <= set(kinds)
    units = {path.stem for path in (ROOT / "deploy" / "systemd").glob("*.service")}
    found = re.findall(r"(?:systemctl [a-z-]+|journalctl -u) (gpuflow-[a-z]+)", text)
    assert len(found) > 6 and set(found) <= units
    for number in (3, 6, 20, 21, 25, 26):
        told = nights()[number - 1].text
        assert "docker compose" in told and re.search(r"Kubernetes|kubectl", told), f"night {number}"
