"""The HTTP connection of the artifact store: who gets the token, which trouble is transient, what an error says.

Used by `http_store` and `http_download`. No token, query or user part of a URL is in any message.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx

from gpuflow.artifacts.http_names import results_name
from gpuflow.artifacts.retrying import retrying
from gpuflow.artifacts.store import shown_url
from gpuflow.errors import ArtifactError
from gpuflow.policy import connecting
from gpuflow.policy.hosts import Hosts
from gpuflow.settings import Settings
from gpuflow.terminal import log_value

T = TypeVar("T")

#: Tries without headway: some 45 seconds, longer than a gateway holds what a lost connection was sending.
MAX_ATTEMPTS: Final = 10
#: Seconds. A long read: at the end of an upload the server brings the file to its disk.
_TIMEOUT: Final = httpx.Timeout(connect=10, read=180, write=120, pool=10)
#: Most that is read of an answer that is no file, in bytes: of an error, and of a page of a listing.
MAX_ERROR_BYTES: Final = 64 << 10
MAX_PAGE_BYTES: Final = 16 << 20
#: An answer that is no file comes within this time, in seconds, however slowly its bytes drip.
ANSWER_SECONDS: Final = 240.0
#: Redirects of one download.
MAX_REDIRECTS: Final = 5
_PROBLEM: Final = "urn:gpuflow:problem:"
_TRANSIENT_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_TRANSIENT_KINDS: Final = frozenset({"in-progress", "wrong-offset"})
_MOST_SHOWN: Final = 300
_ILLEGAL_HEADER: Final = "a header or the token holds a character that no header may have; correct it"


class HttpFailure(Exception):
    """An answer other than success: its status, the kind of the problem if the gateway told one, and what it says."""

    def __init__(self, status: int, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.kind = status, kind


def connect(token: str | None, hosts: Hosts | None = None) -> httpx.Client:
    """Return a client that reaches what `hosts` lets it (None: everything), else its requests raise NotAllowed.

    The token goes to the host that is asked, never to one that it redirects to.
    """
    headers = {"Accept-Encoding": "identity", "User-Agent": "gpuflow"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return connecting.client(hosts, headers=headers, timeout=_TIMEOUT, follow_redirects=False)


@contextlib.contextmanager
def answered(client: httpx.Client, url: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
    """GET a URL, over a few redirects whose bodies are not read; the block reads the answer. Raises httpx.HTTPError."""
    request = client.build_request("GET", url, headers=headers)
    for _ in range(MAX_REDIRECTS + 1):
        answer = client.send(request, stream=True)
        try:
            following = answer.next_request
            if following is None:
                yield answer
                return
            request = following
        finally:
            answer.close()
    raise HttpFailure(
        answer.status_code, "", f"more than {MAX_REDIRECTS} redirects; give the address of the file itself"
    )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer that is no file: its status, its headers, and its body, which is not decoded."""

    status: int
    headers: httpx.Headers
    content: bytes

    def json(self) -> dict[str, Any]:
        """Return the object that it holds. Raises HttpFailure."""
        try:
            found = json.loads(self.content)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise foreign(self.status)
        return found


def foreign(status: int) -> HttpFailure:
    """Return the failure of an answer that a results service does not give."""
    return HttpFailure(status, "", "it does not speak the protocol of `gpuflow gateway`; correct the address")


def ask(client: httpx.Client, method: str, url: str, *, most_bytes: int = MAX_ERROR_BYTES, **more: Any) -> Answer:
    """Send a request and return its answer, which is a success. Raises HttpFailure, httpx.HTTPError."""
    with client.stream(method, url, **more) as response:
        checked(response)
        return Answer(status=response.status_code, headers=response.headers, content=_body(response, most_bytes))


def _body(response: httpx.Response, most_bytes: int) -> bytes:
    """Return a body as it was sent. Raises HttpFailure for one that is compressed, too long or too slow."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpFailure(response.status_code, "", "it answers compressed, which was not asked for")
    until = time.monotonic() + ANSWER_SECONDS
    found = bytearray()
    for piece in response.iter_raw():
        found += piece
        if len(found) > most_bytes:
            raise HttpFailure(response.status_code, "", f"it answers with more than {most_bytes} bytes")
        if time.monotonic() > until:
            raise httpx.ReadTimeout("its answer drips")
    return bytes(found)


def token_for(url: str, settings: Settings, token: str | None) -> str | None:
    """Return the token to send to `url`: the given one, else the worker's, which our own results services alone get."""
    if token is not None:
        return token
    if settings.worker_token is None or results_name(url, settings) is None:
        return None
    return settings.worker_token.get_secret_value()


def checked(response: httpx.Response) -> httpx.Response:
    """Return an answer that is a success; raise HttpFailure for any other."""
    if response.is_success:
        return response
    kind, detail = "", f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
    if response.headers.get("content-type", "").startswith("application/problem+json"):
        with contextlib.suppress(ValueError, RecursionError, HttpFailure, httpx.HTTPError):
            told: Any = json.loads(_body(response, MAX_ERROR_BYTES))
            if isinstance(told, dict):
                kind = str(told.get("type", "")).removeprefix(_PROBLEM)
                detail = str(told.get("detail") or detail)
    raise HttpFailure(response.status_code, kind, _plain(detail))


def is_transient(error: BaseException) -> bool:
    """Whether the same request may go well a little later."""
    if isinstance(error, HttpFailure):
        return error.status in _TRANSIENT_STATUS or error.kind in _TRANSIENT_KINDS
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        return False
    return isinstance(error, httpx.TransportError) and not _is_certificate(error)


def persistently(action: Callable[[], T], position: Callable[[], int], max_attempts: int) -> T:
    """Call `action` until it returns: again after transient trouble, for as long as `position` goes up meanwhile."""
    while True:
        before = position()
        try:
            return retrying(is_transient, max_attempts=max_attempts)(action)
        except (HttpFailure, httpx.HTTPError) as error:
            if not is_transient(error) or position() <= before:
                raise


@contextlib.contextmanager
def http_errors(action: str, url: str, token: str | None) -> Iterator[None]:
    """Turn the trouble of the block into an ArtifactError; `action` begins its sentence ("a.bin cannot be stored")."""
    action = log_value(action)  # with a name that somebody else has given
    try:
        yield
    except HttpFailure as error:
        text = f"{action}: {_told(error)}"
    except httpx.HTTPError as error:
        text = f"{action}: {_trouble(error, shown_url(url))}"
    except httpx.InvalidURL as error:
        text = f"{action}: {shown_url(url)} is not a URL ({error}); correct it"
    except UnicodeEncodeError:
        text = f"{action}: {_ILLEGAL_HEADER}"
    else:
        return
    # What a server says is not ours: it may repeat what it was sent.
    raise ArtifactError(text.replace(token, "***") if token else text) from None


def _told(error: HttpFailure) -> str:
    if error.status in (401, 403):
        return f"{error}; set GPUFLOW_WORKER_TOKEN and GPUFLOW_GATEWAY_URL to those of that gateway"
    if error.status == 404:
        return f"{error}; store it first, or correct its address"
    text = str(error)
    return text if ";" in text else f"{text}; see the log of that server"


def _trouble(error: httpx.HTTPError, url: str) -> str:
    if _is_certificate(error):
        return f"the certificate of {url} is not trusted; name its authority in SSL_CERT_FILE"
    if isinstance(error, httpx.LocalProtocolError) and "Illegal header" in str(error):
        return _ILLEGAL_HEADER
    if isinstance(error, httpx.LocalProtocolError):
        return "the file changed while it was sent; store it when nobody writes to it"
    if isinstance(error, httpx.TimeoutException):
        return f"{url} did not answer in time; check the server and the network"
    if isinstance(error, httpx.ConnectError):
        return f"{url} cannot be reached; start the gateway, or correct the address"
    return f"the connection to {url} broke ({type(error).__name__}); check the network, then try again"


def _is_certificate(error: BaseException) -> bool:
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, ssl.SSLCertVerificationError):
            return True
        at = at.__cause__ or at.__context__
    return False


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:_MOST_SHOWN]
