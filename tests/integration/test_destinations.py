"""Where results go: called back once they are committed, and kept here where a foreign template names no place."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuflow.client import submit
from gpuflow.errors import TaskFailed
from gpuflow.ledger.backend import CALL_BACK_TASK
from gpuflow.routing.families import CALL_BACK_QUEUE
from tests.gate import leftovers
from tests.support.fleet import TestFleet
from tests.support.gateway import TOKEN, Gateway
from tests.support.waiting import eventually, patient

KEY = "a-key-of-the-receiver"


class Receiver:
    """A real HTTP server that keeps what is sent to it: method, path, headers and the bytes; the first is refused."""

    def __init__(self) -> None:
        self.refused: list[dict[str, str]] = []
        self.calls: list[tuple[str, dict[str, str], bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _take(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if not outer.refused:
                    outer.refused.append(dict(self.headers))
                    self.send_response(503)
                else:
                    outer.calls.append((self.command, dict(self.headers), content))
                    self.send_response(204)
                self.end_headers()

            do_POST = do_PUT = _take

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def flowmesh(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "flowmesh/v1", "metadata": {"name": "theirs"}, "spec": spec}


def test_a_result_is_called_back_signed_and_a_refused_call_comes_again(fleet: TestFleet, receiver: Receiver) -> None:
    secrets = fleet.folder / "worker-secrets"
    secrets.mkdir()
    (secrets / "CALLBACK_KEY").write_text(KEY)
    (secrets / "CALLBACK_KEY").chmod(0o600)
    fleet.start_worker("w1", env={"GPUFLOW_SECRETS_DIR": str(secrets)})
    destination = {
        "type": "callback",
        "url": f"{receiver.url}/hook",
        "method": "PUT",
        "headers": {"X-Team": "nlp"},
        "secret": "${env:CALLBACK_KEY}",
    }
    task = submit(
        {**fleet.echo(output={"answer": 42}), "secrets": ["CALLBACK_KEY"], "output": {"destination": destination}},
        app=fleet.app,
    )
    failed = submit(
        {**fleet.echo(fail={"message": "no"}), "output": {"destination": {**destination, "secret": None}}},
        app=fleet.app,
    )

    assert task.get(timeout=patient(30))["answer"] == 42
    with pytest.raises(TaskFailed):
        failed.get(timeout=patient(30))
    method, headers, content = eventually(lambda: receiver.calls, within=60, what="the callback")[0]

    told = json.loads(content)
    assert (method, headers["X-Team"]) == ("PUT", "nlp")
    assert (told["task_id"], told["state"], told["result"]["answer"]) == (task.id, "SUCCEEDED", 42)
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + content
    digest = base64.b64encode(hmac.new(KEY.encode(), signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"
    assert receiver.refused[0]["Idempotency-Key"] == headers["Idempotency-Key"]
    assert len(receiver.calls) == 1, "a task that failed has no result to send"


def test_a_foreign_url_is_called_back_and_without_a_store_nothing_else_goes_away(
    fleet: TestFleet, receiver: Receiver
) -> None:
    receiver.refused.append({})
    fleet.start_worker("w1")
    headers = {"Content-Type": "application/json", "X-Kind": "theirs"}
    there = {"type": "http", "url": f"{receiver.url}/api/v1/results", "headers": headers, "timeoutSec": 10}
    artifacts = ["results.json", "logs", "plot.png"]
    task = submit(
        flowmesh({**fleet.echo(output=1), "output": {"destination": there, "artifacts": artifacts}}), app=fleet.app
    )
    nowhere = submit(flowmesh({**fleet.echo(output=1), "output": {"destination": {"type": "http"}}}), app=fleet.app)

    closed = {"type": "callback", "url": "http://127.0.0.1:9/key-of-a-hook", "retries": 0}
    unheard = submit({**fleet.echo(output=1), "output": {"destination": closed}}, app=fleet.app)

    result = task.get(timeout=patient(30))
    with pytest.raises(TaskFailed, match="GPUFLOW_STORE_URL"):
        nowhere.get(timeout=patient(30))
    (_, sent, content) = eventually(lambda: receiver.calls, within=30, what="the callback")[0]

    assert sent["X-Kind"] == "theirs"
    assert json.loads(content)["task_id"] == task.id
    assert result["missing_artifacts"] == ["plot.png"]
    told = eventually(
        lambda: [one for one in fleet.app.event_log.read(unheard.id) if "not delivered" in str(one.data)],
        within=30,
        what="the event of a callback that nobody has heard",
    )
    assert "key-of-a-hook" not in str(told)
    home = Path(result["result_dir"])
    assert (home / "results.json").read_bytes() == (home / "responses.json").read_bytes()


def test_a_callback_to_the_fleets_service_is_told_where_the_worker_has_stored_nothing(fleet: TestFleet) -> None:
    folder = fleet.folder / "gateway"
    folder.mkdir()
    with Gateway(folder) as gateway:
        destination = {"type": "callback", "url": f"{gateway.url}/api/v1/results", "retries": 0}
        spec = {**fleet.echo(output=1), "output": {"destination": destination}}

        def told(task_id: str, words: str) -> list[Any]:
            return [one for one in fleet.app.event_log.read(task_id) if words in str(one.data)]

        # A worker that does not know the URL as the fleet's runs the task; one that does takes the notice.
        strange = fleet.start_worker("w1")
        unstored = submit(spec, app=fleet.app)
        assert "manifest_url" not in unstored.get(timeout=patient(30))
        eventually(lambda: told(unstored.id, "the log of worker"), within=30, what="the call that the service refuses")
        strange.stop()
        fleet.start_worker("w2", env={"GPUFLOW_GATEWAY_URL": gateway.url, "GPUFLOW_WORKER_TOKEN": TOKEN})
        stored = submit(spec, app=fleet.app)
        result = stored.get(timeout=patient(30))
        fleet.app.send_task(CALL_BACK_TASK, args=(unstored.id, 0), queue=CALL_BACK_QUEUE, ignore_result=True)

        eventually(lambda: told(unstored.id, "give worker w1"), within=30, what="the event of what was not stored")
        assert result["manifest_url"].endswith(f"/{stored.id}/files/attempt-1/manifest.json")
        assert (gateway.root / stored.id / "attempt-1" / "manifest.json").is_file()
        assert told(stored.id, "notify[0]") == []


def test_run_keeps_results_here_and_says_so(tmp_path: Path) -> None:
    spec = {
        "taskType": "echo",
        "data": {"type": "list", "items": ["a"]},
        "output": {"destination": {"type": "http", "timeoutSec": 1800}, "artifacts": ["results.json", "plot.png"]},
    }
    (tmp_path / "theirs.json").write_text(json.dumps(flowmesh(spec)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUFLOW_", "REDIS_"))}
    environment = {**kept, **leftovers.passed_on(), "GPUFLOW_STATE_DIR": str(tmp_path / "state")}

    def gpuflow(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from gpuflow.cli import main; main()", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(120), check=False
        )

    done = gpuflow("run", "theirs.json")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "their http destination names no url" in done.stderr
    assert "missing: plot.png" in done.stdout
    # The worker of that run is gone: a template is compared with this machine.
    explained = gpuflow("explain", "theirs.json")
    # Nobody else will come to a cluster of one command: what its worker cannot serve ends it.
    (tmp_path / "far.json").write_text(json.dumps(flowmesh({**spec, "resources": {"accelerators": "H100:8"}})))
    refused = gpuflow("run", "far.json")
    assert refused.returncode == 1
    assert "no live worker can run" in refused.stderr
    assert explained.returncode == 0, explained.stdout + explained.stderr
    assert "this machine" in explained.stdout
