"""Stages on machines that share no disk: results go to a store, and the next stage fetches them from there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from gpuflow.client import PipelineRun, submit, submit_pipeline
from tests.support.fleet import TestFleet
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import eventually, patient


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
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="models")
    client.close()
    yield url
    server.stop()


def start_machines(fleet: TestFleet, tmp_path: Path, **env: str) -> dict[str, Path]:
    """Start two workers with folders of their own, both at once; return each one's folder."""
    folders = {name: tmp_path / name for name in ("one", "two")}
    workers = [
        fleet.spawn_worker(
            name,
            "--label",
            f"box={name}",
            env={"RESULTS_DIR": str(folder / "results"), "GPUFLOW_CACHE_DIR": str(folder / "cache"), **env},
        )
        for name, folder in folders.items()
    ]
    for worker in workers:
        worker.ready()
    return folders


def two_stages(destination: dict[str, Any]) -> dict[str, Any]:
    train = {
        "echo": {"artifact": "final_model/weights.bin", "artifact_bytes": 3_000_000},
        "resources": {"labels": {"box": "one"}},
    }
    use = {
        "echo": {"output": "${train.result.final_model_archive_url}"},
        "checkpoint": {"load": {"type": "http", "url": "${train.result.final_model_archive_url}"}},
        "resources": {"labels": {"box": "two"}},
    }
    stages = [{"name": "train", "spec": train}, {"name": "use", "dependsOn": ["train"], "spec": use}]
    spec = {"taskType": "echo", "output": {"destination": destination}, "graph": {"nodes": stages}}
    return {"apiVersion": "gpuflow/v1", "kind": "Pipeline", "metadata": {"name": "staged"}, "spec": spec}


def check_handed_on(run: PipelineRun, folders: dict[str, Path]) -> str:
    """Assert that the second machine has the model of the first, from a URL; return the URL."""
    first = run["train"].result
    weights = Path(first["result_dir"]) / "final_model" / "weights.bin"
    assert folders["one"] in weights.parents
    (fetched,) = folders["two"].glob("cache/checkpoints/*/**/weights.bin")
    assert fetched.read_bytes() == weights.read_bytes()
    url = str(run["use"].result["output"])
    assert url == first["final_model_archive_url"]
    return url


def test_results_are_handed_on_over_http(fleet: TestFleet, tmp_path: Path, gateway: Gateway) -> None:
    folders = start_machines(fleet, tmp_path, GPUFLOW_WORKER_TOKEN=TOKEN, GPUFLOW_GATEWAY_URL=gateway.url)

    run = submit_pipeline(two_stages({"type": "http", "url": gateway.results_url}), app=fleet.app).wait(
        timeout=patient(60)
    )

    url = check_handed_on(run, folders)
    assert url.startswith(gateway.results_url)
    (task,) = run.record().stages["train"].tasks
    kept = {path.name for path in gateway.root.rglob("*") if path.is_file()}
    assert {"manifest.json", "responses.json", "final_model.tar.gz", "weights.bin"} <= kept
    manifest = next(path for path in gateway.root.rglob("manifest.json") if task in str(path))
    assert json.loads(manifest.read_text())["artifacts"]


def test_results_are_handed_on_by_a_shared_folder(fleet: TestFleet, tmp_path: Path) -> None:
    folders = start_machines(fleet, tmp_path)
    shared = tmp_path / "shared"

    run = submit_pipeline(two_stages({"type": "local", "path": str(shared)}), app=fleet.app).wait(timeout=patient(60))

    assert check_handed_on(run, folders).startswith(shared.as_uri())


def test_results_are_handed_on_by_s3(fleet: TestFleet, tmp_path: Path, s3_endpoint: str) -> None:
    credentials = {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    folders = start_machines(fleet, tmp_path, **credentials)
    run = submit_pipeline(two_stages({"type": "s3", "url": "s3://models/runs"}), app=fleet.app).wait(
        timeout=patient(60)
    )

    assert check_handed_on(run, folders).startswith("s3://models/runs/")


def test_a_service_of_others_gets_the_token_that_the_task_names(
    fleet: TestFleet, tmp_path: Path, gateway: Gateway
) -> None:
    folders = start_machines(fleet, tmp_path, OTHER_TOKEN=TOKEN)
    headers = {"Authorization": "Bearer ${env:OTHER_TOKEN}"}
    pipeline = two_stages({"type": "http", "url": gateway.results_url, "headers": headers})
    pipeline["spec"]["secrets"] = ["OTHER_TOKEN"]
    pipeline["spec"]["graph"]["nodes"][1]["spec"]["checkpoint"]["load"]["headers"] = headers

    run = submit_pipeline(pipeline, app=fleet.app).wait(timeout=patient(60))

    check_handed_on(run, folders)
    for name, stage in run.record().stages.items():
        for task in stage.tasks:
            record = fleet.app.redis.hgetall(f"task:{task}")
            assert "OTHER_TOKEN" in str(record) and TOKEN not in str(record), name


def test_an_upload_that_fails_fails_the_attempt(fleet: TestFleet, tmp_path: Path, gateway: Gateway) -> None:
    fleet.start_worker(
        "w1", env={"GPUFLOW_WORKER_TOKEN": "another-token-0123456789", "GPUFLOW_GATEWAY_URL": gateway.url}
    )
    output = {"destination": {"type": "http", "url": gateway.results_url}}

    task = submit({**fleet.echo(output=1), "output": output, "retry": {"max_attempts": 1}}, app=fleet.app)

    record = task.wait(timeout=patient(60))
    assert (record.state, record.error["type"]) == ("DEAD", "UploadFailed")
    assert record.manifest is None
    assert "another-token" not in json.dumps(record.error)
    assert not any(path.is_file() for path in gateway.root.rglob("manifest.json"))
    fine = submit(fleet.echo(output=2), app=fleet.app)
    assert eventually(lambda: fine.state == "SUCCEEDED")
