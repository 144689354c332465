"""What fleet_scale.py prints: the check of the simulated workers, the extrapolation, and the rows of its table."""

from __future__ import annotations

from typing import Any

from harness import percentile, row

#: The fleet that is extrapolated to.
LARGE = 10_000
#: A submitter that reads the registry for longer than this, in seconds, is felt.
READ_SECONDS = 1.0


def core_share(reading: Any, alone: Any) -> float:
    """Return the share of the server's core that its clients cause: without what it uses when nobody is there."""
    return max(1e-6, reading.cpu_seconds / reading.seconds - alone.cpu_seconds / alone.seconds)


def show_check(check: dict[str, Any], count: int) -> None:
    """Print what a real idle worker costs next to a simulated one, command by command."""
    real, simulated, growth = check["real"], check["simulated"], check["real_growth"]
    print(f"idle, per worker and second: {count} real workers next to {count} simulated ones")
    for name, reading in (("real", real), ("simulated", simulated)):
        share = reading.seconds * count
        print(
            f"  {name:<10} {reading.commands / share:6.1f} commands, "
            f"{core_share(reading, check['alone']) / count * 1e6:5.0f} us of Redis, "
            f"{reading.sent_bytes / share:6.0f} bytes sent to it"
        )
    ours, theirs = real.per(real.seconds * count), simulated.per(simulated.seconds * count)
    other = {
        name: (ours.get(name, 0.0), theirs.get(name, 0.0))
        for name in {*ours, *theirs}
        if abs(ours.get(name, 0.0) - theirs.get(name, 0.0)) > 0.1
    }
    told = ", ".join(f"{name} {a:.1f} and {b:.1f}" for name, (a, b) in sorted(other.items()))
    print(f"  they differ in: {told or 'nothing'}")
    print(
        f"  a real worker has {check['rss_bytes'] / 2**20:.0f} MiB of its own, "
        f"{growth.connections / count:.1f} connections, and {growth.memory_bytes / count / 1024:.0f} KiB of Redis"
    )


def say(run: Any) -> None:
    """Print what was found with one fleet and one number of requirements."""
    lines = [f"{run.workers} workers, {run.requirements} requirements:"]
    if run.served is not None:
        redis_ms = run.served.cpu_seconds / run.tasks * 1e3
        lines += [
            f"{run.tasks} tasks: {run.submit_rate:.0f} submits/s of one process, {run.tasks / run.served.seconds:.0f} "
            f"tasks/s served, {run.served.commands / run.tasks:.0f} commands and {redis_ms:.2f} ms of Redis each",
            f"  most of them: {_most(run.served.per(run.tasks))}",
            f"a task of priority 9 while all are busy waits {_latency(run.loaded_latency)}",
        ]
    lines.append(
        f"idle: {run.idle.commands / run.idle.seconds / run.workers:.1f} commands/s of each worker"
        + (f", {run.fleet_bytes / run.workers / 1024:.0f} KiB of Redis" if run.fleet_bytes else "")
        + f"; a task waits {_latency(run.idle_latency)}"
    )
    print("\n  ".join(lines), flush=True)


def _latency(seconds: list[float]) -> str:
    return f"{percentile(seconds, 50) * 1e3:.1f} ms (p50), {percentile(seconds, 99) * 1e3:.1f} ms (p99)"


def _most(shares: dict[str, float]) -> str:
    most = sorted(shares.items(), key=lambda item: -item[1])[:8]
    return ", ".join(f"{name} {share:.1f}" for name, share in most)


def extrapolate(runs: list[Any], check: dict[str, Any], count: int) -> None:
    """Print what a fleet of LARGE would cost, and how many workers each part carries."""
    largest = max(runs, key=lambda run: (run.workers, -run.requirements))
    idle = largest.idle
    each = idle.seconds * largest.workers
    commands, core = idle.commands / each * LARGE, core_share(idle, check["alone"]) / largest.workers * LARGE
    task = max(run.served.cpu_seconds / run.tasks for run in runs if run.served and run.workers == largest.workers)
    speed = check["speed"]
    connections = check["real_growth"].connections / count
    read = largest.registry_seconds / largest.workers
    print(f"{LARGE} workers, extrapolated from {largest.workers}:")
    print(
        f"  idle {commands:,.0f} commands/s; one core of this server does {speed['SET']:,.0f} SET/s "
        f"or {speed['EVALSHA']:,.0f} EVALSHA/s, and would be busy for {core:.0%} of the time"
    )
    left = max(0.0, 1 - core)
    if left:
        print(
            f"  the rest of the core serves {left / task:,.0f} tasks/s: all workers stay busy with tasks "
            f"of {LARGE * task / left:.0f} s or longer"
        )
    parts = {
        f"connections: {connections:.0f} each, maxclients {check['maxclients']}": check["maxclients"] / connections,
        f"the core of Redis: {core / LARGE * 1e6:.0f} us a second of each idle worker": LARGE / core,
        f"a submitter that reads the registry for {READ_SECONDS:g} s, every 20 s at most": READ_SECONDS / read,
    }
    for name, workers in sorted(parts.items(), key=lambda item: item[1]):
        print(f"  {workers:>8,.0f} workers  {name}")
    print(f"  first to break: {min(parts, key=lambda name: parts[name])}")


def rows_of(runs: list[Any], check: dict[str, Any], sizes: Any) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    fewest, usual, most = sizes.requirements
    flat = {run.workers: run for run in runs if run.requirements == usual}
    wide = {run.requirements: run for run in runs if run.workers == sizes.fleets[-1]}
    small, large = flat[sizes.fleets[0]], flat[sizes.fleets[-1]]
    few = f"{small.workers} workers; ours: {large.workers}"
    rows = []

    def less(metric: str, ours: float, peer: float, unit: str, name: str) -> None:
        rows.append(row(metric, ours, peer, unit, more_is_better=False, peer_name=name))

    def rate(metric: str, ours: Any, peer: Any, name: str) -> None:
        rates = ours.submit_rate, peer.submit_rate
        rows.append(row(metric, *rates, "tasks/s", more_is_better=True, peer_name=name))

    def idle(run: Any, what: str) -> float:
        return float(getattr(run.idle, what) / run.idle.seconds / run.workers)

    def core(run: Any) -> float:
        return core_share(run.idle, check["alone"]) / run.workers * 1e6

    def served(run: Any, what: str) -> float:
        return float(getattr(run.served, what) / run.tasks)

    less("cost_per_worker_flat", idle(large, "commands"), idle(small, "commands"), "cmds/s", few)
    less("cost_per_task_flat", served(large, "commands"), served(small, "commands"), "commands", few)
    less("redis_time_per_worker_flat", core(large), core(small), "us/s", few)
    less("redis_time_per_task_flat", served(large, "cpu_seconds") * 1e3, served(small, "cpu_seconds") * 1e3, "ms", few)
    less("memory_per_worker_flat", large.fleet_bytes / large.workers, small.fleet_bytes / small.workers, "bytes", few)
    rate("submit_rate_flat", large, small, few)
    for between in sizes.fleets[1:-1]:
        one, name = flat[between], f"{small.workers} workers; ours: {between}"
        less(f"commands_per_worker_{between}", idle(one, "commands"), idle(small, "commands"), "cmds/s", name)
        less(
            f"memory_per_worker_{between}", one.fleet_bytes / between, small.fleet_bytes / small.workers, "bytes", name
        )
    name = f"{fewest} requirements"
    base = wide[fewest]
    for kinds in dict.fromkeys((usual, most)):
        run = wide[kinds]
        rate(f"submit_rate_{kinds}", run, base, name)
        for kind in ("idle_latency", "loaded_latency"):
            for percent in (50, 99):
                ours, peer = (percentile(getattr(one, kind), percent) for one in (run, base))
                less(f"{kind}_p{percent}_{kinds}", ours, peer, "s", name)
        ours, peer = (one.submitted.dataset_bytes / (sizes.tasks_per_worker * one.workers) for one in (run, base))
        less(f"memory_per_task_{kinds}", ours, peer, "bytes", name)
    stock, real = check["stock"], check["real"]
    queues = f"stock Celery worker with {usual} queues"
    share = real.seconds * sizes.real
    less("idle_commands", real.commands / share, stock.commands / stock.seconds, "cmds/s", queues)
    ours, peer = core_share(real, check["alone"]) / sizes.real * 1e6, core_share(stock, check["alone"]) * 1e6
    less("idle_redis_time", ours, peer, "us/s", queues)
    less("idle_received", real.received_bytes / share, stock.received_bytes / stock.seconds, "bytes/s", queues)
    return rows
