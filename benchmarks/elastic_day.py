"""A simulated day of an elastic fleet by the real `decide()`: what it costs, and how long tasks wait.

500 tasks, a third by chance and the rest in bursts, three kinds of machines that take minutes to come.

* static peak: as many machines of each kind as the elastic fleet has at its peak, all day, so nobody waits for a launch
* static, no worse: the cheapest static fleet found whose p95 wait on this very trace is not above the elastic one's
* toggle: one machine is started or ended at each poll, by thresholds

`--png FILE` draws the first day.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from elastic_day_model import DAY, FAMILIES, Day, Fleet, Job, trace

from gpuflow.scaling.decide import decide
from gpuflow.scaling.fitting import Place
from gpuflow.scaling.model import Action, Kind, Policy, Snapshot

SEEDS, QUICK_SEEDS = range(1, 9), range(1, 3)
ELASTIC = Policy(min_active=0, idle_seconds=300, target_backlog_seconds=60, families=FAMILIES)
#: The knobs of the toggle, with the defaults that we have from it.
ENABLE_THRESHOLD, DISABLE_QUEUE_MAX, IDLE_SECONDS, MIN_ACTIVE = 5, 2, 60.0, 1


def toggle(snapshot: Snapshot) -> Sequence[Action]:
    """Start the cheapest machine for the longest queue where at least five tasks wait, else end one that idles."""
    workers = [one for one in snapshot.workers if not one.draining]
    counts = Counter(one.family for one in snapshot.machines)
    waiting = sum(one.depth for one in snapshot.demands)
    if waiting >= ENABLE_THRESHOLD or len(snapshot.machines) < MIN_ACTIVE:
        for demand in sorted(snapshot.demands, key=lambda one: -one.depth):
            able = [one for one in FAMILIES if counts[one.name] < one.most and Place.of_family(one, "").serves(demand)]
            if demand.depth and able:
                cheapest = min(able, key=lambda one: one.cost_per_hour)
                return [Action(kind=Kind.LAUNCH, family=cheapest.name, reason="")]
        if not snapshot.machines:
            return [Action(kind=Kind.LAUNCH, family=FAMILIES[0].name, reason="")]
    elif waiting <= DISABLE_QUEUE_MAX and len(snapshot.machines) > MIN_ACTIVE:
        idle = [one for one in workers if one.idle_seconds is not None and one.idle_seconds >= IDLE_SECONDS]
        if idle:
            return [Action(kind=Kind.RETIRE, worker=max(idle, key=lambda one: one.idle_seconds or 0).id, reason="")]
    return []


def static(jobs: list[Job], seed: int, machines: Counter[str]) -> Day:
    """Return the day of a static fleet."""
    return Fleet(jobs, seed, None, machines).run()


def no_worse(jobs: list[Job], seed: int, peak: Counter[str], most_seconds: float) -> Day:
    """Return the day of the cheapest static fleet found whose p95 wait is at most so long.

    From the peak fleet machines are taken away while that holds, in each order of the kinds.
    """
    best = static(jobs, seed, peak)
    for order in itertools.permutations(peak):
        left = Counter(peak)
        for name in order:
            while left[name] > 1:
                fewer = left - Counter([name])
                day = static(jobs, seed, fewer)
                if p95(day.waits) > most_seconds:
                    break
                left = fewer
                best = min(best, day, key=lambda one: one.cost)
    return best


def p95(waits: list[float]) -> float:
    """Return the 95th percentile of the waits, in seconds."""
    return harness.percentile(waits, 95)


def run(seeds: Sequence[int], png: Path | None) -> list[dict[str, Any]]:
    """Run each fleet on each day; costs are added up, waits pooled."""
    days: dict[str, list[Day]] = {"elastic": [], "static peak": [], "static, no worse": [], "toggle": []}
    for seed in seeds:
        jobs = trace(seed)
        ours = Fleet(jobs, seed, lambda snapshot: decide(snapshot, ELASTIC)).run()
        found = (
            ours,
            static(jobs, seed, ours.peak),
            no_worse(jobs, seed, ours.peak, p95(ours.waits)),
            Fleet(jobs, seed, toggle).run(),
        )
        for (name, kept), day in zip(days.items(), found, strict=True):
            kept.append(day)
            harness.progress(f"day {seed}: {name}: cost {day.cost:.0f}, p95 wait {p95(day.waits):.0f} s")
    if png is not None and not draw(png, {name: kept[0] for name, kept in days.items()}):
        harness.progress("no picture: matplotlib is not installed")
    cost = {name: sum(day.cost for day in kept) / len(kept) for name, kept in days.items()}
    wait = {name: p95([one for day in kept for one in day.waits]) for name, kept in days.items()}

    def against(metric: str, values: dict[str, float], peer: str, unit: str) -> dict[str, Any]:
        # A wait of nothing has no ratio: a second is the least.
        ours, theirs = max(1.0, values["elastic"]), max(1.0, values[peer])
        return harness.row(metric, ours, theirs, unit, more_is_better=False, peer_name=peer)

    return [
        against("cost_against_static_peak", cost, "static peak", "a day"),
        against("p95_wait_against_static_peak", wait, "static peak", "s"),
        against("cost_against_static_no_worse", cost, "static, no worse", "a day"),
        against("p95_wait_against_static_no_worse", wait, "static, no worse", "s"),
        against("p95_wait_against_toggle", wait, "toggle", "s"),
        against("cost_against_toggle", cost, "toggle", "a day"),
    ]


def draw(path: Path, days: dict[str, Day]) -> bool:
    """Draw backlog, machines and cost of a day as PNG; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for number, title in enumerate(("tasks that wait", "machines", "cost per hour"), start=1):
        axes = figure.add_subplot(3, 1, number)
        for name, day in days.items():
            samples = [sample for sample in day.samples if sample[0] <= DAY]
            axes.plot([at / 3600 for at, *_ in samples], [one[number] for one in samples], label=name, linewidth=1)
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        axes.legend()
    axes.set_xlabel("hour of the day")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=100)
    return True


def main() -> None:
    """Run the days and show the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two days; ends within 60 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the first day")
    asked = parser.parse_args()
    rows = run(QUICK_SEEDS if asked.quick else SEEDS, asked.png)
    harness.show("elastic_day", rows, as_json=False)
    if asked.json:
        print(json.dumps({"name": "elastic_day", "rows": rows}))


if __name__ == "__main__":
    main()
