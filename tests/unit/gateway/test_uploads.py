"""Uploads without a server: full disks, silence, old parts."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuflow.gateway.files import ResultsFolder
from gpuflow.gateway.parts import Part
from gpuflow.gateway.problems import Problem
from gpuflow.gateway.uploads import Ask, Limits, Uploads

CONTENT = b"0123456789"


def ask(offset: int | None = None, content: bytes = CONTENT) -> Ask:
    digest = hashlib.sha256(content).hexdigest()
    return Ask(task_id="t", name="a/f", offset=offset, length=len(content), sha256=digest)


async def body(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def uploads(root: Path) -> Uploads:
    return Uploads(ResultsFolder(root), Limits(part_seconds=100))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_disk_that_fills_up_is_told_and_what_came_is_kept(
    uploads: Uploads, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write, calls = os.write, []

    def fills_up(descriptor: int, block: bytes) -> int:
        calls.append(len(block))
        if len(calls) == 1:
            return write(descriptor, block[:4])
        raise OSError(number, "full")

    monkeypatch.setattr(os, "write", fills_up)
    with pytest.raises(Problem) as caught:
        await uploads.receive(ask(), body(CONTENT))

    assert (caught.value.status, caught.value.kind) == (507, "disk-full")
    assert uploads.offset(ask()) == 0  # a block is written whole or not at all
    assert not (root / "t").exists()
    monkeypatch.setattr(os, "write", write)
    entry, here = await uploads.receive(ask(0), body(CONTENT))
    assert entry is not None
    assert here == 10
    assert (root / "t/a/f").read_bytes() == CONTENT


async def test_an_upload_that_falls_silent_is_ended_and_can_be_gone_on_with(uploads: Uploads, root: Path) -> None:
    impatient = Uploads(ResultsFolder(root), Limits(silence_seconds=0.2))

    async def silent() -> AsyncIterator[bytes]:
        yield CONTENT[:4]
        await asyncio.Event().wait()

    with pytest.raises(Problem) as caught:
        await impatient.receive(ask(), silent())

    assert (caught.value.status, caught.value.kind) == (408, "silent")
    assert uploads.offset(ask()) == 4
    await uploads.receive(ask(4), body(CONTENT[4:]))
    assert (root / "t/a/f").read_bytes() == CONTENT


async def test_a_part_that_was_changed_behind_our_back_is_read_again(uploads: Uploads, root: Path) -> None:
    await uploads.receive(ask(0), body(CONTENT[:4]))
    (part,) = root.glob(".gpuflow-gateway/parts/t/*")
    part.write_bytes(b"01x3")
    os.utime(part, ns=(1, 1))

    with pytest.raises(Problem) as caught:
        await uploads.receive(ask(4), body(CONTENT[4:]))

    assert (caught.value.status, caught.value.kind) == (422, "wrong-digest")
    assert not part.exists()


async def test_a_second_upload_of_the_same_content_is_told_to_come_again(uploads: Uploads) -> None:
    async def meanwhile() -> AsyncIterator[bytes]:
        yield CONTENT[:4]
        for offset in (None, 0, 4):
            with pytest.raises(Problem) as caught:
                await uploads.receive(ask(offset), body(CONTENT))
            assert (caught.value.status, caught.value.kind) == (409, "in-progress")
        yield CONTENT[4:]

    entry, _ = await uploads.receive(ask(), meanwhile())
    assert entry is not None


async def test_old_parts_are_removed_but_not_those_under_way(uploads: Uploads, root: Path) -> None:
    await uploads.receive(ask(0), body(CONTENT[:4]))
    await uploads.receive(ask(0, b"another one"), body(b"ano"))
    await uploads.receive(ask(0, b"a third one"), body(b"a t"))
    folder = ResultsFolder(root)
    old, held, young = (
        folder.part_path("t", "a/f", hashlib.sha256(content).hexdigest())
        for content in (CONTENT, b"another one", b"a third one")
    )
    for path in (old, held):
        os.utime(path, (0, 0))
    part = Part.open(held)
    assert part is not None

    with part:
        uploads.remove_old_parts()

    assert [path.exists() for path in (old, held, young)] == [False, True, True]
