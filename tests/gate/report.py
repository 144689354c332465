"""The end of a run of the gate: a row for each build and suite, then what failed, was flaky or was left. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: The report fits into so many lines.
MOST_LINES: Final = 40
_ERROR: Final = re.compile(r"error|failed|fatal|no such|not found|exception", re.IGNORECASE)
#: What tox says at its end names no cause.
_OF_TOX: Final = re.compile(r"\s*\S+: (exit|FAIL)|\s*evaluation failed")
_WIDTH: Final = 220
_SUITE: Final = "tests.gate.suite"


@dataclass(frozen=True, kw_only=True)
class Build:
    """A build of an environment of tox; `error` is empty where it went well."""

    name: str
    seconds: float
    error: str


def cause_of(log: str) -> str:
    """Return the line of a log that names the cause: the last one that speaks of an error, else the last one."""
    said = [line.strip() for line in log.splitlines() if line.strip() and not _OF_TOX.match(line)]
    errors = [line for line in said if _ERROR.search(line)]
    return (errors or said or ["it said nothing"])[-1][:_WIDTH]


def end_of_run(
    *,
    builds: Sequence[Build],
    environments: Mapping[str, Any],
    expected: Sequence[str],
    suites: Sequence[Mapping[str, Any]],
    left: Sequence[str],
    seconds: float,
    tox_code: int = 0,
) -> tuple[list[str], int]:
    """Return the lines of the report and the exit code: 0 if all was built, run and passed and nothing is left.

    `environments` are those of tox's --result-json, `suites` what tests/gate/suite.py wrote, `expected` the
    environments that were to run, `tox_code` how tox ended.
    """
    rows = [f"{'suite':<22}{'passed':>8}{'failed':>8}{'flaky':>7}{'seconds':>9}"]
    rows += [f"{'build ' + one.name:<22}{_word(not one.error):>8}{'':>15}{one.seconds:>9.0f}" for one in builds]
    told = [f"BUILD FAILED {one.name}: {one.error}" for one in builds if one.error]
    for name in expected:
        steps = environments.get(name, {}).get("test", [])
        plain = [step for step in steps if _SUITE not in step["command"]]
        unfinished = [name for name in map(_suite_of, steps) if name and name not in {one["name"] for one in suites}]
        told += [f"FAILED {one}: it ended without a report" for one in unfinished]
        failed = [step for step in plain if step.get("retcode")]
        if plain or not steps:
            ran = bool(steps)
            rows.append(f"{name:<22}{_word(ran and not failed):>8}")
        if not steps:
            told.append(f"FAILED {name}: it did not run")
        told += [f"FAILED {name}: {_command(step)}: {cause_of(_output(step))}" for step in failed]
    flaky = []
    for suite in suites:
        failures = _distinct(suite["failures"])
        forgiven = _distinct(suite["flaky"])
        rows.append(
            f"{suite['name']:<22}{suite['passed']:>8}{len(failures):>8}{len(forgiven):>7}{suite['seconds']:>9.0f}"
        )
        told += [f"FAILED {_failure(one)}" for one in failures]
        told += [f"STRAY in {suite['name']}: {stray}"[:_WIDTH] for stray in suite["strays"]]
        if suite["code"] and not failures and not suite["strays"]:
            cause = suite["second_pass"] or f"pytest ended with {suite['code']}"
            told.append(f"FAILED {suite['name']}: {cause}")
        if suite["code"] and failures:
            told.append(f"  no second pass in {suite['name']}: {suite['second_pass']}")
        flaky += [f"FLAKY {_failure(one)} (load {one['load']})" for one in forgiven]
    told += [f"LEFT OVER {one}"[:_WIDTH] for one in left]
    if not told and (tox_code or not builds):
        told.append(f"FAILED tox: it ended with {tox_code}" if builds else "FAILED tox: it has no environments")
    good = not told
    space = MOST_LINES - len(rows) - 4
    shown = [*told, *flaky]
    if len(shown) > space:
        shown = [*shown[: space - 1], f"... and {len(shown) - space + 1} more; .tox/gate has all of them"]
    return ["", *rows, "", *shown, _sum(suites, seconds, good)], 0 if good else 1


def _distinct(failures: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first failure of each test."""
    return list({one["node_id"]: one for one in reversed(failures)}.values())[::-1]


def _failure(one: Mapping[str, Any]) -> str:
    return f"{one['node_id']} [{one['phase']}, {one['seconds']:g} s] {one['error']}"[:_WIDTH]


def _word(good: bool) -> str:
    return "ok" if good else "FAILED"


def _suite_of(step: Mapping[str, Any]) -> str:
    """Return the name of the suite that a command of tox runs, if it runs one."""
    command = step["command"]
    return command[command.index(_SUITE) + 1] if _SUITE in command else ""


def _command(step: Mapping[str, Any]) -> str:
    program, *arguments = step["command"]
    return " ".join([program.rpartition("/")[2], *arguments])[:60]


def _output(step: Mapping[str, Any]) -> str:
    return f"{step.get('output', '')}\n{step.get('err', '')}"


def _sum(suites: Sequence[Mapping[str, Any]], seconds: float, good: bool) -> str:
    """Return a last line as pytest has it; a failure that was forgiven is none."""
    counts = {
        "failed": sum(len(_distinct(one["failures"])) for one in suites),
        "passed": sum(one["passed"] for one in suites),
        "skipped": sum(one["skipped"] for one in suites),
    }
    if not good and not counts["failed"]:
        counts["failed"] = 1  # a build, a command, a leftover
    text = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "no tests ran"
    return f"========== {text} in {seconds:.2f}s =========="
