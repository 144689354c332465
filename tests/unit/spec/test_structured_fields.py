"""Fields of a structured output whose type is no name of one."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import parse


@pytest.mark.parametrize("kind", [["string"], {"a": 1}, 7, None])
def test_a_type_that_is_no_text_is_a_mistake(kind: Any) -> None:
    fields = [{"name": "a", "type": kind}]
    spec: dict[str, Any] = {
        "taskType": "inference",
        "model": {"source": {"identifier": "m"}},
        "data": {"type": "list", "items": ["x"]},
        "inference": {"templates": fields},
    }
    with pytest.raises(InvalidTemplate, match="type"):
        parse({"apiVersion": "gpuflow/v1", "kind": "Task", "spec": spec})
