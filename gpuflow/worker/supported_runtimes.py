"""What this worker offers to run now: task types whose executor's environment works, with their engines.

Looked at anew at each heartbeat, so that an environment which was built, or broke, counts without a restart. The
admission takes by it, the registry tells it, and the supervisor starts children by it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpuflow.environments import ChosenEnvironment, Snapshot, choose, note_problem, offers_of, snapshot
from gpuflow.logs import get_logger
from gpuflow.policy.code import allowed_kinds
from gpuflow.routing.offers import (
    WARM_ENGINES,
    WARM_TASK_TYPES,
    Offers,
    function_name,
    is_function,
    parts_of,
    with_code,
    with_replicas,
)
from gpuflow.settings import Settings
from gpuflow.worker.child_python import ChildPython, python_of
from gpuflow.worker.secret_sources import offered_secrets
from gpuflow.worker.sessions.entry import LOADING_PLACES

log = get_logger("gpuflow.worker")


class SupportedRuntimes:
    """The offers of one worker. `task_types` are those that it may run; a user's with the environment that it names.

    `sessions` says whether it keeps models loaded, `functions` are the Celery tasks of the team that it has, with the
    number of calls that may wait while one is loaded; 0: it is not kept warm.
    """

    def __init__(
        self,
        settings: Settings,
        task_types: Mapping[str, str | None],
        *,
        gpus: bool,
        sessions: bool = False,
        functions: Mapping[str, int] | None = None,
    ) -> None:
        self._settings = settings
        self._keeps_sessions = sessions
        self._task_types = dict(task_types)
        self._functions = {function_name(name): places for name, places in (functions or {}).items()}
        self._kinds = (False, True) if gpus else (False,)
        self._lock = threading.Lock()
        self._stands: dict[bool, Snapshot] = {}
        self._offers: dict[bool, Offers] = {}
        #: Names of the secrets that tasks may ask for.
        self.secrets: tuple[str, ...] = ()
        self.look()

    @property
    def plain(self) -> Offers:
        """What is offered to tasks without GPUs."""
        return self._offers[False]

    @property
    def with_gpus(self) -> Offers:
        """What is offered to tasks with GPUs."""
        return self._offers[self._kinds[-1]]

    @property
    def same(self) -> bool:
        """Whether GPUs make no difference."""
        return self.plain.names == self.with_gpus.names

    def look(self) -> None:
        """Look how the environments stand now."""
        stands = {gpus: snapshot(self._settings, gpus=gpus) for gpus in self._kinds}
        allowed = allowed_kinds(self._settings.allow_code)
        offers = {gpus: with_code(offers_of(found.states, self._task_types), allowed) for gpus, found in stands.items()}
        if self._keeps_sessions:
            offers = {
                gpus: with_replicas(found, lambda name, of=stands[gpus]: self._keeps(of, name))  # type: ignore[misc]
                for gpus, found in offers.items()
            }
        own = frozenset(self._functions)
        offers = {gpus: replace(found, names=found.names | own) for gpus, found in offers.items()}
        secrets = offered_secrets(self._settings)
        with self._lock:
            changed = bool(self._offers) and (offers, secrets) != (self._offers, self.secrets)
            self._stands, self._offers, self.secrets = stands, offers, secrets
        if changed:
            log.info("offers_changed", names=sorted(self.plain.names | self.with_gpus.names))

    def python_of(self, spec: Mapping[str, Any], *, gpus: bool) -> ChildPython:
        """Return how a task's child is started. Raises EnvironmentNotReady."""
        with self._lock:
            stands = self._stands[gpus and self._kinds[-1]]
        return python_of(spec, stands, named=self._task_types.get(str(spec["taskType"])))

    def keeps_warm(self, asked: str, *, gpus: bool) -> bool:
        """Whether what runs here for such an ask (`routing.offers`) can be kept warm.

        A function is not in a sandbox: what a call leaves for its worker there, the next one could read.
        """
        if is_function(asked):
            return self._keeps_sessions and self._settings.isolate == "none" and self.loading_places(asked) > 0
        with self._lock:
            stands = self._stands[gpus and self._kinds[-1]]
        return self._keeps(stands, asked)

    def loading_places(self, asked: str) -> int:
        """Return how many requests of such an ask may wait while what answers them is loaded."""
        return self._functions.get(asked, 0) if is_function(asked) else LOADING_PLACES

    def _keeps(self, stands: Snapshot, asked: str) -> bool:
        task_type, engine, environment = parts_of(asked)
        wanted = environment or self._task_types.get(task_type)
        choice = choose(stands.states, task_type, engine=engine, environment=wanted)
        return isinstance(choice, ChosenEnvironment) and (choice.engine in WARM_ENGINES or task_type in WARM_TASK_TYPES)

    def let_down(self, python: ChildPython, problem: str) -> None:
        """Note that a built environment could not even begin a child: it is offered no more until a check mends it."""
        log.warning("environment_broken", environment=python.use.name, python=str(python.use.python), problem=problem)
        note_problem(self._settings, python.use, problem)
        self.look()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for the registry."""
        found = {"cpu": self.plain.to_dict()}
        return {**found, "gpu": self.with_gpus.to_dict()} if True in self._kinds else found
