"""`tox -e fuzz`: a million inputs, in parts over two processes; ends with the table of figures.

    python -m tests.fuzz [--inputs N] [--processes N] [--seed S] [--reader NAME]
    python -m tests.fuzz --seed S --reader NAME --only NUMBER     # one input again: shows it, and what it leads to

The exit code is 1 where a reader crashed, or took more than 100 ms of processor time for an input.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.fuzz.campaign import MOST_KEPT, Figures, input_of, run
from tests.fuzz.parts import PART, run_part
from tests.fuzz.readers import READERS, named

_SHOWN = 400


def _jobs(names: list[str], seed: str, inputs: int) -> Iterator[tuple[str, str, int, int]]:
    """Yield the parts, the readers in turn."""
    share = -(-inputs // len(names))
    for start in range(0, share, PART):
        for name in names:
            yield name, seed, start, min(start + PART, share)


def _only(name: str, seed: str, number: int) -> int:
    with tempfile.TemporaryDirectory(prefix="gpuflow-fuzz-") as folder:
        reader, figures = named(name)(Path(folder)), Figures(reader=name)
        data = input_of(reader, seed, number)
        print(f"{len(data)} bytes:\n{data!r}")
        try:
            run(reader, seed, [number], figures)
        finally:
            reader.close()
    print(_table([figures]))
    for finding in figures.findings:
        print(f"{finding.kind}: {finding.detail}")
    return 1 if figures.findings else 0


def _table(all_figures: list[Figures]) -> str:
    lines = [
        f"{'reader':<20}{'inputs':>9}{'crashes':>9}{'slow':>6}{'slowest':>12}{'bytes':>7}  number   what came of them"
    ]
    for one in all_figures:
        kinds = ", ".join(f"{kind} {count}" for kind, count in one.errors.most_common(8))
        slowest = f"{one.slowest_seconds * 1000:.1f} ms"
        lines.append(
            f"{one.reader:<20}{one.inputs:>9}{one.crashes:>9}{one.slow:>6}{slowest:>12}{one.slowest_bytes:>7}"
            f"  {one.slowest_number:<7}  {kinds}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all readers together (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.0, help="begin nothing new after this time")
    parser.add_argument("--seed", default="", help="the same seed makes the same inputs (default: a new one)")
    parser.add_argument("--reader", action="append", default=[], help="only this one, by the beginning of its name")
    parser.add_argument("--only", type=int, help="only this input of --reader")
    given = parser.parse_args()
    seed = given.seed or secrets.token_hex(4)
    names = [named(name).name for name in given.reader] or [reader.name for reader in READERS]
    print(f"seed {seed}", flush=True)
    if given.only is not None:
        return _only(names[0], seed, given.only)
    figures = {name: Figures(reader=name) for name in names}
    jobs, began, shown = list(_jobs(names, seed, given.inputs)), time.monotonic(), 0.0
    pool = ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn"))
    with pool:
        for done in as_completed([pool.submit(run_part, job) for job in jobs]):
            part = done.result()
            figures[part.reader].add(part)
            for finding in part.findings:
                print(f"{finding.kind} of {finding.reader!r}, input {finding.number}: {finding.detail[-_SHOWN:]}")
            now = time.monotonic()
            if given.seconds and now - began > given.seconds:
                pool.shutdown(cancel_futures=True)
                break
            if now - shown > 10:
                shown = now
                count = sum(one.inputs for one in figures.values())
                print(f"{count:>9} inputs in {now - began:.0f} s", flush=True)
    found = list(figures.values())
    total, seconds = sum(one.inputs for one in found), time.monotonic() - began
    print(f"\nseed {seed}: {total} inputs in {seconds:.0f} s, {given.processes} processes\n{_table(found)}")
    crashes, slow = sum(one.crashes for one in found), sum(one.slow for one in found)
    print(f"{crashes} crashes, {slow} slow; at most {MOST_KEPT} of each are shown for a part")
    return 1 if crashes or slow else 0


if __name__ == "__main__":
    sys.exit(main())
