"""The results service on the wire: files in and out, ranges, offsets, refusals, and names that try to leave."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from gpuflow.artifacts.repr_digest import parse_repr_digest, repr_digest
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import eventually, patient

CONTENT = bytes(range(256)) * 16


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def problem(answer: httpx.Response) -> str:
    """Check that an answer is a problem of RFC 9457, and return its kind."""
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == answer.status_code
    assert body["title"]
    assert body["detail"]
    assert TOKEN not in answer.text
    return body["type"].removeprefix("urn:gpuflow:problem:")


def raw(gateway: Gateway, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """Send a request whose path no library has made tidy."""
    parts = urlsplit(gateway.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=patient(30))
    try:
        connection.request(method, path, body=body, headers={**gateway.headers, **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# -- in and out ------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was_sent(client: httpx.Client, task: str) -> None:
    sent = client.post(f"/{task}/files/attempt-1/responses.json", content=CONTENT)
    assert sent.status_code == 201
    assert sent.json()["sha256"] == digest(CONTENT)

    got = client.get(sent.headers["location"].removeprefix("/api/v1/results"))

    assert got.content == CONTENT
    assert parse_repr_digest(got.headers["repr-digest"]) == digest(CONTENT)
    assert got.headers["etag"] == f'"{digest(CONTENT)}"'
    head = client.head(f"/{task}/files/attempt-1/responses.json")
    assert (head.headers["content-length"], head.content) == (str(len(CONTENT)), b"")


@pytest.mark.parametrize("name", ["empty", "a b/ü 100%.txt", "a?b#c", "%2e%2e", "..hidden", "deep/" * 40 + "file"])
def test_any_honest_name_works(gateway: Gateway, task: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"" if name == "empty" else CONTENT)

    stored = gateway.store().put(path, f"{task}/{name}")
    gateway.store().get(f"{task}/{name}", tmp_path / "back")

    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert [file.name for file in gateway.store().list(task)] == [f"{task}/{name}"]
    assert (gateway.root / task / name).read_bytes() == path.read_bytes()
    assert stored.url.startswith(gateway.results_url)


def test_files_that_a_worker_wrote_by_itself_are_served_with_their_digest(
    gateway: Gateway, client: httpx.Client, task: str
) -> None:
    folder = gateway.root / task / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "out.bin").write_bytes(CONTENT)
    (gateway.root / task / "out.bin").symlink_to("attempt-1/out.bin")

    assert "repr-digest" not in client.get(f"/{task}/files/out.bin").headers
    wanted = client.get(f"/{task}/files/out.bin", headers={"Want-Repr-Digest": "sha-256=10"})
    assert parse_repr_digest(wanted.headers["repr-digest"]) == digest(CONTENT)

    (folder / "out.bin").write_bytes(CONTENT + b"more")
    assert client.get(f"/{task}/files/out.bin").content == CONTENT + b"more"
    assert "repr-digest" not in client.get(f"/{task}/files/out.bin").headers


def test_lists_are_by_name_and_by_page(client: httpx.Client, task: str) -> None:
    for name in ("b", "a/1", "a/2", "c"):
        client.post(f"/{task}/files/{name}", content=CONTENT)

    listed = client.get(f"/{task}/files").json()
    pages, after = [], ""
    while True:
        page = client.get(
            str(client.base_url).rstrip("/"), params={"prefix": f"{task}/", "after": after, "limit": 3}
        ).json()
        pages.append([file["name"].partition("/")[2] for file in page["files"]])
        after = page["next"]
        if after is None:
            break

    assert [file["name"] for file in listed["files"]] == ["a/1", "a/2", "b", "c"]
    assert {file["sha256"] for file in listed["files"]} == {digest(CONTENT)}
    assert pages == [["a/1", "a/2", "b"], ["c"]]


def test_a_deleted_file_is_gone_with_its_empty_folders(gateway: Gateway, client: httpx.Client, task: str) -> None:
    client.post(f"/{task}/files/a/b/c", content=CONTENT)

    assert client.delete(f"/{task}/files/a/b/c").status_code == 204
    assert problem(client.delete(f"/{task}/files/a/b/c")) == "no-such-file"
    assert not (gateway.root / task).exists()


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [("bytes=0-0", 0, 1), ("bytes=100-", 100, 4096), ("bytes=-96", 4000, 4096), ("bytes=4000-9999", 4000, 4096)],
)
def test_a_range_is_sent_alone(client: httpx.Client, task: str, asked: str, start: int, end: int) -> None:
    client.post(f"/{task}/files/f", content=CONTENT)

    got = client.get(f"/{task}/files/f", headers={"Range": asked})

    assert got.status_code == 206
    assert got.content == CONTENT[start:end]
    assert got.headers["content-range"] == f"bytes {start}-{end - 1}/4096"


@pytest.mark.parametrize("asked", ["bytes=4096-", "bytes=-0", "bytes=9999-10000"])
def test_a_range_beyond_the_file_is_refused(client: httpx.Client, task: str, asked: str) -> None:
    client.post(f"/{task}/files/f", content=CONTENT)

    got = client.get(f"/{task}/files/f", headers={"Range": asked})

    assert (got.status_code, problem(got)) == (416, "no-such-range")
    assert got.headers["content-range"] == "bytes */4096"


@pytest.mark.parametrize("asked", ["bytes=5-3", "bytes=-", "lines=1-2", "bytes=0-1,4-5", "bytes=a-b", ""])
def test_what_is_no_single_range_gets_the_whole_file(client: httpx.Client, task: str, asked: str) -> None:
    client.post(f"/{task}/files/f", content=CONTENT)
    assert client.get(f"/{task}/files/f", headers={"Range": asked}).content == CONTENT


def test_conditions_are_those_of_the_entity_tag(client: httpx.Client, task: str) -> None:
    client.post(f"/{task}/files/f", content=CONTENT)
    tag = f'"{digest(CONTENT)}"'

    assert client.get(f"/{task}/files/f", headers={"If-None-Match": f'"x", {tag}'}).status_code == 304
    ranged = {"Range": "bytes=0-9"}
    assert client.get(f"/{task}/files/f", headers={**ranged, "If-Range": tag}).status_code == 206
    assert client.get(f"/{task}/files/f", headers={**ranged, "If-Range": '"old"'}).status_code == 200


# -- offsets ---------------------------------------------------------------------------------------------------------


def test_an_upload_in_pieces_shows_only_when_it_is_whole(client: httpx.Client, gateway: Gateway, task: str) -> None:
    address = f"/{task}/files/big"
    headers = {"Repr-Digest": repr_digest(digest(CONTENT)), "Upload-Length": "4096"}

    opened = client.post(address, headers=headers)
    first = client.post(address, headers={**headers, "Upload-Offset": "0"}, content=CONTENT[:1000])
    assert (opened.status_code, opened.headers["upload-offset"]) == (204, "0")
    assert (first.status_code, first.headers["upload-offset"]) == (202, "1000")
    assert client.get(address).status_code == 404
    assert not (gateway.root / task).exists()
    head = client.head(address, headers={"Repr-Digest": headers["Repr-Digest"]})
    assert (head.status_code, head.headers["upload-offset"], head.headers["upload-complete"]) == (204, "1000", "?0")

    wrong = client.post(address, headers={**headers, "Upload-Offset": "999"}, content=CONTENT[999:])
    assert (wrong.status_code, problem(wrong), wrong.headers["upload-offset"]) == (409, "wrong-offset", "1000")
    last = client.post(address, headers={**headers, "Upload-Offset": "1000"}, content=CONTENT[1000:])

    assert (last.status_code, last.headers["upload-complete"]) == (201, "?1")
    assert client.get(address).content == CONTENT
    again = client.post(address, headers=headers)
    assert (again.status_code, again.headers["upload-complete"]) == (200, "?1")


def test_a_wrong_digest_is_found_and_nothing_is_stored(client: httpx.Client, gateway: Gateway, task: str) -> None:
    client.post(f"/{task}/files/f", content=b"what was there")

    sent = client.post(f"/{task}/files/f", headers={"Repr-Digest": repr_digest(digest(b"other"))}, content=CONTENT)

    assert (sent.status_code, problem(sent)) == (422, "wrong-digest")
    assert client.get(f"/{task}/files/f").content == b"what was there"
    assert gateway.parts(task) == []


def test_a_broken_upload_without_digest_leaves_nothing(gateway: Gateway, task: str) -> None:
    parts = urlsplit(gateway.url)
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=patient(30)) as line:
        head = f"POST /api/v1/results/{task}/files/f HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        line.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode() + CONTENT)
        eventually(lambda: gateway.parts(task), what="the part of the upload")

    eventually(lambda: not gateway.parts(task), what="the end of the part")
    assert not (gateway.root / task).exists()


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({}, "no-token"),
        ({"Authorization": "Bearer"}, "no-token"),
        ({"Authorization": f"Basic {TOKEN}"}, "no-token"),
        ({"Authorization": "Bearer wrong"}, "wrong-token"),
        ({"Authorization": f"Bearer {TOKEN}x"}, "wrong-token"),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, "wrong-token"),
        ({"X-Worker-Token": "wrong"}, "wrong-token"),
    ],
)
def test_without_the_token_nothing_is_done(
    gateway: Gateway, task: str, method: str, headers: dict[str, str], kind: str
) -> None:
    (gateway.root / task).mkdir()
    (gateway.root / task / "f").write_bytes(CONTENT)

    answer = httpx.request(method, f"{gateway.results_url}/{task}/files/f", headers=headers, timeout=patient(30))

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert method == "HEAD" or problem(answer) == kind
    assert (gateway.root / task / "f").read_bytes() == CONTENT


def test_the_workers_header_is_as_good(gateway: Gateway, task: str) -> None:
    answer = httpx.get(f"{gateway.results_url}/{task}/files", headers={"X-Worker-Token": TOKEN}, timeout=patient(30))
    assert answer.json() == {"task_id": task, "files": []}


def test_health_needs_no_token_and_other_addresses_are_problems(gateway: Gateway, client: httpx.Client) -> None:
    assert httpx.get(f"{gateway.url}/healthz", timeout=patient(30)).json() == {"status": "ok"}
    assert problem(httpx.get(f"{gateway.url}/nothing", timeout=patient(30))) == "no-such-route"
    put = client.put("/t/files/f", content=b"")
    assert (put.status_code, problem(put)) == (405, "refused")
    assert problem(client.post("/t/files", content=b"")) == "no-name"


LEAVING = [
    "../secret",
    "../../secret",
    "..%2fsecret",
    "..%2Fsecret",
    "%2e%2e/secret",
    "%2e%2e%2fsecret",
    "%2E%2E%2Fsecret",
    ".%2e/secret",
    "a/../../secret",
    "a/%2e%2e/%2e%2e/secret",
    "./secret",
    "a/./b",
    "a//b",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "//etc/passwd",
    "..%5csecret",
    "a%5c..%5csecret",
    "a%00b",
    "a%0ab",
    "a%0d%0ab",
    "a%7fb",
    "a%c2%80b",
    "%c0%ae%c0%ae/secret",
    "%c0%ae%c0%ae%c0%afsecret",
    "a%ffb",
    ".gpuflow-gateway/parts/x",
    "a/.gpuflow-x.part",
    "a" * 256,
    "a/" * 600 + "a",
    "a/",
]


@pytest.mark.parametrize("name", LEAVING)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_no_name_leaves_the_task(gateway: Gateway, method: str, name: str) -> None:
    (gateway.root / "secret").write_bytes(b"secret")
    (gateway.root.parent / "secret").write_bytes(b"secret")
    before = gateway.files()

    status, body = raw(gateway, method, f"/api/v1/results/t/files/{name}", b"x" if method == "POST" else b"")

    kind = json.loads(body)["type"].removeprefix("urn:gpuflow:problem:")
    assert (status, kind) == ((404, "no-such-route") if "%0a" in name else (400, "bad-name"))
    assert gateway.files() == before
    assert (gateway.root.parent / "secret").read_bytes() == b"secret"
    (gateway.root / "secret").unlink()


@pytest.mark.parametrize("task_id", ["..", "%2e%2e", ".", ".gpuflow-gateway", "a%5cb", "a%00", "..%2f..", "a%2fb"])
def test_no_task_id_leaves_the_results(gateway: Gateway, task_id: str) -> None:
    before = gateway.files()
    status, _ = raw(gateway, "POST", f"/api/v1/results/{task_id}/files/f", b"x")
    assert status in (400, 404, 405)
    assert gateway.files() == before


def test_a_double_encoded_name_stays_a_name(gateway: Gateway, task: str) -> None:
    status, _ = raw(gateway, "POST", f"/api/v1/results/{task}/files/%252e%252e%252fx", CONTENT)
    assert status == 201
    assert (gateway.root / task / "%2e%2e%2fx").read_bytes() == CONTENT


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_links_lead_nowhere_else(
    gateway: Gateway, client: httpx.Client, task: str, tmp_path: Path, method: str
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (gateway.root / task).mkdir()
    (gateway.root / task / "folder").symlink_to(tmp_path)
    (gateway.root / task / "circle").symlink_to("circle")
    os.mkfifo(gateway.root / task / "pipe")

    answers = [client.request(method, f"/{task}/files/{name}") for name in ("folder/secret", "folder/new/secret")]
    assert [answer.status_code for answer in answers] == [404, 404]
    if method == "GET":
        (gateway.root / task / "link").symlink_to(tmp_path / "secret")
        for name in ("link", "circle", "pipe", "folder", "nothing", "pipe/x"):
            assert client.get(f"/{task}/files/{name}").status_code == 404
        assert client.get(f"/{task}/files").json()["files"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


def test_a_file_never_replaces_a_folder_nor_lies_below_a_file(client: httpx.Client, task: str) -> None:
    client.post(f"/{task}/files/a/b", content=CONTENT)

    for name in ("a", "a/b/c", "a/b/c/d"):
        answer = client.post(f"/{task}/files/{name}", content=b"x")
        assert (answer.status_code, problem(answer)) == (409, "in-the-way")
    assert client.get(f"/{task}/files/a/b").content == CONTENT


@pytest.mark.parametrize(
    "headers",
    [
        {"Upload-Offset": "-1"},
        {"Upload-Offset": "five"},
        {"Upload-Offset": "5"},
        {"Upload-Length": "1e9"},
        {"Upload-Length": "٣"},
        {"Repr-Digest": "sha-256=:AAAA:"},
        {"Repr-Digest": "md5=:AAAA:"},
        {"Repr-Digest": "sha-256=:***:"},
    ],
)
def test_headers_that_make_no_sense_are_refused(client: httpx.Client, task: str, headers: dict[str, str]) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    answer = client.post(f"/{task}/files/f", headers=encoded, content=CONTENT)
    assert (answer.status_code, problem(answer)) == (400, "bad-header")


def test_more_bytes_than_announced_are_refused(client: httpx.Client, gateway: Gateway, task: str) -> None:
    answer = client.post(f"/{task}/files/f", headers={"Upload-Length": "10"}, content=CONTENT)
    assert (answer.status_code, problem(answer)) == (400, "too-long")
    assert gateway.parts(task) == []


def test_what_the_disk_cannot_hold_is_refused_before_a_byte(tmp_path: Path) -> None:
    with Gateway(tmp_path, "--max-file-bytes", str(1 << 60)) as gateway:
        headers = {**gateway.headers, "Upload-Length": str(1 << 58), "Repr-Digest": repr_digest(digest(b""))}
        answer = httpx.post(f"{gateway.results_url}/t/files/f", headers=headers, timeout=patient(30))
        assert (answer.status_code, problem(answer)) == (507, "disk-full")


def test_a_file_over_the_limit_is_refused_however_it_comes(tmp_path: Path) -> None:
    with Gateway(tmp_path, "--max-file-bytes", "1000") as gateway:
        address = f"{gateway.results_url}/t/files/f"
        told = httpx.post(address, headers=gateway.headers, content=CONTENT, timeout=patient(30))
        untold = httpx.post(
            address, headers=gateway.headers, content=iter([CONTENT[:999], CONTENT[:2]]), timeout=patient(30)
        )
        fits = httpx.post(address, headers=gateway.headers, content=iter([CONTENT[:1000]]), timeout=patient(30))

        assert [(answer.status_code, problem(answer)) for answer in (told, untold)] == [(413, "too-large")] * 2
        assert fits.status_code == 201
        assert gateway.files() == ["t/f"]


# -- without a token ---------------------------------------------------------------------------------------------------


def test_without_a_token_only_programs_of_this_machine_are_answered(tmp_path: Path) -> None:
    with Gateway(tmp_path, token=None) as gateway:
        address = f"{gateway.results_url}/t/files"
        assert httpx.get(address, timeout=patient(30)).status_code == 200
        assert httpx.get(address, headers={"Origin": "http://localhost:3000"}, timeout=patient(30)).status_code == 200
        for headers in ({"Host": "rebound.example:8080"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
            answer = httpx.get(address, headers=headers, timeout=patient(30))
            assert (answer.status_code, problem(answer)) == (403, "not-from-here")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_no_other_machine_is_let_in_without_a_token(tmp_path: Path, host: str) -> None:
    with pytest.raises(AssertionError, match="set GPUFLOW_WORKER_TOKEN, or listen on"):
        Gateway(tmp_path, "--host", host, token=None)
    with pytest.raises(AssertionError, match="set GPUFLOW_WORKER_TOKEN, or listen on"):
        Gateway(tmp_path, "--host", host, "--without-token", token="")


def test_a_port_that_is_taken_is_one_line(gateway: Gateway, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"gpuflow: the gateway cannot listen on .*; choose another --port"):
        Gateway(tmp_path, "--port", str(urlsplit(gateway.url).port))


def test_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    with Gateway(tmp_path) as gateway:
        assert gateway.stop() == 0
        assert "Traceback" not in gateway.log
