"""The sweep: what was leased and is no longer renewed goes back, what was delayed and is due goes on.

Every consumer takes this step each second, and so does beat; the server does its work for the first of them and lets
the others pass (`SWEEP_REST_SECONDS`). It also finds out that the server was restarted: a new
server knows none of our scripts, so the first of us to meet it says so (`arrive`) before anything can be popped.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
from kombu.utils.encoding import bytes_to_str
from redis.exceptions import NoScriptError, ResponseError

from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import broker_script
from gpuflow.logs import get_logger

log = get_logger("gpuflow.sweep")

#: Messages that one step moves at most; more are left to the next second.
SWEEP_LIMIT: Final = 100
#: A gap between two sweeps longer than this means that nobody could renew either, in seconds; less with short leases.
MAX_SWEEP_GAP_SECONDS: Final = 5.0
#: What a lease has left at each sweep, as long as its owner renews every third of its term (`broker.lease_table`).
SWEEP_GAP_SHARE: Final = 2 / 3
#: No gap is shorter, in seconds: twice the second in which each process sweeps, so that ordinary turns give no grace.
#: Leases below 3 s are not covered in full: one of 1 s gets no grace after a pause of 1 to 2 s.
MIN_SWEEP_GAP_SECONDS: Final = 2.0
#: For so long after a sweep another one does nothing, so that a large fleet does not sweep the same all the time. Below
#: the second at which each process comes, or one alone would pass over every other of its own turns.
SWEEP_REST_SECONDS: Final = 0.5
#: Demand queues that one step looks into for messages of stock producers.
SWEEP_QUEUES: Final = 40
#: So many tasks of a lost worker are named in its line.
MOST_NAMED: Final = 50
#: A doorbell token that nobody reads expires after this many seconds.
BELL_SECONDS: Final = 60


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What one step did: messages put back, leases graced, the server's run, and whether the fleet still gathers.

    `again_seconds`: this caller is to sweep again then, as a delayed message is due; None: as it does anyway.
    """

    restored: int
    graced: int
    run: str
    gathering: bool
    again_seconds: float | None = None


def sweep_gap_seconds(lease_seconds: float) -> float:
    """Return the longest gap between two sweeps after which a lease that has ended is taken for one of a dead owner."""
    return max(MIN_SWEEP_GAP_SECONDS, min(MAX_SWEEP_GAP_SECONDS, lease_seconds * SWEEP_GAP_SHARE))


class Sweeper:
    """Sweeps one fleet; `lease_seconds` is the term of its leases, `rest_seconds` as SWEEP_REST_SECONDS.

    `on_lost` is told the ids of tasks that are queued again as nobody renewed their leases.
    """

    def __init__(
        self,
        keys: Keys,
        lease_seconds: float,
        rest_seconds: float = SWEEP_REST_SECONDS,
        on_lost: Callable[[list[str]], object] | None = None,
    ) -> None:
        self.keys = keys
        self.lease_seconds = lease_seconds
        self.rest_seconds = rest_seconds
        self.on_lost = on_lost

    def sweep(self, client: redis.Redis, *, next_seconds: float = 0.0) -> Swept:
        """Take the step. Raises redis errors.

        `next_seconds`: the caller takes the next one after so long, or when the answer says so.
        """
        keys = self.keys
        script = broker_script("sweep")
        names = [
            keys.leases,
            keys.unacked,
            keys.owners,
            keys.ready,
            keys.sweep,
            keys.delayed,
            keys.parked,
            keys.present,
            keys.workers,
            keys.queues,
        ]
        values: list[Any] = [
            self.lease_seconds,
            sweep_gap_seconds(self.lease_seconds),
            SWEEP_LIMIT,
            BELL_SECONDS,
            keys.worker(""),
            SWEEP_QUEUES,
            self.rest_seconds,
            next_seconds,
        ]
        try:
            answer: Any = client.evalsha(script.sha, len(names), *names, *values)
        except NoScriptError:
            self.arrive(client)
            answer = script(client, names, values)
        restored, graced, run, gathering, again, lost = answer
        self.tell_of_lost(lost)
        if graced:
            log.info("leases_graced", count=graced)
        return Swept(
            restored=restored,
            graced=graced,
            run=run.decode() if isinstance(run, bytes) else run,
            gathering=bool(gathering),
            again_seconds=float(again) if again else None,
        )

    def tell_of_lost(self, lost: Sequence[bytes | str]) -> None:
        """Say whose leases have ended, of what went back: each `<owner token>`, a newline, the task's id.

        Raises redis errors.
        """
        found: dict[str, list[str]] = {}
        for entry in lost:
            owner, _, task_id = bytes_to_str(entry).partition("\n")
            found.setdefault(owner.rpartition(":")[0] or owner, []).append(task_id)
        for worker, tasks in found.items():
            log.warning("worker_lost", worker=worker, queued_again=tasks[:MOST_NAMED], count=len(tasks))
        ids = [task_id for tasks in found.values() for task_id in tasks if task_id]
        if ids and self.on_lost is not None:
            self.on_lost(ids)

    def arrive(self, client: redis.Redis) -> None:
        """Tell the fleet that the server does not know us: if its run is a new one, leases get grace."""
        keys = self.keys
        graced = broker_script("arrive")(
            client,
            [keys.leases, keys.sweep, keys.present, keys.workers],
            [self.lease_seconds, _run_id(client), keys.worker("")],
        )
        if graced >= 0:
            log.info("new_server_run", graced=graced)


def _run_id(client: redis.Redis) -> str:
    """Return the server's name of its run; a new name where the user may not ask for it."""
    try:
        info: Any = client.info("server")
        return str(info["run_id"])
    except (ResponseError, KeyError):
        return uuid.uuid4().hex
