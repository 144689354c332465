"""Calls the URLs that a task's `notify` names, once it has ended. At least once: a receiver must bear repetition.

The call is a control task of its own, so that it is tried again without holding up anything.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuflow import __version__
from gpuflow.errors import GPUFlowError
from gpuflow.ledger.records import TaskRecord

#: A receiver answers within this time, in seconds.
TIMEOUT_SECONDS: Final = 10.0


class NotDelivered(GPUFlowError):
    """A URL could not be called; another try may reach it."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: the headers that a user wrote for one host go to no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def wanted(record: TaskRecord) -> list[Mapping[str, Any]]:
    """Return the entries of `notify` that name the state in which the task has ended."""
    entries: Sequence[Mapping[str, Any]] = record.spec.get("notify") or ()
    state = str(record.state).lower()
    return [entry for entry in entries if state in entry["on"] or "finished" in entry["on"]]


def body(record: TaskRecord) -> dict[str, Any]:
    """Return what is posted: the task as `gpuflow status --json` shows it."""
    return {"event": "task", **record.public()}


def deliver(entry: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """POST `content` as JSON to the entry's URL. Raises NotDelivered without the URL's query or user part."""
    url = str(entry["url"])
    shown = url.split("?", 1)[0].rsplit("@", 1)[-1]
    if not url.startswith(("http://", "https://")):
        raise NotDelivered(f"{shown} is no http(s) URL")
    request = urllib.request.Request(  # noqa: S310  (its scheme is checked)
        url,
        data=json.dumps(content, ensure_ascii=False).encode(),
        headers={
            "Content-Type": "application/json",
            "User-Agent": f"gpuflow/{__version__}",
            **(entry.get("headers") or {}),
        },
        method="POST",
    )
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS):
            return
    except urllib.error.HTTPError as error:
        raise NotDelivered(f"{shown} answered {error.code}") from None
    except (OSError, ValueError) as error:
        raise NotDelivered(f"{shown} could not be called: {getattr(error, 'reason', error)}") from None
