"""A simulated day of an elastic fleet by the real `decide()`: what it costs, and how long tasks wait.

500 tasks, a third by chance and the rest in bursts, three kinds of machines that take minutes to come. Against a static
fleet that costs in every hour what the elastic one costs at its peak, of the composition with the least p95 wait on this
very trace; and against a toggle, which starts or ends one machine at each poll. `--png FILE` draws the first day.
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


def static_peer(jobs: list[Job], seed: int, per_hour: float) -> Day:
    """Return the day of the static fleet of this cost that makes p95 least; each queue has a machine that serves it."""
    best: Day | None = None
    cpu, a10, a100 = FAMILIES
    for large, middle in itertools.product(range(1, a100.most + 1), range(1, a10.most + 1)):
        left = per_hour - large * a100.cost_per_hour - middle * a10.cost_per_hour
        small = min(cpu.most, int(left / cpu.cost_per_hour + 1e-9))
        if left < -1e-9:
            continue
        day = Fleet(jobs, seed, None, Counter({"cpu": small, "a10": middle, "a100": large})).run()
        if best is None or (p95(day.waits), day.cost) < (p95(best.waits), best.cost):
            best = day
    if best is None:
        raise SystemExit(f"no static fleet that serves every queue costs {per_hour:g} an hour")
    return best


def p95(waits: list[float]) -> float:
    """Return the 95th percentile of the waits, in seconds."""
    return harness.percentile(waits, 95)


def run(seeds: Sequence[int], png: Path | None) -> list[dict[str, Any]]:
    """Run each fleet on each day; costs are added up, waits pooled."""
    ours, static, toggled = [], [], []
    for seed in seeds:
        jobs = trace(seed)
        ours.append(Fleet(jobs, seed, lambda snapshot: decide(snapshot, ELASTIC)).run())
        toggled.append(Fleet(jobs, seed, toggle).run())
        static.append(static_peer(jobs, seed, ours[-1].peak_cost_per_hour))
        harness.progress(
            f"day {seed}: elastic {ours[-1].cost:.0f}, p95 {p95(ours[-1].waits):.0f} s; "
            f"static {static[-1].cost:.0f}, {p95(static[-1].waits):.0f} s; "
            f"toggle {toggled[-1].cost:.0f}, {p95(toggled[-1].waits):.0f} s"
        )
    if png is not None and not draw(png, ours[0], static[0], toggled[0]):
        harness.progress("no picture: matplotlib is not installed")
    pooled = [[wait for day in days for wait in day.waits] for days in (ours, static, toggled)]
    costs = [sum(day.cost for day in days) / len(days) for days in (ours, static, toggled)]
    waits = [p95(one) for one in pooled]
    lower = {"more_is_better": False}
    fixed, one_per_poll = "a static fleet of the peak's cost", "one machine per poll"
    return [
        harness.row("cost_against_static_peak", costs[0], costs[1], "a day", peer_name=fixed, **lower),
        harness.row("p95_wait_against_static_peak", waits[0], waits[1], "s", peer_name=fixed, **lower),
        harness.row("p95_wait_against_toggle", waits[0], waits[2], "s", peer_name=one_per_poll, **lower),
        harness.row("cost_against_toggle", costs[0], costs[2], "a day", peer_name=one_per_poll, **lower),
    ]


def draw(path: Path, ours: Day, static: Day, toggled: Day) -> bool:
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
        for name, day in (("gpuflow", ours), ("static", static), ("one per poll", toggled)):
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
