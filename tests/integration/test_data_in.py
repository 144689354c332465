"""Data of a client reaches real workers, large results come back: by a shared store, with folders of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from gpuflow import load_reference
from gpuflow.celery_app import GPUFlow
from gpuflow.cli.result import result as result_command
from gpuflow.client import submit, submit_pipeline
from gpuflow.errors import ArtifactError, InvalidTemplate, TaskFailed
from gpuflow.spec.artifact_reference import is_reference, read_reference
from tests.support.fleet import TestFleet
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import patient

#: 3 MiB of JSON.
LARGE = [{"prompt": f"question {number}", "text": "x" * 1000} for number in range(3000)]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    folder = tmp_path / "gateway"
    folder.mkdir()
    with Gateway(folder) as made:
        yield made


@pytest.fixture
def s3_endpoint() -> Iterator[str]:
    """A real HTTP server that speaks S3 (moto), with one bucket."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys)
    client.create_bucket(Bucket="fleet")
    client.close()
    yield f"http://{host}:{port}"
    server.stop()


def client_of(fleet: TestFleet, folder: Path, **settings: Any) -> GPUFlow:
    """Return the app of a client with folders of its own."""
    own = {"results_dir": folder / "results", "cache_dir": folder / "cache", **settings}
    return GPUFlow("client", settings=fleet.settings.model_copy(update=own))


def close(app: GPUFlow) -> None:
    app.backend.result_consumer.subscribed_to.clear()
    app.close()
    app.redis.close()


def inodes(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}


def test_a_file_is_sent_once_over_http_to_a_worker_with_its_own_folders(
    fleet: TestFleet, tmp_path: Path, gateway: Gateway
) -> None:
    store = {"GPUFLOW_STORE_URL": gateway.results_url, "GPUFLOW_WORKER_TOKEN": TOKEN}
    fleet.start_worker(
        "far", env={"RESULTS_DIR": str(tmp_path / "far"), "GPUFLOW_CACHE_DIR": str(tmp_path / "c"), **store}
    )
    home = tmp_path / "home"
    home.mkdir()
    (home / "rows.jsonl").write_text("".join(json.dumps({"question": f"q{n}", "answer": "a"}) + "\n" for n in range(3)))
    (home / "task.yaml").write_text(
        "apiVersion: gpuflow/v1\nspec: {taskType: echo, data: {upload: ./rows.jsonl, "
        "columns: {prompt: question, completion: answer}}}\n"
    )
    settings = fleet.settings.load(
        env={"REDIS_URL": fleet.broker.url, "RESULTS_DIR": str(home / "r"), **store}, cwd=home
    )
    app = GPUFlow("client", settings=settings)

    first = submit(home / "task.yaml", app=app)
    result = first.get(timeout=patient(60))
    uploads = inodes(gateway.root / "uploads")
    second = submit(home / "task.yaml", app=app).get(timeout=patient(60))

    assert [item["output"] for item in result["items"]] == [{"prompt": f"q{n}", "completion": "a"} for n in range(3)]
    assert second["items"] == result["items"]
    assert inodes(gateway.root / "uploads") == uploads
    assert len([name for name in uploads if name.endswith("rows.jsonl")]) == 1
    data = first.record().spec["data"]
    assert data["url"].startswith(f"{gateway.results_url}/uploads/files/{data['sha256']}/")
    assert list((tmp_path / "c").glob(f"data/{data['sha256']}/rows.jsonl"))
    assert any(
        name.startswith(f"{first.id}/attempt-1/") for name in gateway.files()
    )  # the store is the destination too
    close(app)


def test_large_data_and_large_results_travel_by_reference_through_a_pipeline(
    fleet: TestFleet, tmp_path: Path, gateway: Gateway
) -> None:
    store = {"GPUFLOW_STORE_URL": gateway.results_url, "GPUFLOW_WORKER_TOKEN": TOKEN}
    for name in ("one", "two"):
        folders = {"RESULTS_DIR": str(tmp_path / name), "GPUFLOW_CACHE_DIR": str(tmp_path / f"{name}-cache")}
        fleet.start_worker(name, "--label", f"box={name}", env={**folders, **store})
    settings = fleet.settings.load(
        env={
            "REDIS_URL": fleet.broker.url,
            "RESULTS_DIR": str(tmp_path / "mine"),
            "GPUFLOW_CACHE_DIR": str(tmp_path / "mine-cache"),
            **store,
        },
        cwd=tmp_path,
    )
    app = GPUFlow("client", settings=settings)
    stages = [
        {"name": "make", "spec": {"data": {"items": LARGE}, "resources": {"labels": {"box": "one"}}}},
        {
            "name": "use",
            "spec": {
                "data": {"items": "${make.result.items}"},
                "echo": {
                    "output": "${make.result.items[2999].input.prompt}",
                    "message": "of ${make.result.items[1].index}",
                },
                "parallel": {"enabled": True, "max_shards": 2},
                "resources": {"labels": {"box": "two"}},
            },
        },
    ]

    run = submit_pipeline({"taskType": "echo", "stages": stages}, app=app).wait(timeout=patient(90))

    made, used = run["make"].result, run["use"].result
    assert [item["input"] for item in made["items"]] == LARGE
    assert [item["input"] for item in used["items"]] == made["items"]
    assert [task.get()["output"] for task in run["use"].tasks] == ["question 2999"] * 2
    assert [task.get()["message"] for task in run["use"].tasks] == ["of 1"] * 2
    (task,) = run["make"].tasks
    kept = task.record().result
    assert is_reference(kept["items"])
    assert read_reference(kept["items"]).url.startswith(f"{gateway.results_url}/{task.id}/files/attempt-1/result/")
    plain = app.AsyncResult(task.id).get(timeout=patient(10))
    assert plain == kept
    assert load_reference(plain, app=app) == made
    assert load_reference(plain["items"], app=app) == made["items"]
    slices = [read_reference(one.record().spec["data"]["items"]).slice for one in run["use"].tasks]
    assert slices == [(0, 1500), (1500, 3000)]
    sizes = [fleet.broker.client.memory_usage(key) for key in fleet.broker.client.scan_iter("*")]
    assert max(sizes) < 400_000  # bytes: neither record, message nor result holds the data
    close(app)


def test_the_store_may_be_a_bucket(
    fleet: TestFleet, tmp_path: Path, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("AWS_ENDPOINT_URL", s3_endpoint),
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    store = "s3://fleet/data"
    fleet.start_worker("far", env={"RESULTS_DIR": str(tmp_path / "far"), "GPUFLOW_STORE_URL": store})
    app = client_of(fleet, tmp_path / "client", store_url=store)
    (tmp_path / "rows.csv").write_text("prompt\na\n")

    rows = submit({**fleet.echo(), "data": {"upload": str(tmp_path / "rows.csv")}}, app=app)
    large = submit({**fleet.echo(), "data": {"items": LARGE}}, app=app)

    assert rows.get(timeout=patient(60))["items"][0]["output"] == {"prompt": "a"}
    assert [item["output"] for item in large.get(timeout=patient(60))["items"]] == LARGE
    assert read_reference(large.record().result["items"]).url.startswith(f"{store}/{large.id}/")
    close(app)


def test_one_machine_needs_no_store(fleet: TestFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.start_worker("w1")
    table = tmp_path / "tickets.csv"
    table.write_text("subject,reply\nHelp,Here\n")

    rows = submit({**fleet.echo(), "data": {"upload": str(table)}}, app=fleet.app)
    large = submit({**fleet.echo(), "data": {"items": LARGE}}, app=fleet.app)

    assert rows.get(timeout=patient(60))["items"][0]["output"] == {"subject": "Help", "reply": "Here"}
    assert [item["output"] for item in large.get(timeout=patient(60))["items"]] == LARGE
    assert is_reference(large.record().result["items"])
    assert is_reference(large.record().spec["data"]["items"])
    assert sorted(path.name for path in (fleet.results / "uploads").glob("*/*")) == ["items.json", "tickets.csv"]
    before = inodes(fleet.results / "uploads")
    submit({**fleet.echo(), "data": {"items": LARGE}}, app=fleet.app).wait(timeout=patient(60))
    assert inodes(fleet.results / "uploads") == before


def test_a_result_that_lies_on_another_machine_says_what_to_set(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("far", env={"RESULTS_DIR": str(tmp_path / "far")})
    task = submit({**fleet.echo(output="y" * 2_000_000)}, app=fleet.app)
    assert task.wait(timeout=patient(60)).state == "SUCCEEDED"

    with pytest.raises(ArtifactError, match="GPUFLOW_STORE_URL"):
        task.get()
    assert is_reference(task.record().result["output"])


def test_a_remote_broker_without_a_store_takes_no_upload(fleet: TestFleet, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\na\n")
    app = client_of(fleet, tmp_path / "client")
    app.broker_address = lambda: "redis://broker.example:6379/0"  # type: ignore[method-assign]

    with pytest.raises(InvalidTemplate, match=r"spec\.data\.upload: cannot be sent.*GPUFLOW_STORE_URL"):
        submit({**fleet.echo(), "data": {"upload": str(tmp_path / "a.csv")}}, app=app)
    assert not (tmp_path / "client").exists()


def test_nothing_is_sent_for_a_wrong_template_nor_by_celery_nor_for_others(fleet: TestFleet, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\na\n")
    good = {**fleet.echo(), "data": {"upload": str(tmp_path / "a.csv")}}
    wrong = {**good, "timeout": "soon"}

    with pytest.raises(InvalidTemplate, match="timeout"):
        submit(wrong, app=fleet.app)
    with pytest.raises(InvalidTemplate, match="names a file of the one who submits"):
        submit(good, uploads=False, app=fleet.app)
    with pytest.raises(InvalidTemplate, match="names a file of the one who submits"):
        submit_pipeline({"taskType": "echo", "stages": [{"name": "a", "spec": good}]}, uploads=False, app=fleet.app)
    with pytest.raises(InvalidTemplate, match=r"gpuflow\.submit"):
        fleet.app.send_task("gpuflow.echo", kwargs={"spec": good})
    assert not (fleet.results / "uploads").exists()


def test_hostile_references_read_nothing_of_a_worker(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1")
    secret = tmp_path / "secret.json"
    secret.write_text('"canary-7541"')
    digest = "e" * 64
    tasks = [
        submit(
            {**fleet.echo(), "data": {"items": {"$artifact": {"url": url, "sha256": digest, "bytes": 13}}}},
            app=fleet.app,
        )
        for url in (secret.as_uri(), f"{fleet.results.as_uri()}/../secret.json")
    ]
    nested = submit(
        {
            **fleet.echo(),
            "data": {"items": [{"a": {"$artifact": {"url": secret.as_uri(), "sha256": digest, "bytes": 13}}}]},
        },
        app=fleet.app,
    )

    for task in (*tasks, nested):
        with pytest.raises(TaskFailed, match="outside of RESULTS_DIR") as caught:
            task.get(timeout=patient(60))
        assert "canary" not in str(caught.value)
    with pytest.raises(InvalidTemplate, match="must be a URL"):
        submit(
            {**fleet.echo(), "data": {"items": {"$artifact": {"url": "ftp://x/y", "sha256": digest, "bytes": 1}}}},
            app=fleet.app,
        )


@pytest.mark.ml  # A worker takes such tasks where their libraries are installed.
def test_wrong_columns_fail_before_the_model_is_looked_for(fleet: TestFleet, tmp_path: Path) -> None:
    fleet.start_worker("w1")
    (tmp_path / "t.csv").write_text("subject,reply\nHelp,Here\n")
    model = {"source": {"type": "huggingface", "identifier": "nobody/no-such-model"}}
    spec = {
        "model": model,
        "data": {"upload": str(tmp_path / "t.csv")},
        "resources": {"hardware": {"gpu": {"count": 0}}},
    }

    tasks = [submit({"taskType": kind, **spec}, app=fleet.app) for kind in ("lora_sft", "inference")]

    for task in tasks:
        record = task.wait(timeout=patient(60))
        assert (record.state, record.error["type"]) == ("FAILED", "BadInput")
        assert "subject, reply" in record.error["message"]


def test_the_command_shows_large_results(
    fleet: TestFleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.start_worker("w1")
    task = submit({**fleet.echo(), "data": {"items": LARGE}}, app=fleet.app)
    task.wait(timeout=patient(60))
    monkeypatch.setenv("REDIS_URL", fleet.broker.url)
    monkeypatch.setenv("RESULTS_DIR", str(fleet.results))

    assert result_command.callback(task.id, True) == 0

    assert len(json.loads(capsys.readouterr().out)["items"]) == 3000
