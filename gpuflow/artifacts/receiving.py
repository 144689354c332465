"""Receives one file: resumed where it ended, its size and digest checked, told of byte by byte.

Called by the stores. It knows no protocol: a store gives it blocks, or a file of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from gpuflow.artifacts.partial import PartFile
from gpuflow.artifacts.store import Progress, Throttle, TooLarge
from gpuflow.errors import ArtifactError


class Meter:
    """Tells a progress callback of each byte once, however often a transfer begins again.

    `offset` is how far the transfer has ever come.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self.offset = progress, 0

    def reached(self, offset: int) -> None:
        """Tell that the file is over up to `offset`."""
        if offset > self.offset:
            count, self.offset = offset - self.offset, offset
            if self._progress is not None:
                self._progress(count)


def check_size(size: int, most_bytes: int | None, what: str) -> None:
    """Raise TooLarge for more bytes than may be fetched."""
    if most_bytes is not None and size > most_bytes:
        raise TooLarge(
            f"{what} is larger than {most_bytes} bytes, the most that is fetched; raise "
            "GPUFLOW_DOWNLOAD_MAX_BYTES where it is fetched, or name a smaller file"
        )


def receive(
    target: Path,
    *,
    source_id: str,
    size: int | None,
    sha256: str | None,
    blocks: Callable[[int], Iterable[bytes]],
    meter: Meter,
) -> tuple[int, str]:
    """Bring a file to `target` and return its size in bytes and its SHA-256.

    `blocks(offset)` yields the bytes of the source from `offset` on; `source_id` names this version of the source
    (an ETag, or size and time). When an exception of `blocks` passes through, the next call goes on where it ended.
    Raises ArtifactError when size or digest are not those asked for, OSError from the disk.
    """

    def fill(part: PartFile) -> None:
        for block in blocks(part.size):
            part.append(block)
            meter.reached(part.size)

    return receive_by(fill, target, source_id=source_id, size=size, sha256=sha256, meter=meter)


def receive_by(
    fill: Callable[[PartFile], None],
    target: Path,
    *,
    source_id: str,
    size: int | None,
    sha256: str | None,
    meter: Meter,
) -> tuple[int, str]:
    """Bring a file to `target` as `receive` does; `fill` puts into a part what it lacks."""
    for resume in (True, False):
        with PartFile(target, source_id, resume=resume) as part:
            resumed = part.size > 0
            if size is None or part.size <= size:
                meter.reached(part.size)
                fill(part)
                part.flush()
            fault = _difference(part, size, sha256)
            if fault is None:
                part.commit()
                return part.size, part.sha256
            part.discard()
        if not resumed:
            break
    raise ArtifactError(f"{target.name} is not what was stored: {fault}; store it again")


def _difference(part: PartFile, size: int | None, sha256: str | None) -> str | None:
    if size is not None and part.size != size:
        return f"it has {part.size} bytes instead of {size}"
    if sha256 and part.sha256 != sha256.lower():
        return f"its SHA-256 is {part.sha256} instead of {sha256.lower()}"
    return None


def read_blocks(stream: BinaryIO, throttle: Throttle) -> Iterator[bytes]:
    """Yield what a file holds from where it stands, as fast as the throttle lets it."""
    while block := stream.read(throttle.block_bytes):
        throttle.wait_for_bytes(len(block))
        yield block


def copy_blocks(stream: BinaryIO, part: PartFile, throttle: Throttle, meter: Meter) -> None:
    """Put into a part what it lacks of a file of this machine: by the kernel, where no cap is to be kept."""
    stream.seek(part.size)

    def passed(count: int) -> None:
        throttle.wait_for_bytes(count)
        meter.reached(part.size)

    if throttle.bytes_per_second is None:
        part.copy(stream, passed)
        stream.seek(part.size)
    for block in read_blocks(stream, throttle):
        part.append(block)
        meter.reached(part.size)
