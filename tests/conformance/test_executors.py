"""Every executor keeps the contract of docs/howto/write-an-executor.md: gpuflow's own, and the example project's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.conformance.cases import CASES
from tests.conformance.providers import PROVIDERS, Provider
from tests.conformance.runs import Runs

#: What ends a training is the same code in all kinds of it (executors/training/run.py): each run of the gate sees it of
#: one kind, and `tox -e long` of all.
_ENDS: Final = ("cancel", "out_of_memory", "merge_children")
_OTHER_TRAININGS: Final = ("lora_sft", "dpo", "reward", "grpo", "ppo")


def _pair(provider: Provider, case: Callable[[Runs], None]) -> Any:
    name = case.__name__
    marks = [pytest.mark.ml] if provider.needs_ml else []
    if provider.task_type in _OTHER_TRAININGS and name in _ENDS:
        marks.append(pytest.mark.long)
    return pytest.param(provider, case, id=f"{provider.task_type}-{name}", marks=marks)


@pytest.mark.timeout(400)  # Of the first case that needs a run; the libraries alone take a while on a busy machine.
@pytest.mark.parametrize(("provider", "case"), [_pair(one, case) for one in PROVIDERS for case in CASES])
def test_conformance(provider: Provider, case: Callable[[Runs], None], runs_of: Callable[[Provider], Runs]) -> None:
    case(runs_of(provider))
