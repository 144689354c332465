"""Learns from the provider that this machine is about to be taken away, and drains the worker within that notice.

AWS announces the end of a spot instance two minutes before, at its metadata service (version 2: a token first). What
does not end in time saves its state and runs elsewhere; an attempt that was handed back does not count as a failure.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx

from gpuflow.logs import get_logger

log = get_logger("gpuflow.spot")

POLL_SECONDS: Final = 5.0
#: A metadata service that does not answer twice is asked so often.
RETRY_SECONDS: Final = 30.0
ANSWER_SECONDS: Final = 2.0
#: AWS gives so many seconds of notice; an announced time that is further away, or cannot be read, is taken for this.
NOTICE_SECONDS: Final = 120.0
#: A token of the metadata service is good for so long, and renewed when it is refused.
TOKEN_SECONDS: Final = 21_600
_TOKEN_PATH: Final = "/latest/api/token"  # noqa: S105  (a path)
_ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
_MOST_BYTES: Final = 4096


class SpotNotices(threading.Thread):
    """Asks the metadata service at `url` until it announces the end; then calls `drain(why, seconds left)` once."""

    def __init__(
        self,
        url: str,
        drain: Callable[[str, float], None],
        *,
        poll_seconds: float = POLL_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name="gpuflow-spot-notices", daemon=True)
        self._url = url.rstrip("/")
        self._drain = drain
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._token = ""
        self._is_away = False
        self._pause = threading.Event()

    def run(self) -> None:
        """Ask until there is a notice; the worker ends with it. A service that is away is tried again."""
        # No proxy of the environment: the metadata service is of this machine.
        with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False, follow_redirects=False) as client:
            while True:
                wait = self._poll_seconds
                try:
                    answer = self._ask(client)
                    self._is_away = False
                    if answer is not None:
                        text, date = answer.text[:_MOST_BYTES], answer.headers.get("Date", "")
                        action, left = read_notice(text, self._clock(), date)
                        log.warning("spot_notice", action=action, seconds=round(left, 1))
                        self._drain(f"spot notice: {action} in {left:.0f} s", left)
                        return
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    # One lost answer must not cost half a minute of a notice of two.
                    wait = max(wait, RETRY_SECONDS) if self._is_away else wait
                    self._say_away(str(error) or type(error).__name__)
                except Exception:
                    wait = max(wait, RETRY_SECONDS)
                    log.exception("spot_notices_crashed")
                self._pause.wait(wait)

    def _ask(self, client: httpx.Client) -> httpx.Response | None:
        """Return the answer with the notice, None while there is none. Raises httpx errors."""
        for _ in range(2):
            if not self._token:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                answer = client.put(self._url + _TOKEN_PATH, headers=headers)
                self._token = answer.raise_for_status().text[:_MOST_BYTES].strip()
            answer = client.get(self._url + _ACTION_PATH, headers={"X-aws-ec2-metadata-token": self._token})
            if answer.status_code == httpx.codes.NOT_FOUND:
                return None
            if answer.status_code != httpx.codes.UNAUTHORIZED:
                return answer.raise_for_status()
            self._token = ""
        raise httpx.HTTPError("the metadata service refuses its own token")

    def _say_away(self, cause: str) -> None:
        if not self._is_away:
            self._is_away = True
            log.warning(
                "spot_notices_not_read",
                cause=cause,
                fix="in a container raise the hop limit of the instance's metadata options to 2, or unset "
                "GPUFLOW_SPOT_NOTICES where no spot instance is",
            )


def read_notice(text: str, now: float, date: str = "") -> tuple[str, float]:
    """Return what is announced, and the seconds left, at most NOTICE_SECONDS.

    They count from `date`, when the service answered (an HTTP date), and from `now`, the time of this machine, where it
    gives none. That time may be wrong: an end that is past by it was announced since the last look.
    """
    answered = _answered_at(date)
    try:
        found: Any = json.loads(text)
        action = str(found["action"])[:20]
        at = datetime.fromisoformat(str(found["time"]))
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        left = at.timestamp() - (now if answered is None else answered)
    except (ValueError, KeyError, TypeError, OverflowError):
        return "end", NOTICE_SECONDS
    if left <= 0 and answered is None:
        return action, NOTICE_SECONDS - POLL_SECONDS
    return action, min(NOTICE_SECONDS, max(0.0, left))


def _answered_at(date: str) -> float | None:
    """Return an HTTP date as Unix seconds, None where it is none."""
    try:
        found = parsedate_to_datetime(date)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
