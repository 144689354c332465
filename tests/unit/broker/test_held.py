"""Who holds a message is told alike by all who ask, to the part of a second."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.broker.held_messages import UNSWEPT_SECONDS, held_leases, live_leases
from gpuflow.broker.keys import Keys

#: When the server says it is: (seconds, microseconds).
NOW = (1_000_000, 900_000)


class Answers:
    """A client whose pipelines answer what they are told to."""

    def __init__(self, *answers: Any) -> None:
        self._answers = answers

    def pipeline(self, **_options: Any) -> Answers:
        return self

    def __getattr__(self, command: str) -> Any:
        return lambda *_arguments, **_options: None

    def execute(self) -> tuple[Any, ...]:
        return self._answers


@pytest.mark.parametrize(("end", "is_live"), [(0.91, True), (0.89, False), (0.0, False)])
def test_a_lease_ends_at_one_moment_for_everybody(end: float, is_live: bool) -> None:
    at = NOW[0] + end - UNSWEPT_SECONDS
    keys = Keys("")

    (held,) = held_leases(Answers(NOW, {"tag": "w1:token\ncpu"}, [("tag", at)]), keys)

    assert held.is_live is is_live
    owners = ["w1:token\ncpu"]
    assert live_leases(Answers(NOW, [at], owners), keys, ["tag"]) == ({"tag": "w1:token"} if is_live else {})
