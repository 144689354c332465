"""Files in a form (multipart/form-data), as `curl -F file=@name` and the seeds' workers send them."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from gpuflow.artifacts.repr_digest import repr_digest
from tests.integration.gateway.test_results_service import CONTENT, digest, problem
from tests.support.gateway import TOKEN, Gateway
from tests.support.memory import peak_growth
from tests.support.waiting import eventually, patient

MIB = 1 << 20


def stored(gateway: Gateway, task: str, name: str) -> bytes:
    return (gateway.root / task / name).read_bytes()


def test_a_form_without_a_name_in_the_address_names_its_file(client: httpx.Client, gateway: Gateway, task: str) -> None:
    answer = client.post(f"/{task}/files", data={"note": "passed over"}, files={"file": ("final_lora.tar.gz", CONTENT)})

    assert answer.status_code == 201
    (told,) = answer.json()["files"]
    assert (told["name"], told["bytes"], told["sha256"]) == ("final_lora.tar.gz", len(CONTENT), digest(CONTENT))
    assert stored(gateway, task, "final_lora.tar.gz") == CONTENT
    assert client.get(f"/{task}/files/final_lora.tar.gz").content == CONTENT


def test_a_name_in_the_address_wins(client: httpx.Client, gateway: Gateway, task: str) -> None:
    answer = client.post(f"/{task}/files/a/b", files={"file": ("other", CONTENT)})

    assert (answer.status_code, answer.json()["name"]) == (201, "a/b")
    assert answer.headers["Location"] == f"/api/v1/results/{task}/files/a/b"
    assert gateway_files(gateway, task) == ["a/b"]


def test_several_files_come_in_by_their_names(client: httpx.Client, gateway: Gateway, task: str) -> None:
    names = ["a", "b c.txt", 'd"e', "\u00fc\u2713"]
    answer = client.post(f"/{task}/files", files=[("file", (name, name.encode() * 100_000)) for name in names])

    assert [item["name"] for item in answer.json()["files"]] == names
    assert gateway_files(gateway, task) == sorted(names)
    assert all(stored(gateway, task, name) == name.encode() * 100_000 for name in names)
    refused = client.post(f"/{task}/files/x", files=[("file", ("a", b"1")), ("file", ("b", b"2"))])
    assert (refused.status_code, problem(refused)) == (400, "bad-form")


@pytest.mark.parametrize("content", [b"", b"\r\n", b"--", b"\r\n--xyz", b"\r\n--xyz--\r\nx" * 9, bytes(3 * MIB)])
def test_any_content_comes_in_as_it_was(client: httpx.Client, gateway: Gateway, task: str, content: bytes) -> None:
    boundary = "xyzq"
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n'.encode()
        + content
        + f"\r\n--{boundary}--\r\n".encode()
    )
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}

    for step in (7, 8191, len(body)):
        pieces = [body[at : at + step] for at in range(0, min(len(body), 1000 * step), step)]
        if b"".join(pieces) == body:
            assert client.post(f"/{task}/files", headers=headers, content=iter(pieces)).status_code == 201
            assert stored(gateway, task, "f") == content


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../../b", ".gpuflow-gateway/x", "a\nb", ""])
def test_names_of_a_form_leave_no_task(client: httpx.Client, gateway: Gateway, task: str, name: str) -> None:
    before = gateway.files()
    answer = client.post(
        f"/{task}/files",
        headers={"Content-Type": "multipart/form-data; boundary=b"},
        content=f'--b\r\nContent-Disposition: form-data; name="f"; filename="{name}"\r\n\r\nx\r\n--b--\r\n'.encode(),
    )

    assert answer.status_code == 400
    assert problem(answer) in ("bad-name", "bad-form")
    assert gateway.files() == before


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content-Type": "multipart/form-data"}, b"x"),
        ({"Content-Type": "multipart/form-data; boundary=" + "b" * 5000}, b"x"),
        ({"Content-Type": "multipart/form-data; boundary=b"}, b""),
        ({"Content-Type": "multipart/form-data; boundary=b"}, b"no form at all"),
        ({"Content-Type": "multipart/form-data; boundary=b"}, b"--b--\r\n"),
        ({"Content-Type": "multipart/form-data; boundary=b"}, b"--b\r\nX: " + b"y" * 100_000),
        ({"Content-Type": "multipart/form-data; boundary=b"},
         b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n--b--\r\n'),
        ({"Content-Type": "multipart/form-data; boundary=b"},
         b'--b\r\nContent-Disposition: form-data; name="f"; filename="cut"\r\n\r\nhalf of it'),
        ({"Content-Type": "multipart/form-data; boundary=b"},
         b'--b\r\nContent-Disposition: form-data; filename="\xff"\r\n\r\nx\r\n--b--\r\n'),
    ],
    ids=["no boundary", "a long one", "empty", "no form", "no part", "endless header", "no file", "cut", "no UTF-8"],
)  # fmt: skip
def test_a_broken_form_is_told_and_leaves_nothing(
    client: httpx.Client, gateway: Gateway, task: str, headers: dict[str, str], body: bytes
) -> None:
    answer = client.post(f"/{task}/files", headers=headers, content=body)

    assert answer.status_code == 400
    assert problem(answer) in ("bad-form", "bad-name")
    assert gateway_files(gateway, task) == []
    assert gateway.parts(task) == []


def test_a_digest_belongs_to_a_file_alone(client: httpx.Client, task: str) -> None:
    headers = {"Repr-Digest": repr_digest(digest(CONTENT))}
    answer = client.post(f"/{task}/files/f", headers=headers, files={"file": ("f", CONTENT)})
    assert (answer.status_code, problem(answer)) == (400, "bad-header")


def test_a_form_that_is_cut_leaves_nothing(gateway: Gateway, task: str) -> None:
    parts = urlsplit(gateway.url)
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=patient(30)) as line:
        line.sendall(
            f"POST /api/v1/results/{task}/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
            "Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 9000000\r\n\r\n"
            '--b\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n'.encode()
            + bytes(4 * MIB)
        )
        eventually(lambda: gateway.parts(task), what="the part")
    eventually(lambda: not gateway.parts(task), what="its end")
    assert gateway_files(gateway, task) == []


def test_a_large_form_takes_little_memory(gateway: Gateway, client: httpx.Client, task: str, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    with large.open("wb") as file:
        for number in range(160):
            file.write(number.to_bytes(8, "big") * (MIB // 8))
    client.post(f"/{task}/files", files={"file": ("warm-up", CONTENT)})

    with peak_growth(gateway.process.pid) as theirs, large.open("rb") as stream:
        answer = client.post(f"/{task}/files", files={"file": ("large.bin", stream)}, timeout=patient(100))

    assert answer.json()["files"][0]["bytes"] == 160 * MIB
    assert theirs() < 64 * MIB


def test_curl_sends_both_forms(gateway: Gateway, task: str, tmp_path: Path) -> None:
    program = shutil.which("curl")
    if program is None:  # the forms themselves are tested above
        return
    (tmp_path / "x.bin").write_bytes(CONTENT)
    login = f"Authorization: Bearer {TOKEN}"
    for more, address in ((["-F", "file=@x.bin"], "files"), (["--data-binary", "@x.bin"], "files/raw.bin")):
        done = subprocess.run(
            [program, "-sS", "--fail", "-H", login, *more, f"{gateway.results_url}/{task}/{address}"],
            cwd=tmp_path, capture_output=True, text=True, timeout=patient(60),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert stored(gateway, task, "x.bin") == stored(gateway, task, "raw.bin") == CONTENT


def gateway_files(gateway: Gateway, task: str) -> list[str]:
    return [name.removeprefix(f"{task}/") for name in gateway.files() if name.startswith(f"{task}/")]
