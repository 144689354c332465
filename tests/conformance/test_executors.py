"""Every executor keeps the contract of docs/howto/write-an-executor.md: gpuflow's own, and the example project's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.cases import CASES
from tests.conformance.providers import PROVIDERS, Provider
from tests.conformance.runs import Runs


@pytest.mark.timeout(400)  # Of the first case that needs a run; the libraries alone take a while on a busy machine.
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize(
    "provider",
    [pytest.param(one, id=one.task_type, marks=[pytest.mark.ml] if one.needs_ml else []) for one in PROVIDERS],
)
def test_conformance(provider: Provider, case: Callable[[Runs], None], runs_of: Callable[[Provider], Runs]) -> None:
    case(runs_of(provider))
