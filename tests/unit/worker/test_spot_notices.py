"""Notices of spot instances: what they say, tokens, and a service that is away."""

from __future__ import annotations

import queue
import subprocess
import sys

import pytest

from gpuflow.worker.spot_notices import NOTICE_SECONDS, POLL_SECONDS, SpotNotices, read_notice
from tests.support.metadata import metadata_service
from tests.support.waiting import eventually, patient

NOW = 1_505_809_200.0  # 2017-09-19T08:20:00Z


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"action": "terminate", "time": "2017-09-19T08:22:00Z"}', ("terminate", 120.0)),
        ('{"action": "stop", "time": "2017-09-19T08:20:30Z"}', ("stop", 30.0)),
        ('{"action": "stop", "time": "2017-09-19T08:20:30"}', ("stop", 30.0)),
        ('{"action": "terminate", "time": "2017-09-19T08:00:00Z"}', ("terminate", NOTICE_SECONDS - POLL_SECONDS)),
        ('{"action": "terminate", "time": "2027-09-19T08:00:00Z"}', ("terminate", NOTICE_SECONDS)),
        ('{"action": "terminate"}', ("end", NOTICE_SECONDS)),
        ('{"action": "terminate", "time": 7}', ("end", NOTICE_SECONDS)),
        ("[]", ("end", NOTICE_SECONDS)),
        ("<html>", ("end", NOTICE_SECONDS)),
        ("", ("end", NOTICE_SECONDS)),
    ],
)
def test_what_a_notice_says(text: str, expected: tuple[str, float]) -> None:
    assert read_notice(text, NOW) == expected


@pytest.mark.parametrize(
    ("date", "left"),
    [
        ("Tue, 19 Sep 2017 08:20:00 GMT", 90.0),
        ("Tue, 19 Sep 2017 08:22:00 GMT", 0.0),
        ("Tue, 19 Sep 2017 08:20:00 -0000", 90.0),
        ("", NOTICE_SECONDS - POLL_SECONDS),
        ("yesterday", NOTICE_SECONDS - POLL_SECONDS),
        ("Tue, 99 Sep 2017 08:20:00 GMT", NOTICE_SECONDS - POLL_SECONDS),
    ],
)
def test_the_time_of_the_service_counts_where_the_clock_of_the_machine_is_ahead(date: str, left: float) -> None:
    notice = '{"action": "terminate", "time": "2017-09-19T08:21:30Z"}'
    assert read_notice(notice, NOW + 600, date) == ("terminate", left)


@pytest.mark.parametrize(("tells_time", "seconds"), [(True, 90.0), (False, NOTICE_SECONDS - POLL_SECONDS)])
def test_one_notice_drains_once_and_a_token_that_is_refused_is_renewed(tells_time: bool, seconds: float) -> None:
    drained: queue.Queue[tuple[str, float]] = queue.Queue()
    with metadata_service() as service:
        service.clock = lambda: NOW
        watch = SpotNotices(
            service.url, lambda why, left: drained.put((why, left)), poll_seconds=0.01, clock=lambda: NOW + 600
        )
        watch.start()
        eventually(lambda: service.asked >= 3, within=10)
        assert drained.empty() and service.tokens == 1
        service.refuses.add("token-1")
        eventually(lambda: service.tokens == 2, within=10)
        service.tells_time = tells_time
        service.announce(90)
        why, left = drained.get(timeout=patient(10))
        watch.join(timeout=patient(10))
    assert why == f"spot notice: terminate in {seconds:.0f} s" and left == seconds
    assert not watch.is_alive() and drained.empty()


def test_a_worker_that_waits_for_no_notice_loads_no_http_client() -> None:
    program = "import sys, gpuflow.worker.bootsteps; print('httpx' in sys.modules)"

    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60), check=True
    )

    assert told.stdout == "False\n"
