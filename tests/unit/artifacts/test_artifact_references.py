"""References: made once, believed in nothing, loaded where they may be."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuflow.artifacts.destination import (
    FetchFailed,
    data_store,
    destination_store,
    fleet_store_url,
    is_here,
    store_token,
)
from gpuflow.artifacts.inputs import localize
from gpuflow.artifacts.large_values import refer_large
from gpuflow.artifacts.manifest import seal_results
from gpuflow.artifacts.references import References, json_bytes, make_reference, store_value
from gpuflow.artifacts.store import open_store
from gpuflow.errors import ArtifactError, InvalidTemplate
from gpuflow.settings import Settings
from gpuflow.spec.artifact_reference import is_reference, read_reference
from gpuflow.worker.outcome import cause_of

BIG = [{"prompt": f"row {number}", "text": "x" * 1000} for number in range(1500)]
FAR = "redis://broker.example:6379/0"
NEAR = "redis://127.0.0.1:6379/0"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(results_dir=tmp_path / "results", cache_dir=tmp_path / "cache")


def kept(value: Any, path: Path) -> dict[str, Any]:
    """Write a value to a path and return its reference."""
    content = json_bytes(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return make_reference(value, content, path.as_uri())


def changed(reference: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"$artifact": {**reference["$artifact"], **fields}}


# -- form -------------------------------------------------------------------------------------------------------


def test_only_a_mapping_with_that_one_key_is_a_reference() -> None:
    whole = make_reference([1, 2], b"[1,2]", "s3://bucket/x.json")

    assert whole["$artifact"].keys() == {"url", "sha256", "bytes", "count"}
    assert is_reference(whole)
    assert read_reference(whole).to_dict() == whole
    assert not any(map(is_reference, [{}, {"$artifact": 1, "a": 2}, "$artifact", [], None]))


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "ftp://host/x"},
        {"url": "gopher://host/x"},
        {"url": "/etc/passwd"},
        {"url": "http://[broken"},
        {"url": 7},
        {"url": "s3://b/" + "x" * 5000},
        {"sha256": "abc"},
        {"sha256": "A" * 64},
        {"sha256": None},
        {"bytes": -1},
        {"bytes": True},
        {"bytes": 1 << 40},
        {"bytes": "5"},
        {"count": 10**9},
        {"slice": [1]},
        {"slice": [-1, 2]},
        {"slice": "ab"},
        {"more": 1},
    ],
)
def test_malformed_references_are_refused(settings: Settings, fields: dict[str, Any]) -> None:
    reference = changed(kept([1, 2], settings.results_dir / "a.json"), **fields)

    with pytest.raises(ValueError, match="artifact"):
        read_reference(reference)
    with pytest.raises(ArtifactError, match="malformed"):
        References(settings).load(reference)


# -- loading ----------------------------------------------------------------------------------------------------


def test_a_reference_below_the_results_folder_is_loaded_whole_and_in_part(settings: Settings) -> None:
    reference = kept([1, "ü", {"a": None}], settings.results_dir / "t" / "attempt-1" / "result" / "items.json")
    references = References(settings)

    assert references.load(reference) == [1, "ü", {"a": None}]
    assert references.load(changed(reference, slice=[1, 3])) == ["ü", {"a": None}]
    assert references.fields({"items": reference, "n": 1}) == {"items": [1, "ü", {"a": None}], "n": 1}
    assert references.everywhere({"a": [{"b": reference}]}) == {"a": [{"b": [1, "ü", {"a": None}]}]}
    assert references.load("plain") == "plain"


def test_what_is_loaded_is_not_searched_for_references_again(settings: Settings) -> None:
    inner = {"$artifact": {"url": "file:///etc/passwd", "sha256": "0" * 64, "bytes": 1}}

    assert References(settings).everywhere(kept([inner], settings.results_dir / "a.json")) == [inner]


def test_files_outside_of_the_allowed_folders_are_not_read(settings: Settings, tmp_path: Path) -> None:
    secret = kept({"password": "canary"}, tmp_path / "secret.json")
    settings.results_dir.mkdir()
    (settings.results_dir / "link.json").symlink_to(tmp_path / "secret.json")
    (settings.results_dir / "folder").symlink_to(tmp_path)
    root = settings.results_dir.as_uri()
    places = [
        secret["$artifact"]["url"],
        f"{root}/../secret.json",
        f"{root}/%2e%2e/secret.json",
        f"{root}/link.json",
        f"{root}/folder/secret.json",
        "file:///proc/self/environ",
        "file://other-host/etc/passwd",
        "file:relative",
        f"{root}/a%00b",
    ]

    for url in places:
        with pytest.raises(ArtifactError) as caught:
            References(settings).load(changed(secret, url=url))
        assert "canary" not in str(caught.value)
    with pytest.raises(ArtifactError, match="GPUFLOW_STORE_URL"):
        References(settings).load(secret)


def test_the_root_of_the_fleets_store_is_allowed(settings: Settings, tmp_path: Path) -> None:
    shared = settings.model_copy(update={"store_url": (tmp_path / "shared").as_uri()})

    assert References(shared).load(kept([1], tmp_path / "shared" / "uploads" / "a.json")) == [1]
    with pytest.raises(ArtifactError, match="outside"):
        References(shared).load(kept([1], tmp_path / "shared-not" / "a.json"))


def test_another_content_another_size_and_no_json_are_refused(settings: Settings) -> None:
    path = settings.results_dir / "a.json"
    reference = kept([1, 2, 3], path)
    other = changed(reference, sha256="0" * 64)
    large = changed(reference, bytes=3)

    for wrong, says in ((other, "is not what its reference says"), (large, "another size")):
        with pytest.raises(ArtifactError, match=says):
            References(settings).load(wrong)
    path.write_bytes(b"[1,2,4]")
    with pytest.raises(ArtifactError, match="is not what its reference says"):
        References(settings).load(reference)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"not on this machine; set GPUFLOW_STORE_URL"):
        References(settings).load(reference)
    os.mkfifo(path)
    with pytest.raises(ArtifactError, match="not on this machine"):
        References(settings).load(reference)
    for content, says in ((b"{oops", "holds no JSON"), (b"[" * 200_000, "holds no JSON")):
        bad = settings.results_dir / "bad.json"
        bad.write_bytes(content)
        with pytest.raises(ArtifactError, match=says):
            References(settings).load(make_reference(None, content, bad.as_uri()))
    with pytest.raises(ArtifactError, match="holds no list"):
        References(settings).load(changed(kept({"a": 1}, settings.results_dir / "m.json"), slice=[0, 1]))


def test_one_reference_in_many_places_does_not_fill_the_memory(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = kept(["x" * 1000], settings.results_dir / "a.json")
    monkeypatch.setattr("gpuflow.artifacts.references.MAX_BYTES", 5000)

    assert len(References(settings).everywhere([reference] * 4)) == 4
    with pytest.raises(ArtifactError, match="in one task"):
        References(settings).everywhere([reference] * 5)


def test_nothing_is_fetched_offline(settings: Settings) -> None:
    reference = make_reference([1], b"[1]", "http://127.0.0.1:1/x.json")

    with pytest.raises(ArtifactError, match="offline"):
        References(settings.model_copy(update={"offline": True})).load(reference)


# -- stores -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "here"),
    [
        (NEAR, True),
        ("redis://localhost/1", True),
        ("rediss://user:word@[::1]:6379/0", True),
        ("unix:///run/redis.sock?db=0", True),
        (FAR, False),
        ("redis://10.0.0.1:6379", False),
        ("rediss://127.example.org", False),
    ],
)
def test_a_broker_is_here_on_loopback_and_sockets(url: str, here: bool) -> None:
    assert is_here(url) is here


def test_the_fleets_store_is_the_setting_then_the_gateway_then_the_results_folder(settings: Settings) -> None:
    gateway = settings.model_copy(update={"gateway_url": "https://gate:8080"})
    both = gateway.model_copy(update={"store_url": "s3://bucket/x"})

    assert fleet_store_url(settings) is None
    assert fleet_store_url(gateway) == "https://gate:8080/api/v1/results"
    assert fleet_store_url(both) == "s3://bucket/x"
    assert data_store(settings, FAR) is None
    near = data_store(settings, NEAR)
    assert near is not None
    assert near.url("uploads/a") == (settings.results_dir / "uploads" / "a").as_uri()


def test_the_store_of_the_setting_is_the_default_destination_and_the_gateway_is_not(settings: Settings) -> None:
    shared = settings.model_copy(update={"store_url": "file:///shared"})
    gateway = settings.model_copy(update={"gateway_url": "https://gate:8080"})

    store = destination_store({}, shared)
    assert store is not None
    assert store.url("t/a") == "file:///shared/t/a"
    assert destination_store({"output": {"artifacts": ["x"]}}, shared) is not None
    assert destination_store({"output": {"destination": {"type": "local"}}}, shared) is None
    assert destination_store({}, gateway) is None
    assert destination_store({}, settings) is None


def test_http_without_a_url_is_the_gateway_then_the_store_then_an_error(settings: Settings) -> None:
    http = {"output": {"destination": {"type": "http"}}}
    shared = settings.model_copy(update={"store_url": "file:///shared"})
    both = shared.model_copy(update={"gateway_url": "https://gate:8080"})

    found = [destination_store(http, known) for known in (shared, both)]
    assert [store and store.url("t/a") for store in found] == [
        "file:///shared/t/a",
        "https://gate:8080/api/v1/results/t/files/a",
    ]
    with pytest.raises(ArtifactError, match="GPUFLOW_STORE_URL"):
        destination_store(http, settings)


def test_a_callback_stores_nothing_but_at_the_fleets_own_service(settings: Settings) -> None:
    gateway = settings.model_copy(update={"gateway_url": "https://gate:8080"})

    def called(url: str) -> dict[str, object]:
        return {"output": {"destination": {"type": "callback", "url": url}}}

    assert destination_store(called("https://elsewhere/hook"), gateway) is None
    assert destination_store(called("https://gate:8080/other"), gateway) is None
    own = destination_store(called("https://gate:8080/api/v1/results"), gateway)
    assert own is not None
    assert own.url("t/a") == "https://gate:8080/api/v1/results/t/files/a"
    assert destination_store({**called("https://h/${env:A}"), "secrets": ["A"]}, gateway, {"A": "key-123456"}) is None


def test_the_token_goes_to_the_fleets_store_alone(settings: Settings) -> None:
    http = Settings(store_url="https://gate/api/v1/results", worker_token="token-0123456789")

    assert store_token("https://gate/api/v1/results/t/files/a", http) == "token-0123456789"
    for other in ("https://gate/api/v1/resultsx", "https://gate.evil/api/v1/results/x", "http://gate/api/v1/results/x"):
        assert store_token(other, http) is None
    assert store_token("file:///shared/a", Settings(store_url="file:///shared", worker_token="token-01234567")) is None


def test_offline_only_folders_are_stores() -> None:
    with pytest.raises(ArtifactError, match="offline"):
        data_store(Settings(store_url="s3://bucket/x", offline=True), FAR)
    assert data_store(Settings(store_url="file:///shared", offline=True), FAR) is not None


# -- large values -----------------------------------------------------------------------------------------------


def test_large_inline_data_becomes_a_reference_and_small_data_stays(settings: Settings, tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri(), settings=settings)
    spec = {"taskType": "echo", "data": {"type": "list", "items": BIG, "seed": 1}}

    slim = refer_large(spec, lambda: store)

    reference = read_reference(slim["data"]["items"])
    assert (reference.count, slim["data"]["seed"], slim["taskType"]) == (1500, 1, "echo")
    content = (tmp_path / "uploads" / reference.sha256 / "items.json").read_bytes()
    assert json.loads(content) == BIG
    assert hashlib.sha256(content).hexdigest() == reference.sha256
    assert refer_large(slim, lambda: store) == slim
    assert spec["data"]["items"] is BIG
    small = {"data": {"type": "list", "items": ["a"]}}
    assert refer_large(small, lambda: pytest.fail("asked for a store")) == small


def test_text_in_a_referenced_value_is_data_for_the_child(settings: Settings) -> None:
    store = open_store(settings.results_dir.as_uri(), settings=settings)
    items = ["$${env:HOME} and $${x}", "y" * 1_200_000]

    template = refer_large({"data": {"type": "list", "items": items}}, lambda: store, at_dispatch=False)
    spec = localize(template, settings=settings).spec

    # As the child then undoes the escape of ${env:...} alone, it has the two texts as the user meant them.
    assert spec["data"]["items"] == ["$${env:HOME} and ${x}", "y" * 1_200_000]


def test_values_that_are_still_to_be_replaced_stay(settings: Settings) -> None:
    store = open_store(settings.results_dir.as_uri(), settings=settings)
    later = {"data": {"type": "list", "items": ["${tune.result.x}", "y" * 1_200_000]}}
    child = {"data": {"type": "list", "items": ["${env:HOME}", "y" * 1_200_000]}}

    assert refer_large(later, lambda: store, at_dispatch=False) == later
    assert is_reference(refer_large(later, lambda: store)["data"]["items"])
    assert refer_large(child, lambda: store) == child


def test_without_a_store_data_stays_inline_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"data": {"type": "list", "items": BIG}}

    assert refer_large(spec, lambda: None) == spec
    monkeypatch.setattr("gpuflow.artifacts.large_values.MAX_INLINE_BYTES", 1_100_000)
    with pytest.raises(InvalidTemplate, match="GPUFLOW_STORE_URL"):
        refer_large(spec, lambda: None)


# -- data files -------------------------------------------------------------------------------------------------


def test_a_data_file_with_a_digest_is_checked_and_becomes_a_path(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,2\n")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    data = {"type": "csv", "url": file.as_uri(), "sha256": digest}

    local = localize({"data": data}, settings=settings).spec["data"]
    fragment = localize({"data": {"type": "csv", "url": f"{file.as_uri()}#sha256={digest}"}}, settings=settings)

    assert local == {"type": "csv", "path": str(file)}
    assert fragment.spec["data"] == local
    with pytest.raises(ArtifactError, match="is not what was stored"):
        localize({"data": {**data, "sha256": "0" * 64}}, settings=settings)
    with pytest.raises(ArtifactError, match="GPUFLOW_STORE_URL"):
        localize({"data": {"type": "csv", "url": "file:///nowhere/a.csv"}}, settings=settings)
    with pytest.raises(ArtifactError, match="was not sent"):
        localize({"data": {"type": "csv", "upload": "./a.csv"}}, settings=settings)


def test_hub_ids_paths_and_urls_of_the_child_stay(settings: Settings) -> None:
    for data in (
        {"type": "dataset", "url": "org/name"},
        {"type": "jsonl", "path": "/data/a.jsonl"},
        {"type": "jsonl", "url": "https://host/a.jsonl?key=${env:KEY}"},
    ):
        assert localize({"data": data}, settings=settings).spec["data"] == data


def test_data_files_are_not_fetched_offline(settings: Settings) -> None:
    offline = settings.model_copy(update={"offline": True})

    with pytest.raises(ArtifactError, match=r"offline; give data\.path"):
        localize({"data": {"type": "jsonl", "url": "http://127.0.0.1:1/a.jsonl"}}, settings=offline)


# -- results ----------------------------------------------------------------------------------------------------


def test_the_largest_fields_of_a_result_become_files_until_it_is_small(settings: Settings) -> None:
    folder = settings.results_dir / "task" / "attempt-1"
    folder.mkdir(parents=True)
    result = {"items": BIG, "medium": "m" * 600_000, "less": "l" * 500_000, "n": 1}

    sealed = seal_results(folder, result, [], {})

    assert len(json_bytes(sealed.result)) < 1 << 20
    assert is_reference(sealed.result["items"])
    assert is_reference(sealed.result["medium"])
    assert (sealed.result["less"], sealed.result["n"]) == (result["less"], 1)
    assert {"result/items.json", "result/medium.json"} <= set(sealed.names)
    assert json.loads((folder / "responses.json").read_text())["items"] == BIG
    assert References(settings).fields(sealed.result) == {**result, "result_dir": str(folder)}


def test_urls_of_large_fields_are_those_of_the_destination(tmp_path: Path) -> None:
    sealed = seal_results(tmp_path, {"items": BIG}, [], {}, lambda name: f"s3://bucket/t/attempt-1/{name}")

    assert read_reference(sealed.result["items"]).url == "s3://bucket/t/attempt-1/result/items.json"


def test_small_results_and_names_that_are_no_file_names(settings: Settings, tmp_path: Path) -> None:
    small = seal_results(tmp_path, {"items": [1]}, [], {})
    assert small.result["items"] == [1]
    assert not (tmp_path / "result").exists()

    folder = settings.results_dir / "t" / "attempt-1"
    (folder / "result").mkdir(parents=True)
    (folder / "result" / "items.json").write_text("the executor's own")
    hostile = seal_results(folder, {"../../etc/x": "a" * 2_000_000, "items": BIG}, [], {})
    assert sorted(path.name for path in folder.rglob("*.json")) == [
        "field-0.json", "items-1.json", "items.json", "manifest.json", "responses.json",
    ]  # fmt: skip
    assert (folder / "result" / "items.json").read_text() == "the executor's own"
    assert References(settings).fields(hostile.result)["../../etc/x"] == "a" * 2_000_000


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "attempt-1"
    folder.mkdir()
    (folder / "result").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ArtifactError, match="no folder"):
        seal_results(folder, {"items": BIG}, [], {})
    assert not any((tmp_path / "elsewhere").iterdir())


def test_storing_a_value_twice_sends_it_once(settings: Settings, tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri(), settings=settings)
    content = json_bytes(BIG)

    first = store_value(BIG, content, "items", store)
    (file,) = tmp_path.glob("uploads/*/items.json")
    before = file.stat()
    assert store_value(BIG, content, "items", store) == first
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# -- over HTTP --------------------------------------------------------------------------------------------------


@pytest.fixture
def endless() -> Iterator[str]:
    """A server whose answer never ends; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"[" * 65536)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/x.json"
    server.shutdown()
    server.server_close()
    thread.join()


def test_no_more_is_fetched_than_a_reference_says(settings: Settings, endless: str) -> None:
    reference = changed(make_reference([1], b"[1]", endless), bytes=100_000)

    with pytest.raises(ArtifactError, match="larger than its reference says"):
        References(settings).load(reference)

    left = sum(path.stat().st_size for path in settings.cache_dir.rglob("*") if path.is_file())
    assert left < 64 << 20


def test_what_cannot_be_fetched_is_worth_another_attempt(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise ArtifactError("x cannot be fetched: the connection broke")

    monkeypatch.setattr("gpuflow.artifacts.references.fetch", away)
    monkeypatch.setattr("gpuflow.artifacts.data_files.fetch", away)

    with pytest.raises(FetchFailed) as caught:
        References(settings).load(make_reference([1], b"[1]", "s3://bucket/x.json"))
    assert cause_of(caught.value)["retryable"] is True
    with pytest.raises(FetchFailed):
        localize({"data": {"type": "csv", "url": "https://host/a.csv"}}, settings=settings)
    assert cause_of(ArtifactError("malformed"))["retryable"] is False
