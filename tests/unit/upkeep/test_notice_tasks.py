"""Which control task calls a URL: workers of the version before know the one for plain entries of `notify` alone."""

from __future__ import annotations

import pytest

from gpuflow.ledger import backend

PLAIN = {"on": ["failed"], "url": "https://host/hook"}


@pytest.mark.parametrize("more", [{}, {"headers": {"X-Team": "nlp"}}, {"secret": None}])
def test_a_plain_notice_has_the_name_that_every_version_knows(more: dict[str, object]) -> None:
    assert backend.notice_task({**PLAIN, **more}) == ("gpuflow.maintenance.notify", "gpuflow.notices")


@pytest.mark.parametrize(
    "more", [{"body": "result"}, {"method": "PUT"}, {"secret": "${env:KEY}"}, {"retries": 0}, {"timeoutSec": 5}]
)
def test_a_notice_with_a_later_field_has_a_name_that_older_workers_do_not_know(more: dict[str, object]) -> None:
    assert backend.notice_task({**PLAIN, **more}) == ("gpuflow.maintenance.call_back", "gpuflow.callbacks")
