"""The progress view: events in, stages out, in a terminal and in plain lines."""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpuflow.progress import TerminalProgress, model_of, render
from gpuflow.progress_model import ProgressModel

_NUMBERS = itertools.count(1)
RUN = "run-1"


@dataclass(frozen=True)
class Event:
    source: str
    name: str
    data: dict[str, Any] = field(default_factory=dict)
    second: float = 0.0
    number: int = field(default_factory=lambda: next(_NUMBERS))

    @property
    def id(self) -> str:
        return f"{int(self.second * 1000)}-{self.number}"

    @property
    def at(self) -> float:
        return self.second


@dataclass(frozen=True)
class Stage:
    name: str


class Run:
    """A pipeline of two stages."""

    id = RUN

    def template(self) -> Any:
        class Template:
            stages = (Stage("tune"), Stage("ask"))

        return Template


HISTORY = [
    Event(RUN, "state", {"state": "QUEUED"}, 100),
    Event(RUN, "stage", {"stage": "tune", "state": "DISPATCHED", "tasks": ["t1"]}, 101),
    Event("t1", "state", {"state": "QUEUED"}, 101),
    Event("t1", "state", {"state": "STARTING", "attempt": 1, "worker": "w1"}, 102),
    Event("t1", "state", {"state": "RUNNING", "attempt": 1}, 102),
    Event("t1", "worker", {"status": "loading", "message": "loading the model"}, 102),
    Event("t1", "worker", {"status": "loading", "message": "downloading 42%"}, 103),
    Event("t1", "worker", {"status": "loading", "message": "downloading 43%"}, 104),
    Event("t1", "progress", {"current": 1, "total": 60, "unit": "step", "metrics": {"loss": 3.3}}, 110),
    Event("t1", "progress", {"current": 2, "total": 60, "unit": "step", "metrics": {"loss": 3.2}}, 111),
    Event("t1", "progress", {"current": 60, "total": 60, "unit": "step", "metrics": {"loss": 1.2345}}, 112),
    Event("t1", "state", {"state": "SUCCEEDED", "attempt": 1}, 113),
    Event(RUN, "stage", {"stage": "tune", "state": "SUCCEEDED"}, 114),
    Event(RUN, "stage", {"stage": "ask", "state": "DISPATCHED", "tasks": ["t2", "t3"]}, 115),
    Event("t2", "state", {"state": "STARTING", "attempt": 2, "worker": "w1"}, 116),
    Event(RUN, "stage", {"stage": "ask", "state": "FAILED", "error": {"message": "no \x1b[31mdisk"}}, 117),
    Event(RUN, "state", {"state": "FAILED", "error": {"message": "stage 'ask' failed"}}, 118),
]


def played(*events: Event) -> ProgressModel:
    model = ProgressModel(RUN, ["tune", "ask"])
    for event in events:
        model.update(event)
    return model


def plain(events: list[Event], since: float = 0.0) -> list[str]:
    out = io.StringIO()
    view = TerminalProgress(Run(), console=Console(file=out), since=since)
    for event in events:
        view.show(event)
    view.close()
    view.close()
    return [line.partition("] ")[2] for line in out.getvalue().splitlines()]


def test_stages_follow_the_events() -> None:
    model = played(*HISTORY[:10])
    tune, ask = model.stages["tune"], model.stages["ask"]
    assert (tune.state, ask.state) == ("RUNNING", "PENDING")
    assert tune.done == (2, 60, "step")
    assert tune.metrics == {"loss": 3.2}
    assert tune.message == "downloading 43%"
    assert tune.started_at == 102
    model = played(*HISTORY)
    assert [stage.state for stage in model.stages.values()] == ["SUCCEEDED", "FAILED"]
    assert model.stages["ask"].error == "no disk"
    assert model.state == "FAILED"


def test_an_event_seen_before_changes_nothing() -> None:
    model = played(*HISTORY)
    assert [model.update(event) for event in HISTORY] == [None] * len(HISTORY)


def test_a_stage_of_several_tasks_counts_tasks_and_sums_speed() -> None:
    model = played(
        Event(RUN, "stage", {"stage": "ask", "state": "DISPATCHED", "tasks": ["a", "b"]}),
        Event("a", "state", {"state": "SUCCEEDED"}),
        Event("b", "state", {"state": "STARTING"}),
        Event("b", "progress", {"current": 5, "total": 10, "metrics": {"tokens_per_second": 20}}),
        Event("a", "progress", {"current": 1, "metrics": {"tokens_per_second": 30}}),
    )
    assert model.stages["ask"].done == (1.5, 2, "task")
    assert model.stages["ask"].metrics == {"tokens/s": 50}


def test_a_resume_begins_what_is_not_done_again() -> None:
    model = played(*HISTORY, Event(RUN, "state", {"state": "RUNNING", "epoch": 2}, 200))
    assert [stage.state for stage in model.stages.values()] == ["SUCCEEDED", "PENDING"]
    assert model.stages["ask"].error == ""


def test_a_cancel_ends_every_open_stage() -> None:
    model = played(*HISTORY[:10], Event(RUN, "state", {"state": "CANCELLED"}, 200))
    assert [stage.state for stage in model.stages.values()] == ["CANCELLED", "CANCELLED"]


def test_plain_lines_are_few() -> None:
    assert plain(HISTORY) == [
        "tune: queued",
        "tune: started on w1",
        "tune: loading the model",
        "tune: downloading 42%",
        "tune: 1/60 steps, loss 3.3",
        "tune: 60/60 steps, loss 1.234",
        "tune: succeeded",
        "ask: queued (2 tasks)",
        "ask: started again (attempt 2) on w1",
        "ask: failed: no disk",
        "pipeline failed: stage 'ask' failed",
    ]


def test_plain_lines_leave_out_what_was_before() -> None:
    assert plain(HISTORY, since=114) == [
        "tune: succeeded",
        "ask: queued (2 tasks)",
        "ask: started again (attempt 2) on w1",
        "ask: failed: no disk",
        "pipeline failed: stage 'ask' failed",
    ]


def test_a_task_alone() -> None:
    class Task:
        id = "t9"

        def record(self) -> Any:
            class Record:
                name, task_type = "hello", "echo"

            return Record

    model = model_of(Task())
    model.update(Event("t9", "state", {"state": "STARTING"}))
    assert model.stages["hello"].state == "RUNNING"
    change = model.update(Event("t9", "state", {"state": "FAILED", "error": {"message": "boom"}}))
    assert change is not None
    assert change.text == "failed: boom"
    assert model.stages["hello"].final


def shown(model: ProgressModel, height: int = 25, encoding: str = "utf-8") -> str:
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=buffer, force_terminal=True, width=110, height=height, color_system=None)
    console.print(render(model, console, {}, now=lambda: 120.0))
    buffer.flush()
    return buffer.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def test_the_table_shows_bar_count_loss_and_message() -> None:
    text = shown(played(*HISTORY[:10]))
    assert "tune" in text
    assert "2/60 steps" in text
    assert "loss 3.2" in text
    assert "downloading 43%" in text
    assert "18.0 s" in text
    assert "╸" in text


def test_the_table_works_in_an_ascii_terminal() -> None:
    assert "tune" in shown(played(*HISTORY), encoding="ascii")


def test_a_low_terminal_shows_what_matters() -> None:
    model = ProgressModel(RUN, [f"s{number}" for number in range(100)])
    for number in range(60):
        model.update(Event(RUN, "stage", {"stage": f"s{number}", "state": "SUCCEEDED"}))
    model.update(Event(RUN, "stage", {"stage": "s60", "state": "DISPATCHED", "tasks": ["x"]}))
    text = shown(model, height=10)
    assert "s60" in text
    assert "60 of 100 stages done" in text
    assert len(text.splitlines()) < 10


def test_a_live_view_leaves_the_terminal_as_it_was() -> None:
    out = io.StringIO()
    view = TerminalProgress(Run(), console=Console(file=out, force_terminal=True, width=100, height=20))
    for event in HISTORY[:10]:
        view.show(event)
    view.close()
    view.show(HISTORY[10])
    view.close()
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1
    assert "tune" in out.getvalue()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([RUN, "t1", "stranger"]),
            st.sampled_from(["state", "worker", "progress", "log", "artifact", "finish", "own"]),
            st.dictionaries(
                st.sampled_from(
                    ["state", "message", "status", "current", "total", "unit", "metrics", "error", "worker"]
                ),
                JSON,
                max_size=5,
            ),
        ),
        max_size=8,
    )
)
def test_whatever_an_executor_tells_the_view_lives(events: list[tuple[str, str, dict[str, Any]]]) -> None:
    model = played(HISTORY[1], *(Event(source, name, data, 200) for source, name, data in events))
    assert "tune" in shown(model)
