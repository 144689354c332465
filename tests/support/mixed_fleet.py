"""Six different machines, random asks for them, and a plain matcher: what the routing is compared with.

Nothing here uses gpuflow.routing. A machine is a table of facts, an ask is written twice: as the `resources` of a
template, and as the plain facts that it means.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from tests.fixtures.simulated_nvml import SimGpu, mig_uuid


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU or MIG slice: the names that people ask for it by, and the GB on its box."""

    uuid: str
    names: tuple[str, ...]
    gb: float
    mib: int
    compute: float
    is_slice: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine; `simulated` is what its driver reports."""

    name: str
    cards: tuple[Card, ...]
    labels: Mapping[str, str]
    simulated: tuple[SimGpu, ...]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a task asks for. A share is a fraction of one GPU or so many GB of it; `most` GPUs where more help."""

    resources: Mapping[str, Any]
    count: int = 0
    most: int = 0
    names: tuple[str, ...] = ()
    gb_min: float = 0
    gb_max: float = 10_000
    compute: float = 0
    fraction: float | None = None
    share_gb: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def shares(self) -> bool:
        return self.fraction is not None or self.share_gb is not None

    def share_mib(self, card: Card) -> int | None:
        """Return the least memory of a GPU that is promised to a share; None for a task that has the whole."""
        if self.fraction is not None:
            return int(card.mib * self.fraction)
        return None if self.share_gb is None else int(card.mib * self.share_gb / card.gb)


def _cards(machine: str, model: str, count: int, name: str, gb: float, mib: int, compute: float) -> dict[str, Any]:
    uuids = [f"GPU-{machine}-{index}" for index in range(count)]
    return {
        "name": machine,
        "cards": tuple(Card(uuid=uuid, names=(name,), gb=gb, mib=mib, compute=compute) for uuid in uuids),
        "simulated": tuple(SimGpu(model=model, uuid=uuid) for uuid in uuids),
    }


_SLICES = (("3g.40gb", 40, 40192), ("2g.20gb", 20, 19968), ("1g.10gb", 10, 9728))

MACHINES: tuple[Machine, ...] = (
    Machine(**_cards("t4", "T4", 1, "t4", 16, 15360, 7.5), labels={"zone": "a1", "team": "nlp"}),
    Machine(**_cards("a100", "A100-80GB", 4, "a100", 80, 81920, 8.0), labels={"zone": "b1", "team": "nlp"}),
    Machine(**_cards("h100", "H100", 8, "h100", 80, 81559, 9.0), labels={"zone": "b2", "team": "vision"}),
    Machine(**_cards("rtx", "RTX4090", 2, "rtx4090", 24, 24564, 8.9), labels={"zone": "a2", "team": "vision"}),
    Machine(
        name="mig",
        cards=tuple(
            Card(
                uuid=mig_uuid(0, number),
                names=(f"mig{profile.replace('.', '')}", "miga100"),
                gb=gb,
                mib=mib,
                compute=8.0,
                is_slice=True,
            )
            for number, (profile, gb, mib) in enumerate(_SLICES)
        ),
        labels={"zone": "c1", "team": "nlp"},
        simulated=(SimGpu(model="A100-80GB", uuid="GPU-mig-0", slices=[profile for profile, _, _ in _SLICES]),),
    ),
    Machine(name="cpu", cards=(), labels={"zone": "c2", "team": "batch"}, simulated=()),
)


def fitting_cards(ask: Ask, machine: Machine) -> list[Card]:
    """Return the GPUs of a machine that one of the ask's GPUs could be."""
    return [
        card
        for card in machine.cards
        if (not ask.names or any(fnmatchcase(name, glob) for name in card.names for glob in ask.names))
        and ask.gb_min <= card.gb <= ask.gb_max
        and card.compute >= ask.compute
        and (ask.share_gb or 0) <= card.gb
        and not (card.is_slice and ask.count > 1)
    ]


def welcome(ask: Ask, machine: Machine) -> bool:
    """Whether the labels of a machine are those that are asked for."""
    return all(key in machine.labels and fnmatchcase(machine.labels[key], glob) for key, glob in ask.labels.items())


def satisfies(ask: Ask, machine: Machine, free: Collection[str] | None = None) -> bool:
    """Whether a machine could run the task, with all of its GPUs or with those that are free."""
    cards = [card for card in fitting_cards(ask, machine) if free is None or card.uuid in free]
    return welcome(ask, machine) and len(cards) >= ask.count


def wrong_place(ask: Ask, machine: Machine, gpus: Collection[str]) -> str:
    """Return what is wrong with these GPUs of this machine for the ask; "" for nothing."""
    allowed = {card.uuid for card in fitting_cards(ask, machine)}
    if not welcome(ask, machine):
        return f"{machine.name} has the labels {machine.labels}"
    if not set(gpus) <= allowed or len(set(gpus)) != len(gpus):
        return f"{machine.name} gave {sorted(gpus)}, of which {sorted(allowed)} would do"
    if not ask.count <= len(gpus) <= max(ask.count, ask.most):
        return f"{machine.name} gave {len(gpus)} GPUs"
    return ""


_NAMES = ("t4", "a100", "h100", "rtx4090", "rtx40*", "*100", "h1*", "mig*", "miga100", "mig3g40gb", "a100|h100")
_LABELS = ({"zone": "a*"}, {"zone": "b?"}, {"team": "nlp"}, {"team": "vision", "zone": "*"}, {"team": "batch"})


def random_ask(choice: random.Random) -> Ask:
    """Return an ask that at least one of the machines satisfies."""
    while True:
        ask = _any_ask(choice)
        if any(satisfies(ask, machine) for machine in MACHINES):
            return ask


def _any_ask(choice: random.Random) -> Ask:
    labels = choice.choice(_LABELS) if choice.random() < 0.25 else {}
    common = {"labels": labels} if labels else {}
    hardware: dict[str, Any] = {"cpu": choice.choice((0.5, 1))} if choice.random() < 0.15 else {}
    kind = choice.random()
    if kind < 0.12:
        return Ask(resources={"hardware": {"cpu": 1}, **common}, labels=labels)
    if kind < 0.27:
        return _share(choice, hardware, common, labels)
    names = choice.choice(_NAMES) if choice.random() < 0.6 else ""
    low = choice.choice((0, 0, 8, 16, 20, 24, 40, 80)) if not names or choice.random() < 0.3 else 0
    high = choice.choice((24, 40, 80)) if choice.random() < 0.2 else 10_000
    count = choice.choice((1, 1, 1, 1, 2, 2, 3, 4, 8))
    most = choice.choice((count, count, count, count + 1, 2 * count))
    compute = choice.choice((7.5, 8.0, 8.9)) if choice.random() < 0.15 else 0
    if high < low:
        high = 10_000
    memory = _range(low, high)
    gpus = str(count) if most == count else f"{count}..{most}"
    text = ":".join(filter(None, (names or ("" if memory else "any"), memory, gpus)))
    resources: dict[str, Any] = {"accelerators": text, **common}
    if compute:
        hardware["gpu"] = {"type": names or "any", "count": gpus, "compute_capability": f"{compute:.1f}"}
        if memory:
            hardware["gpu"]["memory"] = memory
        resources = {**common}
    if hardware:
        resources["hardware"] = hardware
    return Ask(
        resources=resources,
        count=count,
        most=most,
        names=tuple(names.split("|")) if names else (),
        gb_min=low,
        gb_max=high,
        compute=compute,
        labels=labels,
    )


def _range(low: float, high: float) -> str:
    """Write a range of memory; 0 and 10,000 are no bounds."""
    if high >= 10_000:
        return f"{low}GB" if low else ""
    return f"{low}GB..{high}GB" if low else f"..{high}GB"


def _share(
    choice: random.Random, hardware: dict[str, Any], common: Mapping[str, Any], labels: Mapping[str, str]
) -> Ask:
    name = choice.choice(("a100", "rtx4090", "*100", "mig*", ""))
    names = (name,) if name else ()
    if choice.random() < 0.5:
        fraction = choice.choice((0.25, 0.3, 0.5, 0.75))
        resources = {"accelerators": f"{name or 'any'}:{fraction}", **common}
        if hardware:
            resources["hardware"] = hardware
        return Ask(resources=resources, count=1, most=1, names=names, fraction=fraction, labels=labels)
    gb = choice.choice((4, 8, 12, 30))
    gpu = {"type": name or "any", "memory": f"{gb}GB", "shared": True}
    resources = {"hardware": {**hardware, "gpu": gpu}, **common}
    return Ask(resources=resources, count=1, most=1, names=names, share_gb=gb, labels=labels)
