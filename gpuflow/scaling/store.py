"""What scaling keeps in Redis: who leads, the machines that were launched, the decisions, counts and costs.

Every write of a leader names its epoch and is refused once it leads no more (lua/fence.lua of the fleet).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import redis

from gpuflow.audit.entries import audit_preamble
from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import Script, load_script, script_text
from gpuflow.fleet.desired import MOST_DECISIONS
from gpuflow.fleet.identity import fleet_id
from gpuflow.fleet.registry import Fleet
from gpuflow.scaling.model import MachineState
from gpuflow.scaling.provisioners import UnknownMachine

#: A family whose launches fail waits so long, twice as long after each failure more, in seconds.
FIRST_WAIT_SECONDS: Final = 5.0
LONGEST_WAIT_SECONDS: Final = 600.0
#: So many unknown machines are kept, for so many seconds after a beat last looked.
MOST_UNKNOWN: Final = 200
UNKNOWN_KEPT_SECONDS: Final = 600


class NoLeader(Exception):
    """This beat leads no more: nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine that was launched, or is about to be. `wanted_at` is Unix seconds on the server's clock."""

    id: str
    family: str
    state: MachineState = "launching"
    wanted_at: float = 0.0
    spot: bool = False
    cost_per_hour: float = 0.0
    epoch: int = 0

    def to_json(self) -> str:
        """Return the record."""
        data = self.public()
        del data["id"]
        return json.dumps(data)

    def public(self) -> dict[str, Any]:
        """Return what users see, JSON-able."""
        return {
            "id": self.id,
            "family": self.family,
            "state": self.state,
            "wantedAt": self.wanted_at,
            "spot": self.spot,
            "costPerHour": self.cost_per_hour,
            "epoch": self.epoch,
        }

    @classmethod
    def from_json(cls, machine_id: str, text: str) -> Machine:
        """Read a record."""
        data = json.loads(text)
        return cls(
            id=machine_id,
            family=str(data["family"]),
            state=data["state"],
            wanted_at=float(data["wantedAt"]),
            spot=bool(data.get("spot")),
            cost_per_hour=float(data.get("costPerHour") or 0),
            epoch=int(data.get("epoch") or 0),
        )


class Leadership:
    """Whether this beat is the one that scales. `term_seconds` after its last sign of life another one may be."""

    def __init__(self, client: redis.Redis, keys: Keys, term_seconds: float, name: str = "") -> None:
        self._client = client
        self._keys = keys
        self._term_seconds = term_seconds
        self.name = name or f"beat-{secrets.token_hex(8)}"
        self.epoch = 0
        #: The fleet that was found when this beat last looked: each step on a machine names it.
        self.fleet_id = ""

    def lead(self) -> bool:
        """Lead, or go on to; say whether this beat does. Raises redis errors."""
        step = load_script("gpuflow.scaling", "lead")
        self.fleet_id = self.fleet_id or self.look()
        self.epoch = int(step(self._client, [self._keys.scaling_leader], [self.name, self._term_seconds]))
        return self.epoch > 0

    def look(self) -> str:
        """Find out which fleet this is, and return its id. Raises redis errors, GPUFlowError."""
        self.fleet_id = fleet_id(self._client, self._keys)
        return self.fleet_id

    def go_on(self) -> None:
        """Go on to lead in the same epoch. Raises NoLeader where that has ended, and redis errors."""
        epoch = self.epoch
        if not epoch or not self.lead() or self.epoch != epoch:
            raise NoLeader


class ScalingStore:
    """Machines, decisions and counts of one fleet; `client` must decode responses."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client: Any = client
        self.keys = keys

    def machines(self) -> list[Machine]:
        """Return every machine that was launched and not forgotten, by id."""
        found = self.client.hgetall(self.keys.machines)
        return [Machine.from_json(machine_id, text) for machine_id, text in sorted(found.items())]

    def step(
        self,
        what: str,
        machine: Machine,
        leader: Leadership,
        *,
        decision: Mapping[str, Any] | None = None,
        add: Mapping[str, float] | None = None,
    ) -> str:
        """Make one step in the life of a machine (lua/machine.lua); return what became of it. Raises NoLeader."""
        keys = [self.keys.machines, self.keys.scaling_leader, self.keys.scaling_decisions]
        keys += [self.keys.worker(machine.id), self.keys.heartbeat(machine.id), self.keys.scaling, self.keys.fleet_id]
        keys.append(self.keys.audit)
        counters = [part for name, amount in (add or {}).items() for part in (name, amount)]
        text = decision_text(leader, **decision) if decision else ""
        arguments: list[str | int | float] = [what, machine.id, machine.to_json(), leader.name, leader.epoch, text]
        arguments += [MOST_DECISIONS, leader.fleet_id, *counters]
        answer = str(_machine_step()(self.client, keys, arguments))
        if answer == "fenced":
            raise NoLeader
        return answer

    def note_unknown(self, machines: Sequence[UnknownMachine]) -> None:
        """Keep what operators are to know of; an empty list removes it."""
        if machines:
            text = json.dumps([asdict(one) for one in machines[:MOST_UNKNOWN]])
            self.client.set(self.keys.unknown_machines, text, ex=UNKNOWN_KEPT_SECONDS)
        else:
            self.client.delete(self.keys.unknown_machines)

    def unknown(self) -> list[UnknownMachine]:
        """Return the machines that a provisioner sees and that are not provably of this fleet."""
        try:
            found = json.loads(self.client.get(self.keys.unknown_machines) or "[]")
            return [UnknownMachine.from_dict(one) for one in found]
        except (ValueError, TypeError, AttributeError):
            return []  # written by something else than a beat; the next look of one writes it anew

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        self.client.hincrbyfloat(self.keys.scaling, name, amount)

    def note_failure(self, family: str, now: float) -> float:
        """Note that a launch of a family failed; return the seconds until it is tried again."""
        failures = int(self.client.hincrby(self.keys.scaling, f"failures:{family}", 1))
        wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (failures - 1))
        self.client.hset(self.keys.scaling, f"retry_at:{family}", f"{now + wait:.3f}")
        return wait

    def note_success(self, family: str) -> None:
        """Note that a machine of a family has registered: its failures are forgotten."""
        self.client.hdel(self.keys.scaling, f"failures:{family}", f"retry_at:{family}")

    def counts(self) -> dict[str, float]:
        """Return the counters, with the failures and retry times of families."""
        return {name: float(value) for name, value in self.client.hgetall(self.keys.scaling).items()}

    def decisions(self, most: int) -> list[dict[str, Any]]:
        """Return the newest decisions, the newest first."""
        return [json.loads(text) for text in self.client.lrange(self.keys.scaling_decisions, 0, most - 1)]

    def leader(self) -> dict[str, Any] | None:
        """Return who leads, None when nobody does."""
        owner, epoch, until = self.client.hmget(self.keys.scaling_leader, "owner", "epoch", "until")
        seconds, micros = self.client.time()
        if owner is None or float(until) <= seconds + micros / 1e6:
            return None
        return {"owner": owner, "epoch": int(epoch)}


def decision_text(leader: Leadership, **fields: Any) -> str:
    """Return a decision as JSON, without the time, which the step adds."""
    return json.dumps({"epoch": leader.epoch, "leader": leader.name, **fields})


def scaling_status(client: redis.Redis, keys: Keys) -> dict[str, Any]:
    """Return what scales a fleet, with counts and costs, JSON-able. Raises redis errors."""
    store = ScalingStore(client, keys)
    workers = [worker for worker in Fleet(client, keys).workers() if worker.is_there]
    serving = {worker.id for worker in workers}
    machines = store.machines()
    counts = store.counts()
    seconds, _ = store.client.time()
    running = sum(one.cost_per_hour * max(0.0, seconds - one.wanted_at) / 3600 for one in machines)
    return {
        "leader": store.leader(),
        "enabled": sum(worker.takes_work for worker in workers),
        "disabled": sum(not worker.takes_work for worker in workers),
        "cost": round(counts.pop("cost", 0.0) + running, 6),
        "costPerHour": sum(one.cost_per_hour for one in machines),
        "counts": {name: count for name, count in sorted(counts.items()) if not name.startswith("retry_at:")},
        "machines": [one.public() for one in machines],
        "unknown": [
            {**asdict(one), "end": f"gpuflow workers drain {one.id}" if one.id in serving else one.end_command()}
            for one in store.unknown()
        ],
    }


def _machine_step() -> Script:
    return load_script("gpuflow.scaling", "machine", audit_preamble() + script_text("gpuflow.fleet", "fence"))
