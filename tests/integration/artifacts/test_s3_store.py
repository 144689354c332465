"""What only a bucket can meet with: uploads in parts, cut connections, refusals, and nothing secret in an error."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import boto3
import pytest

from gpuflow.artifacts import s3_store
from gpuflow.artifacts.s3_store import S3Store
from gpuflow.artifacts.store import Throttle, fetch
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings
from tests.chaos.proxy import Proxy
from tests.integration.artifacts.conftest import Place

PART = 5 << 20


@pytest.fixture
def store(s3_place: Place) -> S3Store:
    return S3Store(s3_place.url, throttle=Throttle(None), part_bytes=PART)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(os.urandom(3 * PART + 99))
    return tmp_path / "source"


def uploads(place: Place) -> list[object]:
    found = boto3.client("s3").list_multipart_uploads(Bucket=place.url.split("/")[2])
    return list(found.get("Uploads", ()))


def test_a_cut_download_goes_on_where_it_ended(
    s3_place: Place, source: Path, tmp_path: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch, s3_endpoint: str
) -> None:
    source.write_bytes(source.read_bytes() * 4)  # more than all buffers on the way hold
    stored = s3_place.open().put(source, "a")
    over, cuts = 0, []
    taken.clear()
    with Proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)

        def cut_at_half(count: int) -> None:
            nonlocal over
            over += count
            if over > source.stat().st_size / 2 and not any(cuts):
                cuts.append(proxy.cut())

        got = s3_place.open().get("a", tmp_path / "got", sha256=stored.sha256, progress=cut_at_half)

    assert any(cuts)
    assert got.sha256 == stored.sha256
    assert sum(taken) == source.stat().st_size  # no byte twice


def test_a_cut_upload_sends_its_part_again(
    s3_place: Place, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_endpoint: str
) -> None:
    cuts = []
    with Proxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = S3Store(s3_place.url, throttle=Throttle(None), part_bytes=PART)
        taken = 0

        def wait_for_bytes(self: Throttle, count: int) -> None:
            nonlocal taken
            taken += count
            if taken > source.stat().st_size / 2 and not any(cuts):
                cuts.append(proxy.cut())

        monkeypatch.setattr(Throttle, "wait_for_bytes", wait_for_bytes)
        stored = store.put(source, "a")

    assert any(cuts)
    assert taken < 1.9 * source.stat().st_size
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    assert s3_place.open().get("a", tmp_path / "got", sha256=stored.sha256).size == source.stat().st_size


def test_an_upload_that_fails_leaves_no_parts(s3_place: Place, store: S3Store, source: Path) -> None:
    def grow(count: int) -> None:
        with source.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")

    with pytest.raises(ArtifactError, match="changed while it was stored"):
        store.put(source, "a", progress=grow)

    assert uploads(s3_place) == []
    assert store.list("") == []


def test_an_upload_that_nobody_finishes_is_aborted_by_the_next(
    s3_place: Place, store: S3Store, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_place.url.split("/")[2]
    client = boto3.client("s3")
    client.create_multipart_upload(Bucket=bucket, Key="results/a")
    client.create_multipart_upload(Bucket=bucket, Key="results/a-neighbour")

    with monkeypatch.context() as young:
        young.setattr(s3_store, "_ABANDONED", timedelta(days=40_000))  # moto's uploads bear an old date
        store.put(source, "a")
    assert len(uploads(s3_place)) == 2  # perhaps somebody is at it
    source.write_bytes(source.read_bytes()[::-1])
    store.put(source, "a")

    assert [upload["Key"] for upload in uploads(s3_place)] == ["results/a-neighbour"]  # type: ignore[index]


def test_the_digest_travels_with_the_file(s3_place: Place, store: S3Store, source: Path, tmp_path: Path) -> None:
    store.put(source, "a")
    spoilt = bytearray(source.read_bytes())
    spoilt[7] ^= 1
    s3_place.replace("a", bytes(spoilt))

    with pytest.raises(ArtifactError, match="SHA-256"):
        store.get("a", tmp_path / "got")


def test_a_file_of_the_buckets_root_is_fetched(s3_place: Place, tmp_path: Path) -> None:
    bucket = s3_place.url.split("/")[2]
    boto3.client("s3").put_object(Bucket=bucket, Key="foreign name.bin", Body=b"abc")

    got = fetch(f"s3://{bucket}/foreign%20name.bin", tmp_path / "got", settings=Settings())

    assert (got.size, (tmp_path / "got").read_bytes()) == (3, b"abc")


def test_more_files_than_one_page_are_listed_and_deleted(s3_place: Place, store: S3Store) -> None:
    bucket = s3_place.url.split("/")[2]
    client = boto3.client("s3")
    for number in range(1002):
        client.put_object(Bucket=bucket, Key=f"results/many/{number:04}", Body=b"")

    assert len(store.list("many")) == 1002
    assert store.delete("many") == 1002
    assert store.list("") == []


def test_errors_name_the_mend_and_no_secret(
    s3_place: Place, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(url: str) -> str:
        with pytest.raises(ArtifactError) as refused:
            S3Store(url, throttle=Throttle(None)).put(source, "a")
        assert "canary" not in str(refused.value)
        return str(refused.value)

    assert "there is no such bucket" in refusal("s3://no-such-bucket-here/results")
    monkeypatch.setattr("gpuflow.artifacts.s3_client.REQUEST_ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "check AWS_ENDPOINT_URL" in refusal(s3_place.url)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "set AWS_ACCESS_KEY_ID" in refusal(s3_place.url)
