"""A container in an engine keeps the contract of an executor, as its preset does as a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance.cases import CASES
from tests.conformance.providers import CONTAINER_IMAGE, PROVIDERS, container
from tests.conformance.runs import Runs
from tests.support.fake_engine import FakeEngine, FakeImage
from tests.support.waiting import promised

(PROCESS,) = (one for one in PROVIDERS if one.task_type == "container")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder: Path = tmp_path_factory.mktemp("c")
    engine = FakeEngine(folder)
    engine.images[CONTAINER_IMAGE] = FakeImage(folder)
    provider = replace(
        PROCESS,
        good=lambda place: container(place, engine.url),
        bad=lambda place: container(place, engine.url, gpus=8),
    )
    yield Runs(provider, folder, folder)
    left = list(engine.containers)
    engine.close()
    promised(not left, f"containers {left} are left")
    assert engine.refused == [], "the engine was asked for what its API does not know"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: Callable[[Runs], None], runs: Runs) -> None:
    case(runs)
