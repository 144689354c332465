"""Reads the worker options of a family of machines, by the command line of the worker itself.

They decide which queues a worker serves: a family counts for those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
from celery.bin.worker import worker as celery_worker

from gpuflow.celery_app import worker_options
from gpuflow.routing.queue_names import is_demand_queue

#: Options of which nobody could say what a family would then serve, or that are given already; and what to do instead.
_REFUSED: Final = {
    "executors": "which task types a queue holds is not known, so machines would be launched in vain; give the "
    "machines a label, and the tasks that are for them the same",
    "exclude_queues": "name with -Q what its workers serve",
    "name": "the machine's id is the name of its worker",
    "hostname": "the machine's id is the name of its worker",
    "detach": "a launched worker runs in the foreground",
    "cost": "give costPerHour",
}


@dataclass(frozen=True, kw_only=True)
class ServedByOptions:
    """What the options say of a worker: None where they say nothing.

    `families` are the demand queues of -Q, `plain_queues` the other queues of it.
    """

    families: tuple[str, ...] | None = None
    plain_queues: tuple[str, ...] | None = None
    labels: tuple[tuple[str, str], ...] = ()
    max_jobs: int | None = None
    gpus: str | None = None


def read_worker_options(options: Sequence[str]) -> ServedByOptions:
    """Read the options of a worker. Raises ValueError naming what is wrong and the way out."""
    given = _parse(list(options))
    for name, instead in _REFUSED.items():
        if given.get(name):
            spelling = "--" + name.replace("_", "-")
            raise ValueError(f"workerOptions has {spelling}, which a family cannot have; {instead}")
    families, plain = None, None
    if queues := given.get("queues"):
        names = tuple(name.strip() for name in str(queues).split(",") if name.strip())
        families = tuple(name for name in names if is_demand_queue(name))
        plain = tuple(name for name in names if not is_demand_queue(name))
    max_jobs = given.get("max_jobs")
    if max_jobs is not None and (not str(max_jobs).isdecimal() or not int(max_jobs)):
        raise ValueError(f"workerOptions has --max-jobs {max_jobs}; give a count from 1 up")
    return ServedByOptions(
        families=families,
        plain_queues=plain,
        labels=tuple(map(_label, given.get("label") or ())),
        max_jobs=None if max_jobs is None else int(max_jobs),
        gpus=given.get("gpus"),
    )


def _label(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"workerOptions has --label {text!r}, which is not of the form key=value")
    return key.strip(), value.strip()


def _parse(options: list[str]) -> dict[str, Any]:
    """Return what each option was given, as text, by its name. Runs nothing of the command itself."""
    command = click.Command("worker", params=[*celery_worker.params, *worker_options()])
    context = click.Context(command, info_name="worker")
    try:
        given, rest, _ = command.make_parser(context).parse_args(options)
    except click.UsageError as error:
        raise ValueError(f"workerOptions cannot be read: {error.format_message()}") from None
    if rest:
        raise ValueError(f"workerOptions has {rest[0]!r}, of no option; write each option and value apart")
    return dict(given)
