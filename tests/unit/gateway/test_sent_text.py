"""What a stream of `/v1` has sent of its choices, over several attempts."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.gateway.openai_routes import SentText
from gpuflow.ledger.eventlog import LoggedEvent


def event(name: str, **data: Any) -> LoggedEvent:
    return LoggedEvent(id="1-0", source="t", name=name, data=data)


def delta(text: str, request: int = 0) -> LoggedEvent:
    return event("text_delta", delta=text, request=request)


STARTS = event("state", state="STARTING")


@pytest.mark.parametrize(
    ("events", "answer", "belies"),
    [
        ([], "The answer", False),
        ([delta("The "), delta("answer")], "The answer", False),
        ([delta("The "), STARTS, delta("The answer")], "The answer", False),
        ([delta("The "), STARTS], "An answer", True),
        ([delta("The answer is"), STARTS, delta("The ")], "The ", True),
        ([delta("The "), delta("is")], "The answer is", True),
        ([delta("answer")], "The answer", True),
        ([delta("other", request=3)], "The answer", True),
    ],
)
def test_what_was_sent_must_be_the_begin_of_the_answer(events: list[LoggedEvent], answer: str, belies: bool) -> None:
    sent = SentText(1)
    text = "".join(new for one in events for index, new in sent.new_text(one) if index == 0)

    assert sent.belies({0: answer}) is belies
    if not belies:
        assert text + "".join(new for _, new in sent.rest(0, answer)) == answer
