"""What the processes of a fleet write for their operator: one line for an outage, JSON where asked, no secrets."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpuflow
from gpuflow.logs import dress, get_logger, use_level
from gpuflow.outages import QUIET_SECONDS, SYMPTOMS, Outage, SymptomFilter, kind_of
from gpuflow.worker.pool import raise_in_thread
from tests.support.waiting import patient

REFUSED = "Error 111 connecting to 127.0.0.1:6379. Connection refused."


class Told(list[tuple[str, dict[str, Any]]]):
    def __call__(self, event: str, level: int, **fields: Any) -> None:
        self.append((event, fields))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    """What is written under the logger `gpuflow.testing`, by a handler of its own."""
    stream = io.StringIO()
    logger = logging.getLogger("gpuflow.testing")
    own = logging.getLogger("gpuflow")
    before = own.level
    logger.addHandler(logging.StreamHandler(stream))
    yield stream
    logger.handlers.clear()
    own.setLevel(before)


def test_an_outage_is_one_line_at_its_begin_and_one_at_its_end(told: Told) -> None:
    now = 10.0
    outage = Outage(told, clock=lambda: now)
    for _ in range(500):
        outage.symptom(REFUSED)
    now = 70.0
    outage.over()
    outage.over()
    assert told == [
        ("broker_lost", {"cause": REFUSED}),
        ("broker_is_back", {"away_seconds": 60.0, "lines_left_out": 500}),
    ]


def test_what_was_served_before_the_last_refusal_ends_no_outage(told: Told) -> None:
    now = 10.0
    outage = Outage(told, clock=lambda: now)
    outage.symptom(REFUSED)
    outage.over(since=9.9)  # a turn that had begun before
    assert outage.lasts
    outage.over(since=10.1)
    assert not outage.lasts
    assert [event for event, _ in told] == ["broker_lost", "broker_is_back"]


def test_another_kind_of_cause_is_told_once_more(told: Told) -> None:
    outage = Outage(told)
    for cause in (REFUSED, "Connection closed by server.", "OOM command not allowed", REFUSED):
        outage.symptom(cause)
    outage.symptom("WRONGPASS invalid username-password pair or user is disabled.")
    assert [event for event, _ in told] == ["broker_lost", "broker_refuses", "broker_denies"]


def test_a_read_ends_no_outage_in_which_writes_are_refused_until_none_was_for_a_minute(told: Told) -> None:
    now = 10.0
    outage = Outage(told, clock=lambda: now)
    for _ in range(3):
        outage.symptom("OOM command not allowed")
        outage.answered()
    now = 10.0 + QUIET_SECONDS - 1
    outage.answered()
    assert [event for event, _ in told] == ["broker_refuses"]
    now += 1
    outage.answered()
    assert [event for event, _ in told] == ["broker_refuses", "broker_is_back"]


def test_a_read_ends_an_outage_in_which_nothing_was_served(told: Told) -> None:
    outage = Outage(told)
    outage.symptom(REFUSED)
    outage.answered()
    assert [event for event, _ in told] == ["broker_lost", "broker_is_back"]


def test_what_names_no_cause_does_not_hide_the_one_that_follows(told: Told) -> None:
    outage = Outage(told)
    outage.symptom("")
    outage.symptom(REFUSED)
    assert told == [("broker_lost", {"cause": REFUSED})]


def test_after_an_outage_the_next_one_is_told(told: Told) -> None:
    outage = Outage(told)
    for _ in range(2):
        outage.symptom(REFUSED)
        outage.over()
    assert [event for event, _ in told] == ["broker_lost", "broker_is_back"] * 2


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (REFUSED, "broker_lost"),
        ("Timeout reading from socket", "broker_lost"),
        ("MISCONF Errors writing to the AOF file: No space left on device", "broker_refuses"),
        ("command not allowed when used memory > 'maxmemory'.", "broker_refuses"),
        ("You can't write against a read only replica. script: on @user_script:221.", "broker_refuses"),
        ("Link with MASTER is down and replica-serve-stale-data is set to 'no'.", "broker_refuses"),
        ("invalid username-password pair or user is disabled.", "broker_denies"),
        ("NOPERM this user has no permissions", "broker_denies"),
    ],
)
def test_kinds_of_outages(cause: str, kind: str) -> None:
    assert kind_of(cause) == kind


#: Lines about an error of the broker that say what nothing else does: a task's fate, or what an operator has lost.
_TOLD_IN_AN_OUTAGE = {
    "audit_not_written",
    "gateway.broker",
    "leave_not_written",
    "merged_calls_not_revoked",
    "refusal_not_noted",
    "step_refused",
}


def test_what_is_logged_of_an_error_of_the_broker_is_a_symptom() -> None:
    """A new such line is left out of an outage, or has a reason not to be."""
    found: dict[str, str] = {}
    for path in sorted(Path(gpuflow.__file__).parent.rglob("*.py")):
        for handler in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(handler, ast.ExceptHandler) and "RedisError" in ast.unparse(handler.type or ast.Pass()):
                found |= {event: str(path) for event in _events_in(handler)}
    assert "leases_not_renewed" in found
    missing = {event: path for event, path in found.items() if event not in SYMPTOMS | _TOLD_IN_AN_OUTAGE}
    assert not missing
    assert found.keys() >= _TOLD_IN_AN_OUTAGE


def _events_in(handler: ast.ExceptHandler) -> Iterator[str]:
    for node in ast.walk(handler):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("log.info", "log.warning", "log.error"):
            yield ast.literal_eval(node.args[0])


def test_the_filter_takes_symptoms_out_and_nothing_else(told: Told) -> None:
    lines = SymptomFilter(Outage(told))

    def written(name: str, text: str, **fields: Any) -> bool:
        record = logging.LogRecord(name, logging.WARNING, "", 0, text, (), None)
        if fields:
            record.gpuflow = fields
        return lines.filter(record)

    assert not written("gpuflow.worker", "x", event="events_not_reported", task="1", cause=REFUSED)
    assert not written("gpuflow.schedules", "x", event="schedules_not_run", cause=REFUSED)
    assert written("gpuflow.worker", "x", event="gpus_lost", cause="XID 79")
    assert not written("celery.worker.consumer.consumer", "consumer: Connection to broker lost. Trying again")
    assert not written(
        "celery.worker.consumer.consumer", f"consumer: Cannot connect to redis://h/0: {REFUSED}.\nTrying"
    )
    assert written("celery.worker.consumer.consumer", "Received and deleted unknown message")
    assert written("a.task", "consumer: Cannot connect to its own thing")
    assert told == [("broker_lost", {"cause": REFUSED})]


def test_a_page_that_flower_could_not_answer_is_a_line_less_while_the_outage_lasts(told: Told) -> None:
    outage = Outage(told)

    def written(name: str, text: str) -> bool:
        return SymptomFilter(outage).filter(logging.LogRecord(name, logging.ERROR, "", 0, text, (), None))

    assert written("tornado.access", "503 GET /fleet/data (127.0.0.1) 2.1ms"), "no outage is known of"
    outage.symptom(REFUSED)
    assert not written("tornado.access", "503 GET /fleet/data (127.0.0.1) 2.1ms")
    assert not written("tornado.general", "503 GET /fleet/data (127.0.0.1): the broker is away")
    assert written("tornado.access", "500 GET /fleet/data (127.0.0.1) 2.1ms")
    assert written("tornado.access", "404 GET /503 (127.0.0.1) 2.1ms")
    outage.answered()
    assert told[-1][1]["lines_left_out"] == 3
    assert written("tornado.access", "503 GET /fleet/data (127.0.0.1) 2.1ms")


@pytest.mark.parametrize("lasts", [False, True])
def test_what_celery_says_of_what_we_say_is_left_out_and_begins_no_outage(told: Told, lasts: bool) -> None:
    outage = Outage(told)
    if lasts:
        outage.symptom(REFUSED)
    before = list(told)

    def written(name: str, text: str, level: int = logging.INFO, **fields: Any) -> bool:
        record = logging.LogRecord(name, level, "", 0, text, (), None)
        if fields:
            record.gpuflow = fields
        return SymptomFilter(outage).filter(record)

    assert not written("celery.worker.consumer.consumer", "Started consuming from gpuflow.control")
    assert written("celery.worker.consumer.consumer", "Started consuming from invoices")
    assert not written("celery.app.trace", "Task gpuflow.echo[1b7601e4-f969] ignored")
    assert written("celery.app.trace", "Task shop.bill[1b7601e4-f969] ignored")
    assert written("celery.app.trace", "Task gpuflow.echo[1b7601e4-f969] raised unexpected: KeyError", logging.ERROR)
    assert not written("celery.worker.consumer.connection", "Connected to redis://h/0")
    assert written("gpuflow.sweep", "x", event="new_server_run", graced=20) is not lasts
    assert told == before


def test_a_line_passes_several_handlers_and_counts_once(told: Told) -> None:
    outage = Outage(told)
    record = logging.LogRecord("gpuflow.worker", logging.WARNING, "", 0, "x", (), None)
    record.gpuflow = {"event": "heartbeat_not_written", "cause": REFUSED}
    assert not SymptomFilter(outage).filter(record)
    assert not SymptomFilter(outage).filter(record)
    outage.over()
    assert told[-1][1]["lines_left_out"] == 1


def test_json_lines_hold_the_fields_of_our_lines_and_the_text_of_others(out: io.StringIO) -> None:
    use_level("INFO")
    dress("json", "gpuflow.testing")
    get_logger("gpuflow.testing").info("task_started", task="t1", attempt=2, queues=["a\nb"])
    logging.getLogger("gpuflow.testing").error("it was %s", "bad\nline")
    try:
        raise ValueError("redis://:hunter22@host/0 is wrong")
    except ValueError:
        get_logger("gpuflow.testing").exception("stumbled")
    ours, theirs, failed = (json.loads(line) for line in out.getvalue().splitlines())
    assert ours["event"] == "task_started" and ours["attempt"] == 2 and ours["level"] == "INFO"
    assert ours["logger"] == "gpuflow.testing" and ours["time"].endswith("Z")
    assert theirs["message"] == "it was bad\nline" and "event" not in theirs
    assert "ValueError" in failed["exception"] and "hunter22" not in failed["exception"]


def test_our_lines_have_the_level_of_the_setting_whatever_celery_has(out: io.StringIO) -> None:
    root = logging.getLogger().level
    try:
        logging.getLogger().setLevel(logging.WARNING)
        use_level("INFO")
        get_logger("gpuflow.testing").info("said")
        use_level("ERROR")
        get_logger("gpuflow.testing").warning("kept by the lower one")
        logging.getLogger().setLevel(logging.DEBUG)
        use_level("ERROR")
        get_logger("gpuflow.testing").debug("asked for by -l DEBUG")
    finally:
        logging.getLogger().setLevel(root)
    assert [line.partition(" ")[0] for line in out.getvalue().splitlines()] == [
        "event=said",
        "event=kept",
        "event=asked",
    ]


class _Slow(io.StringIO):
    """A log file whose writers wait for each other."""

    def write(self, text: str) -> int:
        threading.Event().wait(0.001)
        return super().write(text)


def test_a_thread_that_is_ended_while_it_waits_for_a_handler_keeps_no_lock() -> None:
    logger = logging.getLogger("gpuflow.testing.ended")
    logger.addHandler(logging.StreamHandler(_Slow()))
    dress("text", "gpuflow.testing.ended")

    def writes() -> None:
        with contextlib.suppress(SystemExit):
            while True:
                logger.warning("one more line")

    for _ in range(5):
        threads = [threading.Thread(target=writes, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            raise_in_thread(thread.ident or 0, SystemExit)
        for thread in threads:
            thread.join(patient(10))
        assert not any(thread.is_alive() for thread in threads), "they wait for a lock that one of them has kept"
