"""Fields of a structured output whose type is no name of one."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.spec.report import Findings
from gpuflow.spec.structured import schema_of


@pytest.mark.parametrize("kind", [["string"], {"a": 1}, 7, None])
def test_a_type_that_is_no_text_is_a_mistake(kind: Any) -> None:
    findings = Findings()

    assert schema_of([{"name": "a", "type": kind}], findings) is None

    assert "it must be" in findings.mistakes[0].message
