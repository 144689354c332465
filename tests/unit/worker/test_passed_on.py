"""Messages that a worker hands back again and again: one line each."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from gpuflow.worker.passed_on import PassedOn

RECEIVED, TRACE = "celery.worker.strategy", "celery.app.trace"


@pytest.fixture
def handed_back() -> Iterator[PassedOn]:
    made = PassedOn()
    made.install()
    yield made
    for name in (RECEIVED, TRACE):
        logging.getLogger(name).removeFilter(made)


def said(caplog: pytest.LogCaptureFixture, task_id: str) -> list[str]:
    """Return what Celery writes of one delivery that is ignored, and of an error of it."""
    caplog.clear()
    about = {"id": task_id, "name": "gpuflow.echo"}
    with caplog.at_level(logging.INFO):
        logging.getLogger(RECEIVED).info("Task %(name)s[%(id)s] received", about)
        logging.getLogger(TRACE).info("Task %(name)s[%(id)s] ignored", about)
        logging.getLogger(TRACE).error("Task %(name)s[%(id)s] raised", about)
        logging.getLogger(RECEIVED).info("of no task")
    return [record.getMessage().rpartition(" ")[2] for record in caplog.records]


def test_it_is_news_once_and_again_with_another_cause(handed_back: PassedOn) -> None:
    assert [handed_back.note("a", "newer") for _ in range(3)] == [True, False, False]
    assert handed_back.note("a", "avoid")
    assert handed_back.note("b", "newer")


def test_celery_says_of_it_no_more_than_errors(handed_back: PassedOn, caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, "a") == ["received", "ignored", "raised", "task"]
    handed_back.note("a", "newer")
    assert said(caplog, "a") == ["raised", "task"]
    assert said(caplog, "b") == ["received", "ignored", "raised", "task"]
    handed_back.forget("a")
    assert said(caplog, "a") == ["received", "ignored", "raised", "task"]


def test_only_the_last_thousand_are_remembered(handed_back: PassedOn) -> None:
    for number in range(1001):
        handed_back.note(str(number), "newer")
    assert handed_back.note("0", "newer")
    assert not handed_back.note("1000", "newer")
