"""What is told at submit: that nobody can serve a task, or that -Q alone keeps it from those who could.

Called by the client and the command line before they send. It reads the registry, a few times a second at most, and
never stops a submit unless it is asked to: a worker may come later.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

from redis.exceptions import RedisError

from gpuflow.celery_app import GPUFlow
from gpuflow.errors import GPUFlowError, InvalidTemplate, NoCapableWorker
from gpuflow.fleet.registry import Fleet
from gpuflow.fleet.seen_fleet import FRESH_SECONDS, READ_SHARE
from gpuflow.fleet.worker_views import worker_views
from gpuflow.ledger.records import COMMON_SCHEMA, RECORD_SCHEMA
from gpuflow.logs import get_logger
from gpuflow.routing.describe import describe
from gpuflow.routing.offers import asked_name, is_function, secrets_asked
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.resources import requirement_from_resources
from gpuflow.routing.situation import PASSING, Situation, judge
from gpuflow.routing.views import TaskView, WorkerView
from gpuflow.spec import Template
from gpuflow.submission import LIGHT_TYPES

log = get_logger("gpuflow.submit")

#: The same warning is not told again for so many seconds: a loop that submits 10,000 tasks tells it once.
_QUIET_SECONDS: Final = 60.0
#: What a warning ends with where the task is submitted all the same.
_UNTIL_ONE_IS: Final = "; it waits until one is"
_UNTIL_ONE_DOES: Final = "; it waits until one does"


#: What is asked to run it and which secrets it asks for (`routing.offers`), and alternatives.
_Ask = tuple[str, tuple[str, ...], tuple[Requirement, ...]]


@dataclass(kw_only=True)
class _Known:
    """What was read of a fleet, and what was said of it."""

    good_until: float = float("-inf")
    workers: list[WorkerView] = field(default_factory=list)
    #: Asks that these workers serve, and when it was said of others that nobody does.
    served: set[_Ask] = field(default_factory=set)
    said: dict[_Ask, float] = field(default_factory=dict)


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def warn_at_submit(app: GPUFlow, template: Template, *, fail_fast: bool = False) -> None:
    """Log a warning for each stage that no live worker serves, as `problems_at_submit` finds them."""
    for problem in problems_at_submit(app, template, fail_fast=fail_fast):
        log.warning("no_live_worker", problem=problem)


def problems_at_submit(app: GPUFlow, template: Template, *, fail_fast: bool = False) -> list[str]:
    """Return a line for each stage that no live worker can serve, or that -Q alone keeps from those who could.

    What was told of this fleet a minute ago is left out. A broker that cannot be reached is left to the submit
    itself. Raises InvalidTemplate for a stage whose `resources` make no sense; with `fail_fast` NoCapableWorker for
    one that no live worker serves.
    """
    asks = _asks(template)
    try:
        workers = _workers(app, fresh=fail_fast)
    except (RedisError, OSError, GPUFlowError):
        return []
    known = _known_of(app)
    now = time.monotonic()
    found = []
    for name, asked, secrets, alternatives in asks:
        key = (asked, secrets, alternatives)
        quiet = not fail_fast and now - known.said.get(key, float("-inf")) <= _QUIET_SECONDS
        if quiet or key in known.served:
            continue
        problem = problem_of(name, asked, alternatives, workers, secrets=secrets)
        if problem is None:
            known.served.add(key)
        else:
            known.said[key] = now
            found.append(problem)
    if found and fail_fast:
        told = (problem.removesuffix(_UNTIL_ONE_IS).removesuffix(_UNTIL_ONE_DOES) for problem in found)
        raise NoCapableWorker(f"{'; '.join(told)}; nothing was submitted")
    return found


def forget(app: GPUFlow) -> None:
    """Forget what was read of the fleet of an app, and what was said of it: it has another server now."""
    _known.pop(app, None)


def can_serve(app: GPUFlow, template: Template) -> bool:
    """Whether live workers can serve every stage, now or when they are less busy. Raises redis errors."""
    workers = _workers(app, fresh=True)
    return all(
        problem_of(name, asked, alternatives, workers, secrets=secrets) is None
        for name, asked, secrets, alternatives in _asks(template)
    )


def problem_of(
    name: str,
    executor: str,
    alternatives: Sequence[Requirement],
    workers: Sequence[WorkerView],
    *,
    secrets: tuple[str, ...] = (),
) -> str | None:
    """Return why no live worker serves any of the alternatives, or None when one does. Pure."""
    live = [worker for worker in workers if worker.state != "OFFLINE"]
    schema = RECORD_SCHEMA if is_function(executor) else COMMON_SCHEMA
    task = TaskView(name=name, executor=executor, secrets=secrets, record_schema=schema)
    judged: list[Situation] = []
    for ask, worker in product(alternatives, live):
        awake = replace(worker, enabled=True) if worker.idled else worker  # the autoscaler's next look enables it
        one = judge(ask, ask.queue_name(), task, awake)
        if one.kind in PASSING:
            return None
        judged.append(one)
    asked = " or ".join(describe(ask) for ask in alternatives)
    if not judged:
        return f"no worker is there to run {name!r} ({asked}){_UNTIL_ONE_IS}"
    judged.sort(key=lambda one: (*one.order, one.worker))
    capable = [one for one in judged if one.fits]
    if capable and {one.kind for one in capable} == {"restricted"}:
        names = ", ".join(dict.fromkeys(one.worker for one in capable))
        queues = ",".join(dict.fromkeys(ask.queue_name() for ask in alternatives))
        return f"only their -Q keeps {names} from running {name!r}; start a worker without -Q, or with -Q {queues}"
    if capable:
        mend = f"; run {capable[0].mend} there" if capable[0].mend else ""
        return f"no worker takes {name!r} now: {capable[0].worker} {capable[0].text}{mend}{_UNTIL_ONE_DOES}"
    nearest = judged[0]
    return f"no live worker can run {name!r}: the nearest is {nearest.worker}, but the task {nearest.text}"


def _asks(template: Template) -> list[tuple[str, str, tuple[str, ...], tuple[Requirement, ...]]]:
    """Return name, what is asked to run it, secrets and alternatives of stages whose ask is known before they run."""
    found = []
    for stage in template.stages:
        resources = stage.spec.get("resources") or {}
        if "${" in str(resources):
            continue
        try:
            alternatives = requirement_from_resources(resources, gpu_available=False)
        except InvalidTemplate as error:
            raise InvalidTemplate(f"{template.source}: stage {stage.name!r}: {error}") from error
        if not resources and stage.task_type not in LIGHT_TYPES:
            alternatives = (Requirement(gpu_count=1), *alternatives)
        found.append((stage.name, asked_name(stage.spec), secrets_asked(stage.spec), alternatives))
    return found


def _workers(app: GPUFlow, *, fresh: bool) -> list[WorkerView]:
    known = _known_of(app)
    now = time.monotonic()
    if fresh or now >= known.good_until:
        known.workers = worker_views(Fleet(app.redis, app.keys), None, time.time())
        known.served.clear()
        read = time.monotonic()
        known.good_until = read + max(FRESH_SECONDS, READ_SHARE * (read - now))
    return known.workers


def _known_of(app: GPUFlow) -> _Known:
    return _known.setdefault(app, _Known())
