"""Calls the URLs that a task's `notify` names, once it has ended. At least once: a receiver must bear repetition.

The call is a task of its own, in a queue and slots of its own, so that a slow receiver holds up nothing else.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gpuflow import __version__
from gpuflow.errors import GPUFlowError
from gpuflow.ledger.records import TaskRecord
from gpuflow.policy.hosts import Hosts
from gpuflow.terminal import one_line

#: A call takes no longer than this, from the connection to the status of the answer, in seconds.
TIMEOUT_SECONDS: Final = 10.0


class NotDelivered(GPUFlowError):
    """A URL could not be called; another try may reach it."""


def wanted(record: TaskRecord) -> list[Mapping[str, Any]]:
    """Return the entries of `notify` that name the state in which the task has ended."""
    entries: Sequence[Mapping[str, Any]] = record.spec.get("notify") or ()
    state = str(record.state).lower()
    return [entry for entry in entries if state in entry["on"] or "finished" in entry["on"]]


def body(record: TaskRecord, entry: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what is sent: the task as `gpuflow status --json` shows it, or with `body: result` its result.

    Large fields of a result are references to files of the store, as they are in the record.
    """
    if (entry or {}).get("body") != "result":
        return {"event": "task", **record.public()}
    return {
        "event": "result",
        "task_id": record.id,
        "name": record.name,
        "taskType": record.task_type,
        "state": str(record.state),
        "attempt": record.attempt,
        "result": record.result,
    }


def signed(secret: str, delivery: str, seconds: int, content: bytes) -> dict[str, str]:
    """Return the headers that let a receiver check who sent this, as Standard Webhooks has it (HMAC-SHA256).

    What is signed is `<id>.<timestamp>.<content>`; an old timestamp tells that somebody has kept a call.
    """
    text = f"{delivery}.{seconds}.".encode() + content
    digest = hmac.new(secret.encode(), text, hashlib.sha256).digest()
    return {
        "webhook-id": delivery,
        "webhook-timestamp": str(seconds),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def deliver(
    entry: Mapping[str, Any],
    content: Mapping[str, Any],
    *,
    hosts: Hosts,
    delivery: str = "",
    timeout_seconds: float | None = None,
) -> None:
    """Send `content` as JSON to the entry's URL; all of it ends within the time, and nothing but its status is read.

    `delivery` is the same in every try of one call. `hosts` is what it may reach. Redirects are not followed: the
    headers that a user wrote for one host go to no other. Raises NotAllowed, and NotDelivered without the URL's query
    or user part, and without any header.
    """
    import httpx

    from gpuflow.policy.connecting import client

    url = str(entry["url"])
    shown = one_line(url.split("?", 1)[0].rsplit("@", 1)[-1])
    if not url.startswith(("http://", "https://")):
        raise NotDelivered(f"{shown} is no http(s) URL; correct it in `notify`")
    timeout_seconds = timeout_seconds or float(entry.get("timeoutSec") or TIMEOUT_SECONDS)
    sent = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
    line = _Line()
    try:
        headers = httpx.Headers({"Content-Type": "application/json", "User-Agent": f"gpuflow/{__version__}"})
        headers.update(entry.get("headers") or {})
        if delivery:
            headers["Idempotency-Key"] = delivery
        if entry.get("secret"):
            headers.update(signed(str(entry["secret"]), delivery, int(time.time()), sent))
        with line.cut_after(timeout_seconds), client(hosts, timeout=timeout_seconds) as sender:
            sending = sender.build_request(
                str(entry.get("method") or "POST").upper(),
                url,
                content=sent,
                headers=headers,
                extensions={"trace": line.opened},
            )
            answer = sender.send(sending, stream=True)
            status = answer.status_code
            answer.close()
    except httpx.LocalProtocolError:
        raise NotDelivered(f"{shown} was not called: one of its headers is none; correct `notify.headers`") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        late = line.is_cut or isinstance(error, httpx.TimeoutException)
        cause = f"it did not answer within {timeout_seconds:g} s" if late else type(error).__name__
        raise NotDelivered(f"{shown} could not be called: {cause}; is its receiver there?") from None
    if not 200 <= status < 300:
        raise NotDelivered(f"{shown} answered {status}")


class _Line:
    """The connection of one call, which can be cut while a read waits on it: a time-out of a read begins anew with
    each byte.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.is_cut = False

    def opened(self, event: str, info: Mapping[str, Any]) -> None:
        """Note a connection as soon as it is there (a trace of httpx)."""
        if event.endswith("connect_tcp.complete"):
            with self._lock:
                self._sockets.append(info["return_value"].get_extra_info("socket").dup())
            if self.is_cut:
                self._cut()

    def _cut(self) -> None:
        self.is_cut = True
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def cut_after(self, seconds: float) -> Iterator[None]:
        """Cut what the block has opened when it takes longer."""
        timer = threading.Timer(seconds, self._cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                for one in self._sockets:
                    one.close()
                self._sockets.clear()
