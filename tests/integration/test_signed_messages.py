"""Who may write to the broker and has no key makes no worker run anything, and kills nobody's task by forging."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery.result import AsyncResult
from kombu.utils.json import dumps

from gpuflow.broker.merged_calls import control_message
from gpuflow.broker.signed_messages import SIGNATURE_HEADER, with_signature
from gpuflow.bulk import retry_many
from gpuflow.celery_app import GPUFlow
from gpuflow.client import submit, submit_pipeline
from gpuflow.errors import TaskFailed
from gpuflow.tokens import service_users
from gpuflow.tokens.service_users import ServiceRole
from tests.fixtures.fleets import OPTIONS
from tests.support.broker_life import worker_environment
from tests.support.fleet import TestFleet, WorkerProcess
from tests.support.signing import (
    Message,
    body,
    body_of,
    dead,
    forged,
    key_file,
    push,
    refused,
    signature_of,
    signing_env,
    waiting,
    with_headers,
    with_new_tag,
)
from tests.support.waiting import eventually, patient

PREFIX = "t1:"
NOBODY = {"resources": {"labels": {"nobody": ""}}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    folder = tmp_path_factory.mktemp("signed")
    env = {**worker_environment(folder), **signing_env(key_file(folder))}
    made = TestFleet(folder, env, options=OPTIONS)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def worker(fleet: TestFleet) -> WorkerProcess:
    started = fleet.start_worker("w1", "--include", "plain_tasks")
    submit(fleet.echo(output=0), app=fleet.app).get(timeout=patient(30))
    return started


@pytest.fixture(scope="module")
def evil(fleet: TestFleet) -> Iterator[Any]:
    """Somebody who holds a client's login, and no key."""
    login, given = service_users.new_login(
        ServiceRole.CLIENT, "evil", address=fleet.broker.url, prefix=PREFIX, database=0, queues=["tasks"]
    )
    made = service_users.create(fleet.app.redis, login, given, prefix=PREFIX, replace=False, only_fleet=False)
    with redis.Redis.from_url(made.url, decode_responses=True) as client:
        yield client


def marks(folder: Path, task_id: str) -> int:
    path = folder / task_id
    return path.stat().st_size if path.exists() else 0


def of_queue(fleet: TestFleet, task: Any) -> tuple[str, Message, str]:
    """Return the list, the message and the text of a task that waits."""
    raw, key = fleet.app.redis.hmget(fleet.app.keys.task(task.id), "message", "list")
    return key, json.loads(raw), raw


def is_used(fleet: TestFleet, message: Message) -> bool:
    return bool(fleet.app.redis.exists(fleet.app.keys.used(signature_of(message).rsplit(".", 1)[1][:32])))


def whys(fleet: TestFleet, tag: str) -> list[str]:
    """Return why messages with a tag were put aside."""
    return [entry["why"] for entry in dead(fleet) if tag in entry["message"]]


def plain(fleet: TestFleet, name: str, *args: Any, **options: Any) -> Any:
    return fleet.app.send_task(name, args=args, **options)


def test_a_forged_plain_task_does_not_run(fleet: TestFleet, worker: WorkerProcess, evil: Any, tmp_path: Path) -> None:
    message = forged("plain_tasks.mark", body(str(tmp_path)))
    push(evil, f"{PREFIX}tasks", message)
    assert "is not signed" in refused(fleet, message)
    assert not list(tmp_path.iterdir())


def test_a_forged_executor_task_does_not_run(
    fleet: TestFleet, worker: WorkerProcess, evil: Any, tmp_path: Path
) -> None:
    proof = tmp_path / "proof"
    spec = {"taskType": "command", "command": {"command": f"touch {proof}"}}
    message = forged("gpuflow.command", body(spec=spec), queue="cpu")
    push(evil, f"{PREFIX}cpu", message)
    assert "is not signed" in refused(fleet, message)
    assert not proof.exists()


@pytest.mark.parametrize("what", ["spec", "env", "task", "owner", "queues", "hints", "chain", "limit"])
def test_a_true_message_that_was_changed_does_not_run_and_its_task_waits_on(
    fleet: TestFleet, worker: WorkerProcess, evil: Any, what: str
) -> None:
    task = submit(fleet.echo(output=1) | NOBODY, app=fleet.app)
    _, true, _ = of_queue(fleet, task)
    args, kwargs, embed = body_of(true)
    spec = kwargs["spec"]
    link = {"task": "plain_tasks.add", "args": [1, 2], "kwargs": {}, "options": {}, "subtask_type": None}
    changed = {
        "spec": {**true, "body": body(*args, embed=embed, spec={**spec, "echo": {"output": 2}})},
        "env": {**true, "body": body(*args, embed=embed, spec={**spec, "env": {"LD_PRELOAD": "/tmp/evil.so"}})},
        "task": with_headers(true, task="gpuflow.command"),
        "owner": with_headers(true, gpuflow_owner="root"),
        "queues": with_headers(true, gpuflow_queues=["cpu"]),
        "hints": {**true, "s": "inference:x"},
        "chain": {**true, "body": body(*args, embed={**embed, "chain": [link]}, **kwargs)},
        "limit": with_headers(true, timelimit=[1, 1]),
    }[what]
    changed = with_new_tag(changed)
    push(evil, f"{PREFIX}cpu", changed)
    assert "does not fit it" in refused(fleet, changed)
    assert fleet.state(task.id) == "QUEUED"  # the forged message killed nothing
    task.cancel()


def test_a_true_message_in_another_queue_does_not_run(fleet: TestFleet, worker: WorkerProcess, evil: Any) -> None:
    task = submit(fleet.echo(output=1) | NOBODY, app=fleet.app)
    _, true, raw = of_queue(fleet, task)
    tag = true["properties"]["delivery_tag"]
    for count, queue in enumerate(("cpu", "tasks", "gpuflow.control"), 1):
        push(evil, f"{PREFIX}{queue}", raw)  # byte for byte
        eventually(lambda count=count: len(whys(fleet, tag)) == count, what="it put aside")
    assert all("for other queues" in why for why in whys(fleet, tag))
    assert fleet.state(task.id) == "QUEUED"
    task.cancel()


def test_a_signature_of_another_message_fits_none(
    fleet: TestFleet, worker: WorkerProcess, evil: Any, tmp_path: Path
) -> None:
    queue = f"{PREFIX}gpuflow.nobody"
    plain(fleet, "plain_tasks.add", 1, 2, queue="gpuflow.nobody")
    (true,) = waiting(fleet.app.redis, queue)
    stolen = forged("plain_tasks.mark", body(str(tmp_path)))
    stolen = with_headers(stolen, **{name: true["headers"][name] for name in (SIGNATURE_HEADER, "gpuflow_queues")})
    push(evil, f"{PREFIX}tasks", stolen)
    assert "does not fit it" in refused(fleet, stolen)
    under_another_id = with_new_tag(with_headers(true, id="00000000-0000-4000-8000-000000000000"))
    push(evil, f"{PREFIX}tasks", under_another_id)
    assert "does not fit it" in refused(fleet, under_another_id)
    fleet.app.redis.delete(queue)


@pytest.mark.parametrize("cut", [0, 1, 20, 64, 100])
def test_a_truncated_signature_is_none(
    fleet: TestFleet, worker: WorkerProcess, evil: Any, cut: int, tmp_path: Path
) -> None:
    queue = f"{PREFIX}gpuflow.nobody"
    plain(fleet, "plain_tasks.mark", str(tmp_path), queue="gpuflow.nobody")
    (true,) = waiting(fleet.app.redis, queue)
    fleet.app.redis.delete(queue)
    message = with_new_tag(with_headers(true, **{SIGNATURE_HEADER: signature_of(true)[:cut]}))
    push(evil, f"{PREFIX}tasks", message)
    assert re.search("not signed|another form|does not fit", refused(fleet, message))
    assert not list(tmp_path.iterdir())


def test_a_plain_task_runs_once_however_often_its_message_is_written(
    fleet: TestFleet, worker: WorkerProcess, evil: Any, tmp_path: Path
) -> None:
    """Captured before it ran, and written again after: with its own tag, and with another."""
    sent = plain(fleet, "plain_tasks.mark", str(tmp_path), queue="tasks", countdown=3600)
    parked = next(text for text in fleet.app.redis.hvals(fleet.app.keys.parked) if sent.id in text)
    raw = parked.split("\n", 2)[2]
    push(evil, f"{PREFIX}tasks", raw)
    eventually(lambda: marks(tmp_path, sent.id) == 1, what="the task")
    assert AsyncResult(sent.id, app=fleet.app).get(timeout=patient(10)) is None
    tag = json.loads(raw)["properties"]["delivery_tag"]
    eventually(lambda: not fleet.app.redis.hexists(fleet.app.keys.unacked, tag), what="its acknowledgement")
    push(evil, f"{PREFIX}tasks", raw)
    assert "was acknowledged before" in refused(fleet, raw)
    again = with_new_tag(json.loads(raw))
    push(evil, f"{PREFIX}tasks", again)
    assert "does not fit" in refused(fleet, again)
    assert marks(tmp_path, sent.id) == 1


def test_a_finished_task_does_not_run_again_even_with_a_record_that_says_it_waits(
    fleet: TestFleet, worker: WorkerProcess, evil: Any, tmp_path: Path
) -> None:
    path = tmp_path / "runs"
    spec = {"taskType": "command", "command": f"echo x >> {path}"}
    task = submit(spec, app=fleet.app)
    task.get(timeout=patient(30))
    record, (key, true, raw) = fleet.app.keys.task(task.id), of_queue(fleet, task)
    eventually(lambda: is_used(fleet, true), what="the message acknowledged")
    evil.hset(record, mapping={"state": "QUEUED", "attempt": "0"})
    evil.hdel(record, "finished_at", "result")
    copy = with_new_tag(true)
    push(evil, key, copy)
    assert "does not fit" in refused(fleet, copy)
    push(evil, key, raw)  # the record holds it, so its task ends
    eventually(lambda: fleet.state(task.id) == "FAILED", what="the end of the task")
    assert path.read_text() == "x\n"


def test_a_finished_task_that_retention_has_removed_does_not_run_again(
    fleet: TestFleet, worker: WorkerProcess, evil: Any
) -> None:
    task = submit(fleet.echo(output=1), app=fleet.app)
    task.get(timeout=patient(30))
    key, true, raw = of_queue(fleet, task)
    eventually(lambda: is_used(fleet, true), what="the message acknowledged")
    fleet.app.redis.delete(fleet.app.keys.task(task.id))
    push(evil, key, raw)
    assert "was acknowledged before" in refused(fleet, raw)
    assert fleet.state(task.id) == "UNKNOWN"


def test_a_copy_of_a_failed_task_leaves_what_celery_was_told(
    fleet: TestFleet, worker: WorkerProcess, evil: Any
) -> None:
    task = submit({"taskType": "command", "command": {"command": "exit 3"}}, app=fleet.app)
    with pytest.raises(TaskFailed):
        task.get(timeout=patient(30))
    key, true, raw = of_queue(fleet, task)
    eventually(lambda: is_used(fleet, true), what="the message acknowledged")
    told = fleet.app.redis.get(fleet.app.keys.celery_result(task.id))
    push(evil, key, raw)
    assert "was acknowledged before" in refused(fleet, raw)
    assert fleet.app.redis.get(fleet.app.keys.celery_result(task.id)) == told


def test_what_has_ended_is_not_begun_anew_as_a_caller_whose_run_is_gone(
    fleet: TestFleet, worker: WorkerProcess, evil: Any, tmp_path: Path
) -> None:
    """Whoever releases a caller signs its message anew, which nobody has asked for."""
    path = tmp_path / "runs"
    plain_task = submit({"taskType": "command", "command": f"echo x >> {path}"}, app=fleet.app)
    merged = submit({**fleet.echo(output="said once"), "merge": "always"}, app=fleet.app)
    for task in (plain_task, merged):
        task.get(timeout=patient(30))
        record, true = fleet.app.keys.task(task.id), of_queue(fleet, task)[1]
        eventually(lambda true=true: is_used(fleet, true), what="its signature is used")
        evil.hset(record, mapping={"state": "MERGED", "run": "gone", "call": "c", "attempt": "0"})
        evil.hdel(record, "finished_at", "result")

        assert fleet.app.merger.release(task.id)

        eventually(lambda task=task: fleet.state(task.id) == "FAILED", what="the end of the task")
        assert fleet.app.ledger.get(task.id).attempt == 0
    assert path.read_text() == "x\n"


def test_a_caller_whose_run_is_gone_runs_by_itself_once(fleet: TestFleet, worker: WorkerProcess, evil: Any) -> None:
    task = submit({**fleet.echo(output="by itself"), "merge": "always", **NOBODY}, app=fleet.app)
    record, true = fleet.app.ledger.get(task.id), of_queue(fleet, task)[1]
    assert record.run is not None
    fleet.app.redis.delete(fleet.app.keys.task(record.run))
    assert fleet.app.merger.release(task.id)
    assert is_used(fleet, true)
    assert not is_used(fleet, of_queue(fleet, task)[1])
    allowed = fleet.start_worker("w3", "--label", "nobody=")
    assert task.get(timeout=patient(30))["output"] == "by itself"
    assert allowed.stop() == 0


def test_the_message_of_a_caller_that_comes_for_an_end_begins_nothing(
    fleet: TestFleet, worker: WorkerProcess, evil: Any
) -> None:
    spec = {**fleet.echo(output="for two"), "merge": "always", "resultTtlSeconds": 600}
    submit(spec, app=fleet.app).get(timeout=patient(30))
    second = submit(spec, app=fleet.app)
    assert second.get(timeout=patient(30))["output"] == "for two"
    record, true = fleet.app.keys.task(second.id), of_queue(fleet, second)[1]
    fetch = with_signature(fleet.app.signer, control_message(true, "gpuflow.control"), ["gpuflow.control"])
    evil.hset(record, mapping={"state": "QUEUED", "queue": "gpuflow.control", "attempt": "0"})
    evil.hdel(record, "finished_at", "result", "run")
    push(evil, f"{PREFIX}gpuflow.control", json.loads(dumps(fetch)))
    eventually(lambda: is_used(fleet, fetch), what="the message acknowledged")
    assert fleet.app.ledger.get(second.id).attempt == 0


def test_a_forged_copy_with_the_tag_of_a_task_that_runs_does_not_disturb_it(
    fleet: TestFleet, worker: WorkerProcess, evil: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    task = submit(fleet.echo(output=1, until_exists=str(go)), app=fleet.app)
    eventually(lambda: fleet.state(task.id) == "RUNNING", what="the task at work")
    _, true, raw = of_queue(fleet, task)
    before, plain_queue = len(dead(fleet)), f"{PREFIX}tasks"  # its own queue is not looked at while its worker is full
    push(evil, plain_queue, raw)
    push(evil, plain_queue, with_headers(true, **{SIGNATURE_HEADER: "1.x"}))
    push(evil, plain_queue, b'{"headers": {"id": "' + task.id.encode() + b'"}, "x": "\xff"}')
    try:
        eventually(lambda: len(dead(fleet)) == before + 3, what="three messages put aside")
        assert fleet.state(task.id) == "RUNNING"
    finally:
        go.touch()
    task.get(timeout=patient(30))
    record = fleet.app.ledger.get(task.id)
    assert (record.attempt, record.losses) == (1, 0)


def test_a_changed_pipeline_publishes_no_further_stage(
    fleet: TestFleet, worker: WorkerProcess, evil: Any, tmp_path: Path
) -> None:
    go, proof = tmp_path / "go", tmp_path / "proof"
    wait = fleet.echo(output=1, until_exists=str(go))
    run = submit_pipeline(
        {"stages": [{"name": "one", "spec": wait}, {"name": "two", "spec": fleet.echo(output=1)}]},
        app=fleet.app,
    )
    eventually(lambda: fleet.app.pipelines.get(run.id).stage("one").tasks, what="the first stage")
    key = fleet.app.keys.pipeline(run.id)
    template = json.loads(evil.hget(key, "template"))
    template["stages"][1]["spec"] = {"taskType": "command", "command": {"command": f"touch {proof}"}}
    evil.hset(key, "template", json.dumps(template))
    go.touch()
    eventually(lambda: fleet.app.pipelines.get(run.id).state.final, what="the end of the pipeline")
    ended = fleet.app.pipelines.get(run.id)
    assert (str(ended.state), (ended.error or {})["type"]) == ("FAILED", "SignatureRefused")
    assert "two" not in ended.stages
    assert not proof.exists()
    (first,) = ended.stage("one").tasks
    eventually(
        lambda: fleet.app.ledger.get(first).state.final, what="the end of its task, which reads a file of this test"
    )


def test_a_forged_pipeline_and_one_that_has_ended_begin_nothing(
    fleet: TestFleet, worker: WorkerProcess, evil: Any
) -> None:
    stages = [{"name": "one", "spec": fleet.echo(output=1)}]
    run = submit_pipeline({"stages": stages}, app=fleet.app)
    run.wait(timeout=patient(30))
    key = fleet.app.keys.pipeline(run.id)
    evil.hset(key, mapping={"state": "RUNNING"})
    evil.hdel(fleet.app.keys.stages(run.id), "one")
    fleet.app.send_task("gpuflow.pipelines.settle", args=(run.id,), queue="gpuflow.control")
    eventually(lambda: str(fleet.app.pipelines.get(run.id).state) == "FAILED", what="the end of the replay")
    assert "has ended before" in str((fleet.app.pipelines.get(run.id).error or {})["message"])
    made = "11111111-1111-4111-8111-111111111111"
    other = fleet.app.keys.pipeline(made)
    evil.hset(other, mapping={**evil.hgetall(key), "id": made, "state": "RUNNING"})
    fleet.app.pipeline_controller.reconcile(made)
    record = fleet.app.pipelines.get(made)
    assert (str(record.state), (record.error or {})["type"]) == ("FAILED", "SignatureRefused")
    assert "does not fit" in str((record.error or {})["message"])


def test_what_a_client_without_a_key_submits_ends_with_the_cause(fleet: TestFleet, worker: WorkerProcess) -> None:
    unsigned = GPUFlow("unsigned", settings=fleet.settings.model_copy(update={"signing": "off"}))
    try:
        with pytest.raises(TaskFailed, match="the message is not signed; submit with GPUFLOW_SIGNING_KEY_FILE"):
            submit(fleet.echo(output=1), app=unsigned).get(timeout=patient(30))
        run = submit_pipeline({"stages": [{"name": "one", "spec": fleet.echo(output=1)}]}, app=unsigned)
        eventually(lambda: fleet.app.pipelines.get(run.id).state.final, what="the end of the pipeline")
        assert "is not signed" in str((fleet.app.pipelines.get(run.id).error or {})["message"])
        true = submit_pipeline({"stages": [{"name": "one", "spec": fleet.echo(output=1) | NOBODY}]}, app=fleet.app)
        unsigned.send_task("gpuflow.pipelines.settle", args=(true.id,), queue="gpuflow.control")
        assert submit(fleet.echo(output=2), app=fleet.app).get(timeout=patient(30))["output"] == 2
        assert str(fleet.app.pipelines.get(true.id).state) == "RUNNING"  # nobody else's is ended by that
        true.cancel()
        assert all(isinstance(entry["why"], str) for entry in fleet.app.ledger.unreadable(100))
    finally:
        unsigned.close()
        unsigned.redis.close()


def test_a_forged_call_of_a_merged_run_is_not_executed(fleet: TestFleet, worker: WorkerProcess, evil: Any) -> None:
    """A run executes the specs of its calls, which stand in Redis beside its message."""
    task = submit({**fleet.echo(output="true"), "merge": "always", **NOBODY}, app=fleet.app)
    run = fleet.app.ledger.get(task.id).run
    assert run is not None
    calls = fleet.app.keys.merge_calls(run)
    ((digest, text),) = evil.hgetall(calls).items()
    assert fleet.app.merger.store.calls(run)[digest].refused is None
    spec = {**json.loads(text), "echo": {"output": "forged"}}
    evil.hset(calls, digest, json.dumps(spec))
    refused = fleet.app.merger.store.calls(run)[digest].refused
    assert refused is not None
    assert refused.reason == "forged"
    allowed = fleet.start_worker("w2", "--label", "nobody=")
    with pytest.raises(TaskFailed, match="does not fit"):
        task.get(timeout=patient(60))
    assert allowed.stop() == 0


def test_a_pipeline_that_runs_begins_no_other_round(fleet: TestFleet, worker: WorkerProcess, evil: Any) -> None:
    """Under another epoch its tasks would have other ids, and so run once more."""
    run = submit_pipeline({"stages": [{"name": "one", "spec": fleet.echo(output=1) | NOBODY}]}, app=fleet.app)
    eventually(lambda: fleet.app.pipelines.get(run.id).stage("one").tasks, what="the stage dispatched")
    evil.hset(fleet.app.keys.pipeline(run.id), "epoch", "7")
    evil.hdel(fleet.app.keys.stages(run.id), "one")
    fleet.app.pipeline_controller.reconcile(run.id)
    found = fleet.app.pipelines.get(run.id)
    assert (str(found.state), found.stage("one").tasks) == ("FAILED", ())
    assert "does not fit it" in str((found.error or {})["message"])


def test_a_stored_message_that_was_changed_is_not_queued_again_nor_are_its_links_called(
    fleet: TestFleet, worker: WorkerProcess, evil: Any, tmp_path: Path
) -> None:
    task = submit(fleet.echo(output=1) | NOBODY, app=fleet.app)
    key = fleet.app.keys.task(task.id)
    _, true, _ = of_queue(fleet, task)
    args, kwargs, embed = body_of(true)
    link = {"task": "plain_tasks.mark", "args": [str(tmp_path)], "kwargs": {}, "options": {}, "immutable": True}
    evil.hset(key, "message", json.dumps({**true, "body": body(*args, embed={**embed, "errbacks": [link]}, **kwargs)}))
    task.cancel()
    assert fleet.state(task.id) == "CANCELLED"
    with pytest.raises(Exception, match="does not fit it"):
        fleet.app.ledger.retry_task(task.id)
    assert fleet.state(task.id) == "CANCELLED"
    done = plain(fleet, "plain_tasks.add", 1, 2)  # what the link would have called comes before this one
    assert done.get(timeout=patient(30)) == 3
    assert not list(tmp_path.iterdir())


def test_a_notice_is_that_of_the_signed_message(fleet: TestFleet, worker: WorkerProcess, evil: Any) -> None:
    task = submit(fleet.echo(output=1), app=fleet.app)
    task.get(timeout=patient(30))
    spec = json.loads(evil.hget(fleet.app.keys.task(task.id), "spec"))
    spec["notify"] = [{"url": "http://127.0.0.1:9/${env:TOKEN}", "on": ["succeeded"]}]
    evil.hset(fleet.app.keys.task(task.id), "spec", json.dumps(spec))
    assert "notify" not in (fleet.app.signed_spec(task.id) or {})


def test_refusals_are_counted_audited_and_told_once(fleet: TestFleet, worker: WorkerProcess, evil: Any) -> None:
    field = "refused\nunsigned\nrequire"
    before = int(fleet.app.redis.hget(fleet.app.keys.metrics, field) or 0)
    for _ in range(20):
        push(evil, f"{PREFIX}tasks", forged("plain_tasks.add", body(1, 2)))
    eventually(lambda: int(fleet.app.redis.hget(fleet.app.keys.metrics, field) or 0) == before + 20, what="the count")
    told = [line for line in worker.log().splitlines() if "message_refused" in line and "unsigned" in line]
    assert 1 <= len(told) < 10
    entries = fleet.app.redis.xrange(fleet.app.keys.audit)
    assert [fields for _, fields in entries if fields.get("action") == "message.refuse"]


def test_an_old_key_is_taken_until_it_is_removed(tmp_path: Path) -> None:
    old, new = "a" * 64, "b" * 64
    path = key_file(tmp_path, new, old)
    fleet = TestFleet(tmp_path, signing_env(path), options=OPTIONS)
    try:
        settings = {"signing": "require", "signing_key_file": key_file(tmp_path, old, name="old.key")}
        behind = GPUFlow("behind", settings=fleet.settings.model_copy(update=settings))
        tasks = [submit(fleet.echo(output=number), app=app) for number, app in enumerate((behind, fleet.app))]
        first = fleet.start_worker("w1")
        assert [task.get(timeout=patient(30))["output"] for task in tasks] == [0, 1]
        assert first.stop() == 0
        late = submit(fleet.echo(output=2), app=behind)
        key_file(tmp_path, new)
        fleet.start_worker("w1")
        with pytest.raises(TaskFailed, match="is signed with key"):  # its record holds that message: it ends, with why
            late.get(timeout=patient(30))
        assert submit(fleet.echo(output=3), app=fleet.app).get(timeout=patient(30))["output"] == 3
        behind.close()
        behind.redis.close()
    finally:
        fleet.close()


def test_sign_runs_what_is_not_signed_and_counts_it(tmp_path: Path) -> None:
    fleet = TestFleet(tmp_path, signing_env(key_file(tmp_path), "sign"), options=OPTIONS)
    try:
        unsigned = GPUFlow("unsigned", settings=fleet.settings.model_copy(update={"signing": "off"}))
        fleet.start_worker("w1")
        assert submit(fleet.echo(output=1), app=unsigned).get(timeout=patient(30))["output"] == 1
        assert submit(fleet.echo(output=2), app=fleet.app).get(timeout=patient(30))["output"] == 2
        assert int(fleet.app.redis.hget(fleet.app.keys.metrics, "refused\nunsigned\nsign") or 0) >= 1
        assert not dead(fleet)
        unsigned.close()
        unsigned.redis.close()
    finally:
        fleet.close()


def test_a_retry_of_many_passes_over_what_is_not_signed(fleet: TestFleet, worker: WorkerProcess, evil: Any) -> None:
    tasks = [submit(fleet.echo(output=number) | NOBODY, app=fleet.app) for number in range(3)]
    for task in tasks:
        task.cancel()
    evil.hset(fleet.app.keys.task(tasks[1].id), "message", of_queue(fleet, tasks[0])[2])  # a true one, of another task
    verdicts = retry_many(fleet.app, [task.id for task in tasks])
    assert list(verdicts.values()) == ["queued", "not signed", "queued"]
    for task in tasks:
        task.cancel()
