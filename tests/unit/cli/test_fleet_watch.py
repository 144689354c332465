"""The live view of the fleet: rates, one line, tables; a broker that is away for a moment."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from gpuflow.cli import fleet_watch
from gpuflow.cli.fleet_watch import MOST_ROWS, PATIENCE_SECONDS, FleetLook, Rates, looks, summary, view
from gpuflow.errors import BrokerUnavailable
from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.routing.capability import Capability, GpuCapability


def look(now: float = 1000.0, **changes: Any) -> FleetLook:
    card = GpuCapability(uuid="GPU-0", index=0, names=("a100",), vram_gb=80.0, total_mib=81920)
    able = Capability(gpus=(card,), cpu_count=8, memory_mib=65536).to_dict()
    load = {"freeGpus": [], "gpus": {"GPU-0": {"utilizationPercent": 90}}}
    worker = WorkerEntry(id="w1", state=WorkerState.BUSY, capability=able, load=load, tasks=("t1",), seen_seconds=3)
    task = TaskRecord(
        id="t1", state=TaskState.RUNNING, name="tune\x1b[31m", worker="w1", started_at=now - 65,
        progress={"current": 3, "total": 60},
    )  # fmt: skip
    queues = [
        {"name": "gpu-a100", "waiting": 4, "oldestAt": now - 180, "running": 1, "workers": ["w1"]},
        {"name": "idle", "waiting": 0, "oldestAt": None, "running": 0, "workers": []},
    ]
    values = {"workers": [worker], "queues": queues, "running": [task], "running_count": 1, "ended": {"SUCCEEDED": 10}}
    return FleetLook(now=now, **{**values, **changes})


def shown(of: FleetLook, rates: dict[str, float] | None = None) -> str:
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    console.print(view(of, rates or {}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_the_summary_is_one_line() -> None:
    line = summary(look(), {"SUCCEEDED": 12.0, "FAILED": 0.0})
    assert line == "workers: 1 busy | waiting: 4 | running: 1 | ended: 10 succeeded | a minute: 12.0 succeeded"
    assert summary(look(workers=[], queues=[], running_count=0, ended={}), {}) == (
        "workers: none | waiting: 0 | running: 0 | ended: none"
    )


def test_the_view_has_workers_queues_and_tasks() -> None:
    text = shown(look())
    for part in ("w1", "BUSY", "1 of 1, 90 %", "gpu-a100", "t1", "1m 05s", "3/60", "3 s ago", "3 min"):
        assert part in text
    assert "idle" not in text, "a queue in which nothing is"
    assert "\x1b" not in text, "a name steers the terminal"


def test_long_tables_are_cut_and_say_so() -> None:
    many = [WorkerEntry(id=f"w{number:03}", state=WorkerState.IDLE) for number in range(MOST_ROWS + 5)]
    text = shown(look(workers=many))
    assert "5 more" in text and f"w{MOST_ROWS:03}" not in text


def test_rates_are_those_of_the_last_minute() -> None:
    rates = Rates()
    assert rates.per_minute(look(0, ended={"SUCCEEDED": 100})) == {}
    assert rates.per_minute(look(30, ended={"SUCCEEDED": 110, "FAILED": 1})) == {"SUCCEEDED": 20, "FAILED": 2}
    for second in range(40, 200, 10):
        found = rates.per_minute(look(second, ended={"SUCCEEDED": 110, "FAILED": 1}))
    assert found == {"SUCCEEDED": 0, "FAILED": 0}
    assert rates.per_minute(look(200, ended={"SUCCEEDED": 5})) == {"SUCCEEDED": 0}, "a server that lost its memory"


class Ended(Exception):
    """The test has seen enough."""


def answered_by(monkeypatch: pytest.MonkeyPatch, *answers: FleetLook | BaseException) -> None:
    """Let the fleet be read as these say, one after the other."""
    left = list(answers)

    def read(_: object) -> FleetLook:
        answer = left.pop(0)
        if isinstance(answer, FleetLook):
            return answer
        raise answer

    monkeypatch.setattr(fleet_watch, "read", read)


def test_a_broker_that_is_away_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answered_by(monkeypatch, BrokerUnavailable("away"), look(), Ended())
    away: list[float] = []
    seen = looks(None, away.append, clock=lambda: 0.0, wait=lambda _: None)  # type: ignore[arg-type]
    assert next(seen).now == 1000.0 and away == [0.0]
    with pytest.raises(Ended):
        next(seen)


def test_a_broker_that_stays_away_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def away(_: object) -> FleetLook:
        raise BrokerUnavailable("away")

    def wait(_: float) -> None:
        now[0] += PATIENCE_SECONDS

    monkeypatch.setattr(fleet_watch, "read", away)
    with pytest.raises(BrokerUnavailable):
        next(looks(None, lambda _: None, clock=lambda: now[0], wait=wait))  # type: ignore[arg-type]
    assert now[0] > PATIENCE_SECONDS


def test_a_view_without_its_broker_says_that_it_is_old() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(view(look(), {}, fleet_watch.away_text(12)))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "the broker has not answered for 12 s" in told and "w1" in told


def test_lines_without_their_broker_say_so_once_and_then_the_fleet_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = BrokerUnavailable("away")
    answered_by(monkeypatch, look(), look(), gone, gone, look(), KeyboardInterrupt())
    monkeypatch.setattr(fleet_watch, "REFRESH_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        fleet_watch._plain(None)  # type: ignore[arg-type]
    first, away, again = capsys.readouterr().out.splitlines()
    assert "workers: 1 busy" in first and "workers: 1 busy" in again
    assert "the broker does not answer" in away
