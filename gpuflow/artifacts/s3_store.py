"""Artifacts in a bucket of S3, or of any service that speaks it (AWS_ENDPOINT_URL). Needs the extra `aws`.

Called through `store.open_store` and `store.fetch`. Keys, region and endpoint come from where boto3 looks for them;
none of them appears in a URL or a message. The digest of a file travels with it as metadata.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote, unquote, urlsplit

from gpuflow.artifacts.partial import disk_errors, file_digest, has_content
from gpuflow.artifacts.receiving import Meter, check_size, receive
from gpuflow.artifacts.retrying import retrying
from gpuflow.artifacts.s3_client import ANY_FAULT, PacedBody, connect, is_transient, s3_errors, tells_nothing
from gpuflow.artifacts.source_file import digest_of, open_source
from gpuflow.artifacts.store import Progress, StoredFile, Throttle, check_name, check_prefix, shown_url
from gpuflow.errors import ArtifactError

#: A part of a multipart upload: at least 5 MiB for Amazon.
PART_BYTES: Final = 8 << 20
_MAX_PARTS: Final = 10_000
#: Parts of one file that are in memory and go over at a time, and how many files of a store may do so; others wait.
_PARALLEL_PARTS: Final = 2
_FILES_IN_PARTS: Final = 2
_DELETE_AT_ONCE: Final = 1000
#: An upload that nobody has finished for so long is aborted by the next one of the same name: its parts cost money.
_ABANDONED: Final = timedelta(days=1)
_DIGEST_KEY: Final = "sha256"


class S3Store:
    """Files below s3://bucket/prefix. An object is visible only when its last part is there."""

    def __init__(
        self, url: str, *, throttle: Throttle, part_bytes: int = PART_BYTES, max_bytes: int | None = None
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname or parts.username or parts.query:
            raise ArtifactError(
                f"{shown_url(url)!r} names no bucket; use s3://bucket/prefix, and give keys by AWS_ACCESS_KEY_ID"
            )
        self._bucket = parts.netloc
        self._prefix = unquote(parts.path).strip("/")
        self._throttle, self._part_bytes, self._max_bytes = throttle, part_bytes, max_bytes
        self._in_parts = threading.BoundedSemaphore(_FILES_IN_PARTS)
        self._client: Any = connect()

    def put(self, source: Path, name: str, *, progress: Progress | None = None) -> StoredFile:
        """Upload a file: in one request, or in parts of which each is tried again by itself. Raises ArtifactError."""
        key, meter = self._key(name), Meter(progress)
        action = f"{name} cannot be stored in s3://{self._bucket}"
        with disk_errors(action), s3_errors(action), open_source(source, buffered=True) as stream:
            digest = digest_of(stream)
            size = stream.tell()
            if self._digest_there(key, size) != digest:
                stream.seek(0)
                if size <= self._part_bytes:
                    self._put_at_once(stream.read(), key, digest)
                else:
                    with self._in_parts:
                        self._put_in_parts(stream, key, size, digest, meter)
            meter.reached(size)
        return StoredFile(name=name, size=size, sha256=digest, url=self.url(name))

    def get(
        self, name: str, target: Path, *, sha256: str | None = None, progress: Progress | None = None
    ) -> StoredFile:
        """Download a file; a cut connection is taken up where it ended. Raises ArtifactError."""
        meter = Meter(progress)
        action = f"{name} cannot be fetched from s3://{self._bucket}"
        with disk_errors(action), s3_errors(action):
            again = retrying(is_transient, offset=lambda: meter.offset)
            size, digest = again(self._get_once, self._key(name), target, sha256, meter)
        return StoredFile(name=name, size=size, sha256=digest, url=self.url(name))

    def list(self, prefix: str) -> list[StoredFile]:
        """Return the files of `prefix`, without digests: each of them would cost a request."""
        with s3_errors(f"s3://{self._bucket} cannot be listed"):
            return sorted(self._objects(prefix), key=lambda file: file.name)

    def delete(self, prefix: str) -> int:
        """Delete the files of `prefix`. Raises ArtifactError."""
        action = f"{prefix or 'all'} cannot be deleted in s3://{self._bucket}"
        with s3_errors(action):
            keys = [self._key(file.name) for file in self._objects(prefix)]
            for begin in range(0, len(keys), _DELETE_AT_ONCE):
                wanted = {"Objects": [{"Key": key} for key in keys[begin : begin + _DELETE_AT_ONCE]], "Quiet": True}
                refused = self._client.delete_objects(Bucket=self._bucket, Delete=wanted).get("Errors")
                if refused:
                    raise ArtifactError(f"{action}: {refused[0].get('Code')}; give these keys the right to delete")
        return len(keys)

    def url(self, name: str) -> str:
        """Return the s3: URL of a name."""
        return f"s3://{self._bucket}/{quote(self._key(name))}"

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{check_name(name)}" if self._prefix else check_name(name)

    def _head(self, key: str) -> dict[str, Any]:
        return dict(self._client.head_object(Bucket=self._bucket, Key=key))

    def _digest_there(self, key: str, size: int) -> str | None:
        try:
            head = self._head(key)
        except self._client.exceptions.ClientError as error:
            if tells_nothing(error):
                return None
            raise
        return str(head["Metadata"].get(_DIGEST_KEY)) if head["ContentLength"] == size else None

    def _put_at_once(self, content: bytes, key: str, digest: str) -> None:
        if hashlib.sha256(content).hexdigest() != digest:
            raise _changed(key)
        body = PacedBody(content, self._throttle)
        self._client.put_object(Bucket=self._bucket, Key=key, Body=body, Metadata={_DIGEST_KEY: digest})

    def _put_in_parts(self, stream: BinaryIO, key: str, size: int, digest: str, meter: Meter) -> None:
        self._abort_abandoned(key)
        place = {"Bucket": self._bucket, "Key": key}
        place["UploadId"] = self._client.create_multipart_upload(**place, Metadata={_DIGEST_KEY: digest})["UploadId"]
        try:
            part_bytes = max(self._part_bytes, -(-size // _MAX_PARTS))
            sent, number = hashlib.sha256(), 0
            parts: list[dict[str, Any]] = []
            with ThreadPoolExecutor(_PARALLEL_PARTS, thread_name_prefix="gpuflow-s3") as pool:
                while blocks := [block for _ in range(_PARALLEL_PARTS) if (block := stream.read(part_bytes))]:
                    several = list(enumerate(blocks, start=number + 1))
                    for block in blocks:
                        sent.update(block)
                    parts += pool.map(partial(self._put_part, place), several)
                    number += len(several)
                    del blocks, several, block  # or they would be there twice while the next ones are read
                    meter.reached(min(size, number * part_bytes))
            if sent.hexdigest() != digest:
                raise _changed(key)
            self._client.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})
        except BaseException:
            with contextlib.suppress(*ANY_FAULT):
                self._client.abort_multipart_upload(**place)
            raise

    def _put_part(self, place: dict[str, Any], numbered: tuple[int, bytes]) -> dict[str, Any]:
        number, block = numbered
        body = PacedBody(block, self._throttle)
        return {"PartNumber": number, "ETag": self._client.upload_part(**place, PartNumber=number, Body=body)["ETag"]}

    def _abort_abandoned(self, key: str) -> None:
        """Abort old uploads of `key`, where the keys have the right to see and abort them."""
        with contextlib.suppress(*ANY_FAULT):
            found = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=key)
            for upload in found.get("Uploads", ()):
                if upload["Key"] == key and datetime.now(UTC) - upload["Initiated"] > _ABANDONED:
                    self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload["UploadId"])

    def _get_once(self, key: str, target: Path, sha256: str | None, meter: Meter) -> tuple[int, str]:
        head = self._head(key)
        size, tag = int(head["ContentLength"]), str(head["ETag"])
        check_size(size, self._max_bytes, f"{key} of s3://{self._bucket}")
        wanted = sha256 or head["Metadata"].get(_DIGEST_KEY)
        if has_content(target, wanted, size):
            meter.reached(size)
            return size, file_digest(target)
        return receive(
            target,
            source_id=f"s3://{self._bucket}/{key} {tag}",
            size=size,
            sha256=wanted,
            blocks=partial(self._blocks, key, tag, size),
            meter=meter,
        )

    def _blocks(self, key: str, tag: str, size: int, offset: int) -> Iterator[bytes]:
        if offset >= size:
            return
        answer = self._client.get_object(Bucket=self._bucket, Key=key, IfMatch=tag, Range=f"bytes={offset}-")
        with answer["Body"] as body:
            while block := body.read(self._throttle.block_bytes):
                self._throttle.wait_for_bytes(len(block))
                yield block
                offset += len(block)
                if offset > size:
                    raise ArtifactError(f"{key} is longer than its service says; store it again")
        if offset < size:  # a line that is cut may look like the end
            raise ConnectionError(f"{key} ended at byte {offset} of {size}")

    def _objects(self, prefix: str) -> Iterator[StoredFile]:
        begin = check_prefix(prefix)
        root = f"{self._prefix}/" if self._prefix else ""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=root + begin)
        for page in pages:
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(root)
                if name and not name.endswith("/") and (not begin or name == begin or name.startswith(f"{begin}/")):
                    yield StoredFile(name=name, size=entry["Size"], sha256="", url=self._object_url(entry["Key"]))

    def _object_url(self, key: str) -> str:
        return f"s3://{self._bucket}/{quote(key)}"


def _changed(key: str) -> ArtifactError:
    return ArtifactError(f"{key} changed while it was stored; store it when nothing writes to it any more")
