"""The boto3 client of the S3 store: how it is made, how its requests are paced, and what its errors mean.

Called by `s3_store` alone; it knows no artifacts.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any, Final

from gpuflow.artifacts.throttle import Throttle
from gpuflow.errors import ArtifactError

try:
    import boto3
    from botocore import exceptions as faults
    from botocore.config import Config
    from urllib3 import exceptions as wire
except ImportError as error:
    raise ArtifactError(f"s3: needs boto3 ({error.name} is missing); run pip install 'gpuflow[aws]'") from error

#: Tries of one request, by boto3 itself.
REQUEST_ATTEMPTS: Final = 6
_MISSING: Final = frozenset({"NoSuchKey", "404", "NotFound"})
_REFUSED: Final = frozenset({"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"})
_CUT: Final = (
    faults.HTTPClientError,
    faults.IncompleteReadError,
    faults.ResponseStreamingError,
    wire.HTTPError,
    ConnectionError,
    TimeoutError,
)
#: All that a request may raise; for what is done as a courtesy, whose failure must not fail the upload.
ANY_FAULT: Final = (faults.ClientError, faults.BotoCoreError)


class PacedBody(io.BytesIO):
    """The body of a request, which a throttle slows while it goes over the wire, not while it is signed."""

    def __init__(self, content: bytes, throttle: Throttle) -> None:
        super().__init__(content)
        self._throttle, self.sending = throttle, False

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as io.BytesIO does."""
        block = super().read(size)
        if self.sending:
            self._throttle.wait_for_bytes(len(block))
        return block


def connect() -> Any:
    """Return a client; region, keys and endpoint are those that boto3 finds. Raises ArtifactError."""
    config = Config(
        retries={"mode": "standard", "total_max_attempts": REQUEST_ATTEMPTS},
        connect_timeout=20,
        read_timeout=60,
        # Services that only resemble S3 do not know the newer checksums; ours is in the metadata.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        client = boto3.session.Session().client("s3", config=config)  # boto3.client would keep the first keys it saw
    except (faults.BotoCoreError, ValueError) as error:
        raise ArtifactError(f"s3: cannot be used: {error}; set AWS_DEFAULT_REGION and AWS_ENDPOINT_URL") from error
    client.meta.events.register_first("request-created.s3", _mark_signing)
    client.meta.events.register_last("request-created.s3", _mark_sending)
    return client


def _mark_signing(request: Any, **_: Any) -> None:
    if isinstance(request.body, PacedBody):
        request.body.sending = False


def _mark_sending(request: Any, **_: Any) -> None:
    if isinstance(request.body, PacedBody):
        request.body.sending = True


def tells_nothing(error: BaseException) -> bool:
    """Say whether an answer means that an object is not there, or that these keys may not know."""
    return _code(error) in _MISSING | _REFUSED


def is_transient(error: BaseException) -> bool:
    """Say whether a download is worth another try: the wire broke, or the object was replaced meanwhile."""
    return isinstance(error, _CUT) or _code(error) in ("PreconditionFailed", "412")


@contextlib.contextmanager
def s3_errors(action: str) -> Iterator[None]:
    """Turn what boto3 raises into an ArtifactError: `action` begins its sentence."""
    try:
        yield
    except faults.ClientError as error:
        code = _code(error)
        if code in _MISSING:
            cause = "it is not there; store it first"
        elif code == "NoSuchBucket":
            cause = "there is no such bucket; create it, or correct the URL"
        elif code in _REFUSED:
            cause = f"the service refuses these keys ({code}); give them the right to this bucket"
        else:
            cause = f"the service answers {code}; try again, or ask who runs it"
        raise ArtifactError(f"{action}: {cause}") from error
    except (faults.NoCredentialsError, faults.PartialCredentialsError) as error:
        raise ArtifactError(f"{action}: no keys; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
    except (faults.BotoCoreError, *_CUT) as error:
        raise ArtifactError(
            f"{action}: the connection fails ({type(error).__name__}); check AWS_ENDPOINT_URL and the network"
        ) from error


def _code(error: BaseException) -> str | None:
    return str(error.response.get("Error", {}).get("Code")) if isinstance(error, faults.ClientError) else None
