"""Rows as they are rendered: states, who may act, and text of others that stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from gpuflow.fleet.registry import WorkerEntry, WorkerState
from gpuflow.ledger.eventlog import LoggedEvent
from gpuflow.ledger.records import TaskRecord
from gpuflow.ledger.states import TaskState
from gpuflow.monitor import drawing
from gpuflow.monitor.pages import PAGES, TEMPLATES, Renderer, _numbered, _progress, when
from gpuflow.monitor.reading import _node, log_lines, losses, worker_row

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'\x1b[31m\u202e"


class Elements(HTMLParser):
    """The elements of a text, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def actions(text: str) -> list[str | None]:
    return [attributes["data-action"] for tag, attributes in Elements(text).found if tag == "button"]


def entry(**fields: Any) -> WorkerEntry:
    return WorkerEntry(**{"id": "w1", "state": WorkerState.IDLE, "seen_seconds": 3.0, **fields})


def rendered(worker: WorkerEntry, *, can_act: bool = True, names: dict[str, str] | None = None) -> str:
    row = worker_row(worker, names or {}, 1_000_000.0)
    return Renderer(can_act=can_act).render("fleet_row.html", row=row, bar=drawing.memory_bar)


GPU = {"uuid": "GPU-1", "index": 0, "names": ["a100"], "total_mib": 1000, "vram_gb": 1}


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"freeGpus": ["GPU-1"], "gpus": {"GPU-1": {"freeMib": 400}}}, (0, 600, 0)),
        ({"freeGpus": [], "gpus": {"GPU-1": {"freeMib": 400}}, "foreignMib": {"GPU-1": 100}}, (1000, 600, 100)),
        ({"freeGpus": [], "roomMib": {"GPU-1": 700}}, (300, None, 0)),
        ({}, (0, None, 0)),
        ({"freeGpus": None, "gpus": "none", "foreignMib": [1], "roomMib": None}, (0, None, 0)),
        ({"freeGpus": [], "gpus": {"GPU-1": {"freeMib": "much"}}, "roomMib": {"GPU-1": True}}, (1000, None, 0)),
    ],
)
def test_what_is_known_of_a_gpu(load: dict[str, Any], expected: tuple[int, int | None, int]) -> None:
    (gpu,) = worker_row(entry(capability={"gpus": [GPU]}, load=load), {}, 0.0).gpus
    assert (gpu.leased_mib, gpu.used_mib, gpu.foreign_mib) == expected


@pytest.mark.parametrize(
    ("worker", "can_act", "expected"),
    [
        (entry(), True, ["disable", "drain"]),
        (entry(), False, []),
        (entry(enabled=False), True, ["enable", "drain"]),
        (entry(state=WorkerState.OFFLINE, seen_seconds=None), True, []),
        (entry(state=WorkerState.SILENT, seen_seconds=50.0), True, ["disable", "drain"]),
    ],
)
def test_the_actions_of_a_worker(worker: WorkerEntry, can_act: bool, expected: list[str]) -> None:
    assert actions(rendered(worker, can_act=can_act)) == expected


def test_silent_is_not_offline() -> None:
    assert ">silent<" in rendered(entry(state=WorkerState.SILENT))
    assert ">offline<" in rendered(entry(state=WorkerState.OFFLINE, seen_seconds=None))


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        (entry(state=WorkerState.DRAINING), ["draining"]),
        (entry(state=WorkerState.SILENT, seen_seconds=50.0), ["silent"]),  # since when: the heartbeat's column
        (entry(enabled=False, state=WorkerState.BUSY), ["busy", "disabled"]),
        (entry(state=WorkerState.CONNECTING), ["connecting", "to the broker"]),
    ],
)
def test_how_a_worker_stands_is_told_once(worker: WorkerEntry, told: list[str]) -> None:
    cell = rendered(worker).partition('data-label="State">')[2].partition("</td>")[0]
    assert re.sub(r"(<[^>]+>|\s)+", " ", cell).split() == " ".join(told).split()


@pytest.mark.parametrize("state", [WorkerState.IDLE, WorkerState.SILENT, WorkerState.OFFLINE])
def test_a_row_does_not_change_as_time_goes_on(state: WorkerState) -> None:
    def row(seconds: float) -> str:
        found = worker_row(entry(state=state, seen_seconds=50.0 + seconds), {}, 1_000_000.0 + seconds)
        return Renderer(can_act=True).render("fleet_row.html", row=found, bar=drawing.memory_bar)

    assert row(0) == row(5) == row(500)


@pytest.mark.parametrize(("waiting", "kind"), [(0, "soft"), (1, "warn")])
def test_a_queue_without_workers_is_a_warning_where_something_waits(waiting: int, kind: str) -> None:
    row = {"name": "gpu", "waiting": waiting, "running": 0, "oldestAt": None, "workers": [], "why": ""}
    text = Renderer(can_act=True).render("queue_row.html", asks="", row=row)
    assert f'<span class="{kind}">nobody</span>' in text


@pytest.mark.parametrize(
    ("state", "tasks", "note"),
    [
        ("PENDING", [], "pending"),
        ("DISPATCHED", ["QUEUED"], "queued"),
        ("DISPATCHED", ["RUNNING"], "running"),
        ("DISPATCHED", ["SUCCEEDED", "STARTING"], "running, 1 of 2 tasks"),
        ("FAILED", ["FAILED"], "failed"),
    ],
)
def test_a_stage_is_told_alike_in_graph_and_table(state: str, tasks: list[str], note: str) -> None:
    stage = {"name": "tune", "state": state, "tasks": [{"state": one} for one in tasks], "dependsOn": [], "error": None,
             "reason": ""}  # fmt: skip
    node = _node(stage)
    assert node.note == note
    text = Renderer(can_act=True).render("stage_row.html", stage=stage, note=node.note)
    assert f'<span class="state">{note}</span>' in text
    assert note in drawing.graph([node])


def test_text_of_others_stays_text_in_every_row() -> None:
    worker = entry(
        id=HOSTILE,
        hostname=HOSTILE,
        version=HOSTILE,
        capability={"gpus": [{**GPU, "names": [HOSTILE]}], "labels": {HOSTILE: HOSTILE}},
        tasks=("t1", HOSTILE),
    )
    task = TaskRecord(id=HOSTILE, state=TaskState.DEAD, name=HOSTILE, queue=HOSTILE, error={"message": HOSTILE})
    renderer = Renderer(can_act=True)
    texts = [
        rendered(worker, names={"t1": HOSTILE}),
        renderer.render("dead_row.html", task=task),
        renderer.render("task_row.html", task=task.public(), progress=(0.5, HOSTILE)),
        renderer.render("log_line.html", key=HOSTILE, at=1.0, label=HOSTILE, text=HOSTILE),
        renderer.render(
            "queue_row.html", asks=HOSTILE,
            row={"name": HOSTILE, "waiting": 1, "running": 0, "oldestAt": 1.0, "workers": [HOSTILE], "why": HOSTILE},
        ),
        renderer.render("decision_row.html", key=HOSTILE, decision={"at": 1.0, "action": HOSTILE, "reason": HOSTILE}),
    ]  # fmt: skip
    for text in texts:
        for tag, attributes in Elements(text).found:
            assert tag not in ("script", "img")
            assert not [name for name in attributes if name.startswith("on") or name == "style"]
        assert "alert(1)" in text


def test_no_template_turns_escaping_off() -> None:
    for path in TEMPLATES.glob("*.html"):
        text = path.read_text()
        assert "autoescape" not in text
        assert "style=" not in text
        for raw in text.split("{% raw ")[1:]:
            assert raw.startswith(("feed.html(", "when(", "bar(")), f"{path.name} shows raw {raw[:40]!r}"


def test_every_page_has_a_template() -> None:
    assert {page.template for page in PAGES} <= {path.name for path in TEMPLATES.glob("*.html")}


@pytest.mark.parametrize("at", [None, 0, 1e20, float("nan"), -1e20])
def test_a_time_that_is_none_is_not_shown(at: float | None) -> None:
    assert when(at) == ""


def event(step: object, loss: object, source: str = "t") -> LoggedEvent:
    data = {"current": step, "metrics": {"loss": loss}}
    return LoggedEvent(id="1-0", source=source, name="progress", data=data)


def test_losses_are_those_of_the_attempt_that_runs() -> None:
    events = [event(1, 3.0), event(2, 2.0), event(3, 1.0), event(2, 1.5), event(3, 1.2)]
    assert losses(events, {"t": "tune"}) == {"tune": [(1.0, 3.0), (2.0, 1.5), (3.0, 1.2)]}
    odd = [event("1", 1.0), event(1, True), event(1, None), event(1, 1e301), event(1, 2.0, source="other")]
    assert losses(odd, {"t": "tune"}) == {}


@pytest.mark.parametrize(
    ("progress", "share", "text"),
    [
        ({"current": 3, "total": 4, "metrics": {"loss": 0.5}}, 0.75, "3/4 step, loss 0.5"),
        ({"current": 3, "total": 0}, None, "3 step"),
        ({"current": 10**400, "total": 3}, None, ""),
        ({"current": 3, "total": 10**400}, None, "3 step"),
        ({"current": 1, "metrics": {"loss": 10**400, "rate": float("inf"), "done": True}}, None, "1 step"),
        ({"current": float("nan"), "metrics": [1]}, None, ""),
        ("half", None, ""),
    ],
)
def test_progress_of_any_form_is_shown_or_left_out(progress: object, share: float | None, text: str) -> None:
    assert _progress({"progress": progress}) == (share, text)


def test_the_log_names_the_stage_and_has_no_control_characters() -> None:
    events = [
        LoggedEvent(id="1-0", source="p", name="stage", data={"stage": "tune", "state": "DISPATCHED"}),
        LoggedEvent(id="2-0", source="t", name="log", data={"message": "a\x1b[31mb"}),
        LoggedEvent(id="3-0", source="t", name="text_delta", data={"delta": "x"}),
    ]
    assert [(label, text) for _, _, label, text in log_lines(events, {"t": "tune/0"}, "p")] == [
        ("tune", "dispatched"),
        ("tune/0", "ab"),
    ]


def test_keys_of_decisions_stay_when_newer_ones_come() -> None:
    old = [{"at": 2.0, "n": 1}, {"at": 1.0, "n": 2}, {"at": 1.0, "n": 3}]
    before = {one["n"]: key for key, one in _numbered(old)}
    after = {one["n"]: key for key, one in _numbered([{"at": 2.0, "n": 0}, *old])}
    assert len(set(after.values())) == 4
    assert before.items() <= after.items()
