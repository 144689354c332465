"""Containers keep the contract of an executor: in an engine, as the process of their preset, and those of sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.conformance import cases
from tests.conformance.cases import CASES
from tests.conformance.providers import CONTAINER_IMAGE, PROVIDERS, Provider, container, container_request
from tests.conformance.runs import Runs
from tests.conformance.session_runs import SessionRuns
from tests.fixtures.session_child import SessionChild
from tests.support.fake_engine import FakeEngine, FakeImage
from tests.support.waiting import promised

(PROCESS,) = (one for one in PROVIDERS if one.task_type == "container")


def provider(engine: str, *, is_session: bool) -> Provider:
    make = container_request if is_session else container
    checks = replace(PROCESS, check=lambda result: (result["rows"], result["output"]) == (3, "hello"))
    return replace(
        checks if is_session else PROCESS,
        good=partial(make, engine=engine),
        bad=partial(make, engine=engine, gpus=8),
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    folder: Path = tmp_path_factory.mktemp("c")
    made = FakeEngine(folder)
    made.images[CONTAINER_IMAGE] = FakeImage(folder)
    yield made
    left = list(made.containers)
    made.close()
    promised(not left, f"containers {left} are left")
    assert made.refused == [], "the engine was asked for what its API does not know"


@pytest.fixture(scope="module", params=["engine", "session in an engine", "session as a process"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine: FakeEngine) -> Runs:
    """Runs in a child of its own; that of a session answers one request."""
    folder = tmp_path_factory.mktemp("runs")
    place = "none" if "process" in request.param else engine.url
    return Runs(provider(place, is_session="session" in request.param), folder, folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: Callable[[Runs], None], runs: Runs) -> None:
    case(runs)


@pytest.fixture(scope="module", params=["engine", "process"])
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine: FakeEngine
) -> Iterator[SessionRuns]:
    """Requests of one container that stays."""
    folder = tmp_path_factory.mktemp("session")
    place = "none" if request.param == "process" else engine.url
    asked = replace(
        provider(place, is_session=True),
        bad=partial(container_request, engine=place, name="another"),
    )
    made = SessionRuns(asked, folder, folder)
    with SessionChild(folder / "session.log") as made.session:
        made.session.send("open", engine="container", spec=made.good(), task_type="container")
        yield made
        made.session.send("close")
        made.session.until("finish", status="completed")


@pytest.mark.parametrize("case", [cases.progress, cases.result, cases.merge_children], ids=lambda case: case.__name__)
def test_a_request_of_a_session_conforms(case: Callable[[Runs], None], session: SessionRuns) -> None:
    case(session)


def test_a_request_to_another_preset_is_refused(session: SessionRuns) -> None:
    bad = session.of("bad", session.bad())

    assert (bad.error["type"], bad.error["retryable"]) == ("BadInput", False)
    assert "this session runs the preset conformance-session, not another" in bad.error["message"]
