"""Helpers of the spec tests: where the sample templates lie, and the report of a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import parse_text

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"


@pytest.fixture
def templates() -> Path:
    return TEMPLATES


@pytest.fixture
def report_of() -> Callable[[str], InvalidTemplate]:
    def report(text: str) -> InvalidTemplate:
        with pytest.raises(InvalidTemplate) as caught:
            parse_text(text, "wrong.yaml")
        return caught.value

    return report
