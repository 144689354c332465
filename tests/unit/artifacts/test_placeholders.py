"""`${env:NAME}` in what a worker reads itself: replaced from the task's own values, and hidden wherever it shows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuflow.artifacts.archive import pack
from gpuflow.artifacts.destination import destination_store
from gpuflow.artifacts.inputs import localize
from gpuflow.artifacts.placeholders import placeholder_secrets
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings
from gpuflow.spec.references import UnresolvedReference
from gpuflow.worker.secret_sources import redactor_of, reference_values

TOKEN = "cnry-token-of-a-store"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(results_dir=tmp_path / "results", cache_dir=tmp_path / "cache", allow_hosts=("127.0.0.1",))


class Server:
    """Serves one archive at any address, and notes what it was asked: (method, path, Authorization)."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive
        self.asked: list[tuple[str, str, str | None]] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(("GET", self.path, self.headers["Authorization"]))
                content = archive.read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_POST(self) -> None:
                asked.append(("POST", self.path, self.headers["Authorization"]))
                self.send_error(403)

            do_HEAD = do_POST

            def log_message(self, *_: Any) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    weights = tmp_path / "final_lora"
    weights.mkdir()
    (weights / "adapter.bin").write_bytes(b"weights")
    archive = tmp_path / "final_lora.tar.gz"
    pack(weights, archive)
    made = Server(archive)
    yield made
    made.close()


def test_a_destination_gets_the_token_of_its_headers(settings: Settings, server: Server, tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer ${env:STORE_TOKEN}"}
    spec = {
        "secrets": ["STORE_TOKEN"],
        "output": {"destination": {"type": "http", "url": server.url, "headers": headers}},
    }
    (tmp_path / "a").write_text("x")

    store = destination_store(spec, settings, {"STORE_TOKEN": TOKEN})
    assert store is not None
    with pytest.raises(ArtifactError) as refused:
        store.put(tmp_path / "a", "task/a")

    assert {authorization for _, _, authorization in server.asked} == {f"Bearer {TOKEN}"}
    assert TOKEN not in str(refused.value)
    assert headers == {"Authorization": "Bearer ${env:STORE_TOKEN}"}, "the spec stays as it was"


def test_checkpoint_and_adapters_are_fetched_with_their_values(settings: Settings, server: Server) -> None:
    spec = {
        "checkpoint": {
            "load": {
                "url": f"{server.url}/${{env:FOLDER}}/c.tar.gz",
                "headers": {"authorization": "Bearer ${env:PLAIN}"},
            }
        },
        "model": {"adapters": [{"type": "lora", "url": f"{server.url}/a.tar.gz?sig=${{env:SIGNATURE}}"}]},
    }
    environment = {"FOLDER": "models", "PLAIN": TOKEN, "SIGNATURE": "cnry-signature"}

    inputs = localize(spec, settings=settings, environment=environment)

    assert set(server.asked) == {
        ("GET", "/models/c.tar.gz", f"Bearer {TOKEN}"),
        ("GET", "/a.tar.gz?sig=cnry-signature", None),
    }
    assert inputs.checkpoint_path is not None
    assert (Path(inputs.checkpoint_path) / "adapter.bin").read_bytes() == b"weights"
    assert (Path(inputs.spec["model"]["adapters"][0]["path"]) / "adapter.bin").is_file()
    assert TOKEN not in str(inputs.spec), "the child puts in its own"


def test_a_reward_is_fetched_with_its_values_or_unpacked_where_it_is(settings: Settings, server: Server) -> None:
    by_url = {"type": "model", "url": f"{server.url}/r.tar.gz", "headers": {"Authorization": "Bearer ${env:PLAIN}"}}
    reward = localize({"reward_model": by_url}, settings=settings, environment={"PLAIN": TOKEN}).spec["reward_model"]

    assert server.asked == [("GET", "/r.tar.gz", f"Bearer {TOKEN}")]
    assert set(reward) == {"type", "path"}
    assert (Path(reward["path"]) / "adapter.bin").read_bytes() == b"weights"
    here = {"type": "model", "path": str(server.archive), "weight": 2}
    local = localize({"reward_model": here}, settings=settings).spec["reward_model"]
    assert local == {"type": "model", "path": reward["path"], "weight": 2}, "the same content is unpacked once"
    for kept in ({"type": "model", "path": reward["path"]}, {"type": "function", "identifier": "brevity"}):
        assert localize({"reward_model": kept}, settings=settings).spec["reward_model"] == kept


def test_what_an_earlier_stage_gave_is_never_read_as_a_name(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "${env:HOME}"
    folder.mkdir()
    spec = {"checkpoint": {"load": {"path": f"{tmp_path}/$${{env:HOME}}"}}}

    assert localize(spec, settings=settings, environment={"HOME": "/root"}).checkpoint_path == str(folder)


@pytest.mark.parametrize(
    "spec",
    [
        {"output": {"destination": {"type": "http", "url": "http://h/${env:AWAY}"}}},
        {"checkpoint": {"load": {"url": "http://127.0.0.1:1/${env:AWAY}"}}},
        {"model": {"adapters": [{"url": "http://127.0.0.1:1/${env:AWAY}"}]}},
        {"reward_model": {"url": "http://127.0.0.1:1/${env:AWAY}"}},
    ],
)
def test_a_name_without_value_is_told(spec: dict[str, Any], settings: Settings) -> None:
    def read() -> None:
        destination_store(spec, settings, {})
        localize(spec, settings=settings, environment={})

    with pytest.raises(
        UnresolvedReference, match=r"AWAY is not set for this task; add it to spec\.env or spec\.secrets"
    ):
        read()


@pytest.mark.parametrize("field", ["url", "path"])
def test_the_address_of_results_holds_no_secret(settings: Settings, field: str) -> None:
    given = {"type": "s3", field: "s3://bucket/${env:PART}"}

    with pytest.raises(ArtifactError, match=f"destination.{field} holds the secret PART"):
        destination_store({"secrets": ["PART"], "output": {"destination": given}}, settings, {"PART": "x"})


def test_other_headers_are_refused_rather_than_left_out(settings: Settings) -> None:
    load = {"url": "http://127.0.0.1:1/x", "headers": {"X-Key": "${env:KEY}"}}

    with pytest.raises(ArtifactError, match=r"checkpoint.load.headers.X-Key is not sent") as refused:
        localize({"checkpoint": {"load": load}}, settings=settings, environment={"KEY": TOKEN})
    assert TOKEN not in str(refused.value)


def test_an_error_does_not_show_what_was_put_in(settings: Settings) -> None:
    spec = {"secrets": ["PART"], "checkpoint": {"load": {"path": "/nowhere/${env:PART}/x"}}}

    with pytest.raises(ArtifactError) as refused:
        localize(spec, settings=settings, environment={"PART": TOKEN})
    assert str(refused.value).startswith("/nowhere/***/x is not on this machine")


@pytest.mark.parametrize(
    ("places", "hidden"),
    [
        ({"output": {"destination": {"headers": {"Authorization": "Bearer ${env:A}"}}}}, {"value-a"}),
        ({"checkpoint": {"load": {"url": "https://u:${env:A}@h/${env:B}?sig=${env:C}"}}}, {"value-a", "value-c"}),
        ({"model": {"adapters": [{"url": "https://h/${env:A}"}, {"url": "https://h/${env:HUB_TOKEN}"}]}}, {"value-t"}),
        ({"reward_model": {"url": "https://h/${env:B}", "headers": {"Authorization": "Bearer ${env:A}"}}}, {"value-a"}),
        ({"secrets": ["A"], "model": {"adapters": [{"path": "/x/${env:A}"}]}}, {"value-a"}),
        ({"model": {"adapters": [{"path": "/x/${env:GONE}"}]}, "output": {"destination": None}}, set()),
    ],
)
def test_what_is_hidden(places: dict[str, Any], hidden: set[str]) -> None:
    environment = {"A": "value-a", "B": "value-b", "C": "value-c", "HUB_TOKEN": "value-t"}

    assert set(placeholder_secrets(places, environment)) == hidden


def test_the_values_are_those_of_the_child_and_all_of_them_are_hidden(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_PART": "cnry-part", "NOT_ALLOWED": "x", "GPUFLOW_WORKER_TOKEN": "x"}.items():
        monkeypatch.setenv(name, value)
    spec = {
        "env": {"JOINED": "${env:HF_PART}/${env:STORE}", "LACKS": "${env:NOT_ALLOWED}", "PLAIN": "p"},
        "secrets": ["STORE"],
        "checkpoint": {"load": {"url": "https://h/x?key=${env:JOINED}"}},
    }

    values = reference_values(spec, {"STORE": TOKEN}, settings)

    assert (values["JOINED"], values["PLAIN"], values["STORE"]) == (f"cnry-part/{TOKEN}", "p", TOKEN)
    assert not {"NOT_ALLOWED", "LACKS", "GPUFLOW_WORKER_TOKEN"} & set(values)
    told = redactor_of([spec], {"STORE": TOKEN}, {}, settings).text(f"a {TOKEN} b cnry-part/{TOKEN}")
    assert told == "a *** b ***"
    assert os.environ["HF_PART"] == "cnry-part"
