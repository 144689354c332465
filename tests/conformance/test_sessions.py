"""A request of a session keeps the contract of an executor, but for what becomes of the process, which it shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conformance import cases
from tests.conformance.providers import PROVIDERS
from tests.conformance.runs import Runs
from tests.conformance.session_runs import SessionRuns
from tests.fixtures.session_child import SessionChild
from tests.fixtures.tiny_model import make_tiny_model

pytestmark = pytest.mark.ml

(INFERENCE,) = (one for one in PROVIDERS if one.task_type == "inference")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionRuns]:
    folder = tmp_path_factory.mktemp("session")
    made = SessionRuns(INFERENCE, folder, make_tiny_model(folder / "model"))
    with SessionChild(folder / "session.log") as made.session:
        made.session.send("open", engine="transformers", spec={"taskType": "inference", **made.good()})
        yield made


@pytest.mark.parametrize("case", [cases.progress, cases.result, cases.merge_children], ids=lambda case: case.__name__)
def test_conformance(case: Callable[[Runs], None], runs: SessionRuns) -> None:
    case(runs)


def test_it_begins_and_a_bad_one_is_refused(runs: SessionRuns) -> None:
    begun, bad = runs.of("normal", runs.good()), runs.of("bad", runs.bad())

    assert (begun.events[0].name, begun.events[0].data["status"]) == ("connection", "connected")
    assert begun.named("worker")[-1]["status"] == "working"
    assert (bad.error["type"], bad.error["retryable"]) == ("BadInput", False)
    assert bad.error["message"]
