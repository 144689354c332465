"""The audit log of a real fleet: each action once, one chain by many writers, and what breaks it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from gpuflow.audit.actors import acting
from gpuflow.audit.chain import Key
from gpuflow.audit.entries import record
from gpuflow.audit.links import links
from gpuflow.audit.reading import AuditLog, Filter
from gpuflow.audit.sealing import SEGMENT, Sealer, unsealed
from gpuflow.broker.keys import Keys
from gpuflow.broker.scripts import load_script
from gpuflow.bulk import cancel_many, retry_many
from gpuflow.celery_app import GPUFlow
from gpuflow.cli import cli
from gpuflow.client import submit, submit_pipeline
from gpuflow.fleet.desired import DesiredState
from gpuflow.fleet.registry import Fleet
from gpuflow.handles import Task
from gpuflow.scaling.store import Leadership, Machine, ScalingStore
from gpuflow.settings import Settings
from gpuflow.upkeep import duties as duties_module
from gpuflow.upkeep.duties import Duties
from tests.support.fleet import Broker, TestFleet
from tests.support.gateway import Gateway
from tests.support.waiting import eventually, patient

ANA = "ana@laptop"
CANARY = "canary-7f3a91c2"
KEY = Key(secret=b"a key of the tests, long enough")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("audit"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def keys(broker: Broker, request: pytest.FixtureRequest) -> Keys:
    """Keys of a log of this test's own."""
    return Keys(f"{request.node.name[:60]}:")


def entries(fleet: TestFleet, target: str, action: str = "") -> list[tuple[str, str, dict[str, str]]]:
    """Return action, actor and details of what the log has of a target, the oldest first."""
    found, _ = AuditLog(fleet.app.redis, fleet.app.keys).newest(Filter(target=target, action=action), 1000)
    shown = [entry.public() for entry in reversed(found)]
    return [(one["action"], one["actor"], one["details"]) for one in shown]


def names(fleet: TestFleet, target: str) -> list[str]:
    return [action for action, _, _ in entries(fleet, target)]


def stuck(fleet: TestFleet) -> Task:
    """A task that no worker can run."""
    return submit({**fleet.echo(output=1), "resources": {"labels": {"nowhere": "x"}}}, app=fleet.app)


def ended(task: Task) -> Task:
    task.wait(timeout=patient(60))
    return task


# -- every action leaves one entry -----------------------------------------------------------------------------------


def test_a_task_is_audited_from_its_start_to_its_end(served: TestFleet) -> None:
    task = ended(submit({**served.echo(output=CANARY), "env": {"TOKEN_NAME": CANARY}}, app=served.app))
    assert entries(served, f"task:{task.id}") == [
        ("attempt.start", "worker:w1", {"attempt": "1"}),
        ("task.end", "worker:w1", {"state": "SUCCEEDED", "attempt": "1"}),
    ]


def test_registration_and_refusal_are_audited(served: TestFleet) -> None:
    registered = [entry for entry in entries(served, "worker:w1") if entry[0] == "worker.register"]
    assert [actor for _, actor, _ in registered] == ["worker:w1"]
    namesake = served.spawn_worker("w1")
    namesake.process.wait(timeout=patient(60))
    (refused,) = [entry for entry in entries(served, "worker:w1") if entry[0] == "worker.refused"]
    assert "in use by process" in refused[2]["reason"]


def test_what_users_do_to_tasks_is_audited_once_with_their_name(served: TestFleet) -> None:
    waiting = stuck(served)
    with acting(ANA):
        waiting.cancel()
        waiting.cancel()  # it has ended: nothing was done
    assert [entry[:2] for entry in entries(served, f"task:{waiting.id}")] == [("task.cancel", ANA), ("task.end", ANA)]

    running = submit(served.echo(sleep_seconds=600), app=served.app)
    eventually(lambda: served.state(running.id) == "RUNNING", what="a running task")
    with acting("bob@desk"):
        running.cancel()
    ended(running)
    assert [entry[:2] for entry in entries(served, f"task:{running.id}")] == [
        ("attempt.start", "worker:w1"),
        ("task.cancel", "bob@desk"),
        ("task.end", "worker:w1"),
    ]

    fail = {"type": "Boom", "message": "no luck", "retryable": True}
    dead = ended(submit({**served.echo(fail=fail), "retry": {"max_attempts": 1}}, app=served.app))
    with acting(ANA):
        assert dead.retry()
        ended(dead)
        assert served.app.ledger.purge(dead.id)
        assert not served.app.ledger.purge(dead.id)
    assert names(served, f"task:{dead.id}") == [
        *("attempt.start", "task.end", "task.retry", "attempt.start", "task.end", "task.purge"),
    ]
    assert {actor for action, actor, _ in entries(served, f"task:{dead.id}", "task.[rp]*")} == {ANA}


def test_many_at_once_are_audited_one_by_one(served: TestFleet) -> None:
    waiting = [stuck(served).id for _ in range(3)]
    with acting(ANA):
        assert set(cancel_many(served.app, waiting).values()) == {"cancelled"}
        assert set(retry_many(served.app, waiting).values()) == {"queued"}
        assert set(cancel_many(served.app, waiting).values()) == {"cancelled"}
    for task in waiting:
        assert [entry[:2] for entry in entries(served, f"task:{task}")] == [
            (action, ANA) for action in ("task.cancel", "task.end", "task.retry", "task.cancel", "task.end")
        ]


def test_what_a_bulk_has_buried_is_found(served: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = [stuck(served).id for _ in range(4)]
    with acting(ANA):
        cancel_many(served.app, [first])
        cancel_many(served.app, others)
    monkeypatch.setattr("gpuflow.audit.reading._LOOKED_AT", 2)
    monkeypatch.setenv("REDIS_URL", served.broker.url)

    done = CliRunner().invoke(cli, ["audit", "--target", f"task:{first}", "--since", "1h", "-n", "7", "--json"])

    assert [entry["action"] for entry in json.loads(done.stdout)] == ["task.end", "task.cancel"]


def test_what_users_do_to_pipelines_is_audited_once(served: TestFleet) -> None:
    spec = {"stages": [{"name": "one", "spec": served.echo(output=1)}]}
    body: dict[str, Any] = {"apiVersion": "gpuflow/v1", "kind": "Pipeline", "metadata": {"name": "p"}, "spec": spec}
    done = submit_pipeline(body, app=served.app)
    done.wait(timeout=patient(60))
    assert [entry[0::2] for entry in entries(served, f"pipeline:{done.id}")] == [
        ("pipeline.end", {"state": "SUCCEEDED"})
    ]
    spec["resources"] = {"labels": {"nowhere": "x"}}  # type: ignore[assignment]
    waits = submit_pipeline(body, app=served.app)
    with acting(ANA):
        waits.cancel()
        assert waits.resume() == "resumed"
        waits.cancel()
    found = entries(served, f"pipeline:{waits.id}")
    once = ["pipeline.cancel", "pipeline.end"]
    assert [action for action, _, _ in found] == [*once, "pipeline.resume", *once]
    assert {actor for _, actor, _ in found} == {ANA}


def test_what_is_done_to_workers_and_machines_is_audited_once(served: TestFleet) -> None:
    registry = Fleet(served.app.redis, served.app.keys)
    with acting(ANA):
        for state in (DesiredState.DISABLED, DesiredState.DISABLED, DesiredState.ENABLED):
            registry.desire("w1", state)
        registry.release("w1")
    done = [entry for entry in entries(served, "worker:w1") if entry[1] == ANA]
    assert [action for action, _, _ in done] == ["worker.disable", "worker.enable", "worker.release"]

    leader = Leadership(served.app.redis, served.app.keys, 30.0)
    assert leader.lead()
    store, machine = ScalingStore(served.app.redis, served.app.keys), Machine(id="m-1", family="f")
    for what in ("begin", "begin", "note", "end", "end", "forget"):
        ending = Machine(id="m-1", family="f", state="ending")
        store.step(what, ending if what == "end" else machine, leader)
    assert [entry[:2] for entry in entries(served, "machine:m-1")] == [
        ("machine.launch", "autoscaler"),
        ("machine.terminate", "autoscaler"),
    ]
    # The machine has no worker, and one that comes up after all is refused.
    registry.begin_anew("m-1", "host", "1")
    assert [action for action, _, _ in entries(served, "worker:m-1")] == ["worker.refused"]
    served.app.redis.delete(served.app.keys.scaling_leader)


def test_the_gateway_names_the_caller_counts_wrong_tokens_and_gives_pages(served: TestFleet) -> None:
    task = stuck(served)
    with Gateway(served.folder, env={"REDIS_URL": served.broker.url}) as front:
        with httpx.Client(base_url=front.url, headers=front.headers, timeout=patient(30)) as http:
            assert http.delete(f"/api/v1/tasks/{task.id}").status_code == 200
            wrong = [http.get("/api/workers", headers={"Authorization": f"Bearer {CANARY}"}) for _ in range(5)]
            assert {answer.status_code for answer in wrong} == {401}
            seen: list[str] = []
            cursor = ""
            while cursor is not None:
                page = http.get("/api/admin/audit", params={"limit": 3, **({"cursor": cursor} if cursor else {})})
                assert page.status_code == 200, page.text
                seen += [entry["id"] for entry in page.json()["entries"]]
                cursor = page.json()["next"]
            assert len(seen) == len(set(seen)) == served.app.redis.xlen(served.app.keys.audit)
            assert seen == sorted(seen, key=lambda id: [int(part) for part in id.split("-")], reverse=True)
            assert http.get("/api/admin/audit", params={"cursor": "x"}).status_code == 400
            assert http.get("/api/admin/audit", headers={"Authorization": ""}).status_code == 401
        front.stop()
    assert entries(served, f"task:{task.id}", "task.cancel")[0][1] == "gateway:127.0.0.1"
    (noted,) = entries(served, "gateway")
    assert noted[0] == "gateway.wrong_token"
    assert (noted[2]["times"], noted[2]["addresses"]) == ("5", "127.0.0.1: 5")


def test_the_command_lists_exports_and_verifies(
    served: TestFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("00112233445566778899aabbccddeeff\n")
    monkeypatch.setenv("REDIS_URL", served.broker.url)
    monkeypatch.setenv("GPUFLOW_AUDIT_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.chdir(tmp_path)

    def audit(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as end:
            cli(["audit", *arguments])
        said = capsys.readouterr()
        assert (end.value.code or 0) == code, said.out + said.err
        return said.out

    listed = json.loads(audit("--json", "--action", "worker.*", "-n", "3"))
    assert {entry["action"].partition(".")[0] for entry in listed} == {"worker"}
    assert json.loads(audit("--verify", "--json"))["whole"]
    file = tmp_path / "log.jsonl"
    audit("--export", str(file))
    text = file.read_text()
    assert CANARY not in text, "the log holds a secret"
    assert "whole" in audit("--verify", str(file))
    file.write_text(text.replace(ANA, "eve@laptop"))
    assert "broken: entry" in audit("--verify", str(file), code=1)
    audit("--export", str(file), "--verify", code=2)
    audit("--since", "soon", code=2)
    audit("--verify", str(tmp_path / "none"), code=2)


# -- one chain, whoever writes and dies ------------------------------------------------------------------------------


def test_a_log_that_takes_no_more_entries_stops_no_task(served: TestFleet) -> None:
    client, keys = served.broker.client, served.app.keys
    last = f"{2**64 - 1}-{2**64 - 1}"
    client.xadd(keys.audit, {"action": "forged"}, id=last)
    try:
        assert submit(served.echo(output=1), app=served.app).get(timeout=patient(60))["output"] == 1
        sent = served.app.send_task("gpuflow.echo", kwargs={"spec": served.echo(output=2)}, countdown=600)
        assert Task(sent.id, served.app).cancel()
        assert Task(sent.id, served.app).state == "CANCELLED"
    finally:
        client.delete(keys.audit)


def test_what_is_removed_by_the_broker_s_owner_is_seen(broker: Broker, keys: Keys) -> None:
    client, log, sealer = broker.client, AuditLog(broker.client, keys), Sealer(broker.client, keys, KEY)

    def fill(count: int) -> None:
        for number in range(count):
            record(client, keys, "task.end", f"task:{number}")

    fill(6)
    assert sealer.seal() == 6
    fill(4)
    assert not log.verify(KEY).broken
    ids = [id for id, _ in client.xrange(keys.audit)]
    for victim, where in (
        (ids[2], ids[3]),
        (ids[0], ids[1]),
        (ids[5], ids[4]),
        (ids[7], "1 entries"),
        (ids[9], "1 ent"),
    ):
        client.copy(keys.audit, f"{keys.audit}.copy")
        client.xdel(keys.audit, victim)
        assert where in log.verify(KEY).broken, victim
        client.copy(f"{keys.audit}.copy", keys.audit, replace=True)
    client.xtrim(keys.audit, maxlen=3, approximate=False)
    assert log.verify(KEY).broken


def test_a_trim_removes_whole_segments_and_leaves_a_whole_chain(broker: Broker, keys: Keys) -> None:
    client, log, sealer = broker.client, AuditLog(broker.client, keys), Sealer(broker.client, keys, KEY)
    for number in range(12):
        record(client, keys, "task.end", f"task:{number}")
        if number % 3 == 2:
            assert sealer.seal() == 3
    assert sealer.trim(1e9, 1000) == 0
    assert sealer.trim(1e9, 6) == 6
    assert sealer.trim(1e9, 6) == 0
    verdict = log.verify(KEY)
    assert not verdict.broken
    assert (verdict.entries, verdict.trimmed) == (6, 6)
    record(client, keys, "task.end", "task:12")
    assert sealer.seal() == 1
    assert sealer.trim(1e9, 2) == 3
    assert (log.verify(KEY).entries, log.verify(KEY).trimmed, log.verify(KEY).broken) == (4, 9, "")
    assert sealer.trim(-1e9, 1) == 4  # all of them are too old
    assert (log.verify(KEY).entries, log.verify(KEY).trimmed, log.verify(KEY).broken) == (0, 13, "")
    assert Sealer(client, keys, Key()).seal() == 0, "a chain with a key goes on without it"


def test_a_call_whose_answer_was_lost_appends_once(broker: Broker, keys: Keys) -> None:
    append = load_script("gpuflow.audit", "append")
    call = [keys.audit, keys.audit_sent("call")], [60, "action", "a", "actor", "b", "target", "c"]
    assert [append(broker.client, *call) for _ in range(2)] == [1, 0]
    assert broker.client.xlen(keys.audit) == 1


class _Dies(BaseException):
    pass


class _Mortal:
    """A client that dies before, or after, one of its calls."""

    def __init__(self, client: Any, call: int, *, after: bool) -> None:
        self._client, self._left, self._after = client, call, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def mortal(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                raise _Dies
            answer = method(*args, **options)
            if self._left == 0:
                raise _Dies
            return answer

        return mortal


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_sealer_may_die_at_every_step(broker: Broker, keys: Keys, *, after: bool) -> None:
    client, log = broker.client, AuditLog(broker.client, keys)
    appended, call = 0, 1
    while True:
        for _ in range(3):
            record(client, keys, "task.end", "task:x")
            appended += 1
        mortal = Sealer(_Mortal(client, call, after=after), keys, KEY)  # type: ignore[arg-type]
        try:
            mortal.seal()
            mortal.trim(1e9, 4)
        except _Dies:
            call += 1
        else:
            break
        Sealer(client, keys, KEY).seal()
        verdict = log.verify(KEY)
        assert not verdict.broken
        assert verdict.entries + verdict.trimmed == appended
    assert call > 6, "the sealer was to die in each of its steps"


_WRITER = """
import os, redis
from gpuflow.audit.chain import Key
from gpuflow.audit.entries import record
from gpuflow.audit.sealing import Sealer
from gpuflow.broker.keys import Keys
client, keys = redis.Redis.from_url(os.environ["URL"], decode_responses=True), Keys(os.environ["PREFIX"])
sealer = Sealer(client, keys, Key())
print("ready", flush=True)
for number in range(int(os.environ["COUNT"])):
    record(client, keys, "task.end", f"task:{number}", actor=os.environ["NAME"])
    sealer.seal()
"""


def test_many_processes_that_write_and_seal_make_one_chain(broker: Broker, keys: Keys) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER],
            env={**os.environ, "URL": broker.url, "PREFIX": keys.prefix, "NAME": f"p{number}", "COUNT": count},
            stdout=subprocess.PIPE,
        )
        for number, count in enumerate(("300", "300", "1000000"))
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        for writer in writers[:2]:
            assert writer.wait(timeout=patient(60)) == 0
        writers[2].send_signal(signal.SIGKILL)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(timeout=patient(10))
            if writer.stdout is not None:
                writer.stdout.close()
    Sealer(broker.client, keys, Key()).seal()
    verdict = AuditLog(broker.client, keys).verify(Key())
    assert not verdict.broken
    wrote = Counter(fields["actor"] for _, fields in broker.client.xrange(keys.audit))
    assert (wrote["p0"], wrote["p1"]) == (300, 300)
    assert verdict.entries == sum(wrote.values())
    assert verdict.links == len(list(links(broker.client, keys)))


def test_a_long_log_is_sealed_in_segments_and_a_young_one_waits(broker: Broker, keys: Keys) -> None:
    client, sealer = broker.client, Sealer(broker.client, keys, Key())
    pipe = client.pipeline()
    for number in range(SEGMENT + 1):
        pipe.xadd(keys.audit, {"action": "a", "actor": b"\xff\xfe", "target": f"{number}"})
    pipe.execute()
    assert sealer.seal(least_seconds=3600) == SEGMENT
    assert sealer.seal() == 1
    assert not AuditLog(client, keys).verify(Key()).broken


def _fill(broker: Broker, keys: Keys, count: int) -> None:
    pipe = broker.client.pipeline()
    for number in range(count):
        pipe.xadd(keys.audit, {"action": "a", "target": str(number)})
    pipe.execute()


@contextmanager
def _beat(broker: Broker, folder: Path, prefix: str, most: int = SEGMENT) -> Iterator[GPUFlow]:
    """The app of a beat process, whose key is `folder`/key."""
    env = {
        "REDIS_URL": broker.url,
        "GPUFLOW_KEY_PREFIX": prefix,
        "GPUFLOW_AUDIT_KEY_FILE": str(folder / "key"),
        "GPUFLOW_AUDIT_MAX_ENTRIES": str(most),
    }
    app = GPUFlow("beat", settings=Settings.load(env=env, cwd=folder))
    try:
        yield app
    finally:
        app.redis.close()
        app.close()


def test_beat_seals_and_trims_from_when_it_can_read_its_key(
    broker: Broker, keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties_module, "MANY_UNSEALED", 1000)
    _fill(broker, keys, 3 * SEGMENT)
    log = AuditLog(broker.client, keys)
    with _beat(broker, tmp_path, keys.prefix) as app:
        duties = Duties(app)
        for _ in range(2):
            duties.seal()
        verdict = log.verify(KEY)
        assert (verdict.broken, verdict.entries, verdict.unsealed) == ("", 0, 3 * SEGMENT), (
            "it was sealed without a key"
        )
        told = [record.getMessage() for record in caplog.records if record.name == "gpuflow.duties"]
        assert [text.partition(" ")[0] for text in told] == ["event=audit_not_sealed", "event=audit_many_unsealed"]
        assert told[1].endswith(f"entries={3 * SEGMENT}")
        (tmp_path / "key").write_bytes(KEY.secret)
        duties.seal()
    verdict = log.verify(KEY)
    assert (verdict.broken, verdict.entries, verdict.trimmed, verdict.unsealed) == ("", SEGMENT, 2 * SEGMENT, 0)
    _fill(broker, keys, 3)
    assert unsealed(broker.client, keys) == 3


def test_a_round_of_beat_seals_a_bounded_part_of_a_long_log(
    broker: Broker, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties_module, "SEGMENTS_A_ROUND", 2)
    (tmp_path / "key").write_bytes(KEY.secret)
    _fill(broker, keys, 3 * SEGMENT)
    with _beat(broker, tmp_path, keys.prefix, most=10 * SEGMENT) as app:
        duties = Duties(app)
        duties.seal()
        assert unsealed(broker.client, keys) == SEGMENT
        duties.seal()
    assert unsealed(broker.client, keys) == 0


def test_beat_seals_though_its_other_duties_stumble(
    broker: Broker, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble() -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(duties_module, "SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(duties_module, "RECONCILE_SECONDS", 0.01)
    (tmp_path / "key").write_bytes(KEY.secret)
    _fill(broker, keys, SEGMENT)
    with _beat(broker, tmp_path, keys.prefix) as app:
        duties = Duties(app)
        monkeypatch.setattr(duties, "reconcile", stumble)
        duties.start()
        try:
            eventually(lambda: broker.client.exists(keys.audit_chain), what="a link of the chain")
        finally:
            duties.stop()
            duties.join(patient(30))
