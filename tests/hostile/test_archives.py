"""Archives of strangers: headers that would hold tarfile are refused, and what is slow is read in another process."""

from __future__ import annotations

import gzip
import os
import tarfile
import threading
from pathlib import Path

import psutil
import pytest

from gpuflow.artifacts.archive import pack, unpack
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings
from gpuflow.worker.download_child import ChildReader, NotWaitedFor, ReaderDied
from tests.support.hostile_archives import endless_number, header, records
from tests.support.waiting import eventually, patient

HOSTILE = {
    "180 KB of digits": (endless_number(180_000), "a header that is too large"),
    "60 KB of digits": (endless_number(60_000), "endless number"),
    "records that lead nowhere": (header(tarfile.XHDTYPE, b"9999 path=x\n"), "malformed header"),
    "a record of no length": (header(tarfile.XHDTYPE, b"0 path=x\n"), "malformed header"),
    "a record without a length": (header(tarfile.XHDTYPE, records(path="x") + b"path=x\n"), "malformed header"),
    "a global header too large": (header(tarfile.XGLTYPE, records(comment="x" * 70_000)), "too large"),
    "global headers that add up": (header(tarfile.XGLTYPE, records(comment="x" * 40_000)) * 2, "too large"),
    "a long name too large": (header(tarfile.GNUTYPE_LONGNAME, b"n" * 70_000), "too large"),
    "headers without end": (header(tarfile.XHDTYPE, records(path="x")) * 9, "too many headers"),
    "a sparse map": (header(tarfile.XHDTYPE, records(**{"GNU.sparse.major": "1"})), "sparse"),
    "an old sparse file": (header(tarfile.GNUTYPE_SPARSE, b""), "sparse"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_it_is_refused_before_tarfile_reads_it(name: str, tmp_path: Path) -> None:
    content, cause = HOSTILE[name]
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(gzip.compress(content + bytes(1024)))

    with pytest.raises(ArtifactError, match=cause):
        unpack(archive, tmp_path / "target")

    assert not (tmp_path / "target").exists()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


def readers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if "gpuflow.artifacts.reader_child" in words(one)]


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_reader_unpacks_and_says_why_not(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1")
    pack(folder, tmp_path / "good.tar.gz")
    (tmp_path / "bad.tar.gz").write_bytes(gzip.compress(endless_number(60_000)))

    with ChildReader(settings=settings, cwd=tmp_path, wanted=lambda: True, cpu_seconds=60) as reader:
        with pytest.raises(ArtifactError, match="endless number"):
            reader.unpack(tmp_path / "bad.tar.gz", tmp_path / "refused")
        reader.unpack(tmp_path / "good.tar.gz", tmp_path / "there")

    assert (tmp_path / "there" / "model" / "weights").read_bytes() == b"1"
    assert not (tmp_path / "refused").exists()


def test_a_reader_that_nobody_waits_for_is_killed(settings: Settings, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")  # opening it takes for ever
    wanted = threading.Event()
    wanted.set()
    ended: list[BaseException] = []

    def read() -> None:
        try:
            with ChildReader(settings=settings, cwd=tmp_path, wanted=wanted.is_set, cpu_seconds=60) as reader:
                reader.unpack(tmp_path / "never", tmp_path / "target")
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    reading = eventually(readers, what="the reader at work")
    assert list(tmp_path.glob(".target.*"))

    wanted.clear()

    thread.join(timeout=patient(30))
    assert [type(error) for error in ended] == [NotWaitedFor]
    assert list(tmp_path.glob(".target.*")) == [], "what was half unpacked is left"
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in reading)


def test_a_reader_has_a_limit_of_processor_time(settings: Settings, tmp_path: Path) -> None:
    with (
        (tmp_path / "zeros.tar.gz").open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1) as stream,
    ):
        for number in range(2000):  # small files: much work for few bytes
            stream.write(tarfile.TarInfo(str(number)).tobuf())
        stream.write(bytes(1024))

    def read_on(reader: ChildReader) -> None:
        for number in range(1000):  # all that one preparation reads counts together
            reader.unpack(tmp_path / "zeros.tar.gz", tmp_path / "slow" / str(number))

    with (
        ChildReader(settings=settings, cwd=tmp_path, wanted=lambda: True, cpu_seconds=1) as reader,
        pytest.raises(ReaderDied, match="processor time"),
    ):
        read_on(reader)
