"""A team's own functions in children: GPUs of their own alone, results and errors as with Celery, an end at once."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError, TimeLimitExceeded
from celery.result import result_from_tuple

from gpuflow.errors import InvalidTemplate
from tests.support.fleet import TestFleet, WorkerProcess, running
from tests.support.waiting import eventually, patient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from team_errors import OnlyThereError  # as the workers' modules import it


def send(fleet: TestFleet, name: str, *args: Any, **options: Any) -> Any:
    return fleet.app.send_task(f"team_functions.{name}", args=args, **options)


@pytest.fixture(scope="module")
def fleet(long_fleet: TestFleet) -> TestFleet:
    """One broker for all tests of this file."""
    return long_fleet


@pytest.fixture(scope="module")
def worker(fleet: TestFleet) -> WorkerProcess:
    queues = f"{fleet.app.conf.task_default_queue},other"
    env = {"TEAM_VARIABLE": "of the team"}
    return fleet.start_worker("w1", "--include", "team_functions,plain_tasks", "-Q", queues, env=env)


def test_a_function_returns_what_it_returns(fleet: TestFleet, worker: WorkerProcess) -> None:
    assert send(fleet, "add", 2, 3).get(timeout=patient(30)) == 5
    assert send(fleet, "after", date(2026, 3, 1)).get(timeout=patient(30)) == date(2026, 3, 2)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("exit", "TaskFailed", "exit code 3"),
        ("segfault", "TaskFailed", "SIGSEGV"),
        ("raise", "TeamError", "of the team"),
        ("value", "ValueError", "not that"),
    ],
)
def test_however_a_function_ends_it_is_a_failure_at_once(
    fleet: TestFleet, worker: WorkerProcess, how: str, kind: str, words: str
) -> None:
    sent = send(fleet, "end", how)

    with pytest.raises(Exception, match=words) as raised:
        sent.get(timeout=patient(30))

    assert type(raised.value).__name__ == kind
    record = fleet.app.ledger.find(sent.id)
    assert record is not None and record.state == "FAILED" and record.attempt == 1
    assert sent.state == "FAILURE"


def test_what_celery_could_not_store_is_a_failure(fleet: TestFleet, worker: WorkerProcess) -> None:
    with pytest.raises(Exception, match=r"not JSON serializable|EncodeError"):
        send(fleet, "not_json").get(timeout=patient(30))


def test_its_request_is_celerys(fleet: TestFleet, worker: WorkerProcess) -> None:
    sent = send(fleet, "about", 1, kwargs={"a": 2})
    told = sent.get(timeout=patient(30))

    assert told.pop("hostname").startswith("w1")
    assert told == {
        "id": sent.id,
        "args": [1],
        "kwargs": {"a": 2},
        "retries": 0,
        "name": "team_functions.about",
        "called_directly": False,
        "root": sent.id,
    }


def test_limits_interrupt_a_call_that_blocks(fleet: TestFleet, worker: WorkerProcess) -> None:
    assert send(fleet, "softly", soft_time_limit=patient(2)).get(timeout=patient(30)) == "stopped softly"
    with pytest.raises(TimeLimitExceeded):
        send(fleet, "block", time_limit=1).get(timeout=patient(30))


def test_a_revoked_function_ends_and_nothing_is_left(fleet: TestFleet, worker: WorkerProcess) -> None:
    sent = send(fleet, "block")
    eventually(lambda: fleet.state(sent.id) == "RUNNING", what="a function that runs")
    pids = [one.pid for one in worker.children() if one.cmdline()[-2:] == ["-m", "gpuflow.functions"]]
    assert pids

    sent.revoke(terminate=True)

    eventually(lambda: sent.state == "REVOKED", what="its end")
    assert fleet.state(sent.id) == "CANCELLED"
    eventually(lambda: not running(pids), what="no process")


def test_a_retry_is_another_call_of_the_same_task(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> None:
    sent = send(fleet, "third_time", str(tmp_path))

    assert sent.get(timeout=patient(30)) == 20
    assert sorted(path.name for path in tmp_path.glob(f"{sent.id}-*")) == [f"{sent.id}-{n}" for n in range(3)]

    with pytest.raises(Exception, match="try 1"):
        send(fleet, "in_vain").get(timeout=patient(30))


def test_states_that_it_sets_are_celerys(fleet: TestFleet, worker: WorkerProcess, tmp_path: Path) -> None:
    until = tmp_path / "go"
    sent = send(fleet, "state", str(until))

    eventually(lambda: sent.state == "HALFWAY" and sent.info == {"rows": 7}, what="the state")
    until.touch()
    assert sent.get(timeout=patient(30)) == "done"


def test_canvas_of_functions(fleet: TestFleet, worker: WorkerProcess) -> None:
    add, total = (fleet.app.signature(f"team_functions.{name}") for name in ("add", "total"))

    assert chain(add.clone((1, 2)), add.clone((3,))).apply_async().get(timeout=patient(30)) == 6
    several = group(add.clone((one, one)) for one in range(3))
    assert several.apply_async().get(timeout=patient(30)) == [0, 2, 4]
    assert chord(several, total).apply_async().get(timeout=patient(30)) == 6
    failing = chord([add.clone((1, 1)), fleet.app.signature("team_functions.end", args=("value",))], total)
    with pytest.raises(Exception, match="not that"):
        failing.apply_async().get(timeout=patient(30))


@pytest.mark.filterwarnings("ignore:task_allow_error_cb_on_chord_header")
@pytest.mark.parametrize("where", ["header", "header's chain", "header's group", "body", "body's chain"])
def test_errbacks_of_a_chord_are_called_wherever_it_fails(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path, where: str
) -> None:
    names = {"one": ("add", (1, 1)), "fails": ("end", ("value",)), "total": ("total", ())}
    one, fails, total = (fleet.app.signature(f"team_functions.{name}", args=args) for name, args in names.values())
    one.set(immutable=True), fails.set(immutable=True)
    failing = {"chain": chain(one, fails, one), "group": group(one, fails)}.get(where.rpartition(" ")[2], fails)
    sent = chord([failing], total) if where.startswith("header") else chord([one], failing)
    sent.link_error(fleet.app.signature("team_functions.note", args=(str(tmp_path),)))

    with pytest.raises(Exception, match="not that"):
        sent.apply_async().get(timeout=patient(30))

    eventually(lambda: len(list(tmp_path.iterdir())) == 1, what="one call of the errback")


@pytest.mark.parametrize(
    ("how", "result"), [("by a plain task", 23), ("by a function", 24), ("by itself", 24), ("by a chain", 25)]
)
def test_a_function_is_replaced_by_another_task_under_its_id(
    fleet: TestFleet, worker: WorkerProcess, how: str, result: int
) -> None:
    add = fleet.app.signature("team_functions.add", args=(100,))
    replaced = fleet.app.signature("team_functions.replaced", args=(how,))

    assert replaced.apply_async().get(timeout=patient(30)) == result
    assert chain(replaced, add).apply_async().get(timeout=patient(30)) == result + 100


def test_what_a_function_leaves_to_celery_is_done(fleet: TestFleet, worker: WorkerProcess) -> None:
    assert send(fleet, "rejected", True).get(timeout=patient(30)) is True
    for name, args, state in (("ignored", (), "SUCCEEDED"), ("rejected", (False,), "FAILED")):
        sent = send(fleet, name, *args)
        eventually(lambda sent=sent, state=state: fleet.state(sent.id) == state, what=f"the end of {name}")
        eventually(lambda: not fleet.broker.client.hlen(fleet.app.keys.unacked), what="its acknowledgement")


def test_what_a_retry_is_called_with_is_nobodys_to_change(fleet: TestFleet, worker: WorkerProcess) -> None:
    url = "https://bucket.example.com/a?X-Amz-Credential=AKIAIOSFODNN7EXAMPLE"
    sent = send(fleet, "with_signature", url, headers={"to": "other"})

    signed, queue, priority = sent.get(timeout=patient(30))

    assert signed == f"{url}&X-Amz-Signature=0123456789abcdef0123456789abcdef"
    assert (queue, priority) == ("other", "9")
    assert fleet.app.ledger.get(sent.id).queue == "other"


def test_a_function_that_asks_for_its_retry_gets_it_however_it_goes_on(fleet: TestFleet, worker: WorkerProcess) -> None:
    assert send(fleet, "asks_quietly").get(timeout=patient(30)) == 1


def test_a_replacement_is_no_error_and_one_that_cannot_be_sent_is(fleet: TestFleet, worker: WorkerProcess) -> None:
    assert send(fleet, "replaced_though_it_retries").get(timeout=patient(30)) == 3
    with pytest.raises(Exception, match="none-such"):
        send(fleet, "replaced_in_vain").get(timeout=patient(30))


def test_the_class_of_a_team_runs_in_the_child(fleet: TestFleet, worker: WorkerProcess) -> None:
    sent = send(fleet, "of_a_team")
    called, (pid, began, _, task_id) = sent.get(timeout=patient(30))

    assert called == pid == int(began) and pid != worker.process.pid and task_id == sent.id
    assert fleet.state(sent.id) == "SUCCEEDED"


def test_a_shared_task_and_one_with_an_odd_name_run_in_children(fleet: TestFleet, worker: WorkerProcess) -> None:
    assert send(fleet, "shared").get(timeout=patient(30)) != worker.process.pid
    assert fleet.app.send_task("team: odd@name+of~a/function").get(timeout=patient(30)) == "odd"


def test_one_that_expires_or_is_revoked_before_it_begins_is_told(fleet: TestFleet, worker: WorkerProcess) -> None:
    with pytest.raises(TaskRevokedError, match="expired"):
        send(fleet, "add", 1, 1, expires=-1).get(timeout=patient(30))


def test_what_a_child_is_started_with_tells_no_secret(fleet: TestFleet, worker: WorkerProcess) -> None:

    told = send(fleet, "surroundings").get(timeout=patient(30))

    assert (told["variable"], told["address"]) == ("of the team", None)
    assert "REDIS_URL" not in told["started_with"] and "TEAM_VARIABLE" not in told["started_with"]


@pytest.mark.parametrize(("kind", "name"), [("dead", "TaskDead"), ("failed", "TaskFailed")])
def test_an_end_of_another_task_that_is_passed_on_is_a_failure(
    fleet: TestFleet, worker: WorkerProcess, kind: str, name: str
) -> None:
    sent = send(fleet, "passes_on", kind)

    with pytest.raises(Exception, match="of another task") as raised:
        sent.get(timeout=patient(30))

    assert type(raised.value).__name__ == name
    assert (sent.state, fleet.state(sent.id)) == ("FAILURE", "FAILED")


def test_threads_and_exit_handlers_of_a_function_hold_nothing_up(fleet: TestFleet, worker: WorkerProcess) -> None:
    pid = send(fleet, "leaves_a_thread").get(timeout=patient(30))

    eventually(lambda: not running([pid]), what="no process")


def test_an_error_comes_as_it_was_raised_with_the_lines_of_the_function(
    fleet: TestFleet, worker: WorkerProcess
) -> None:
    sent = send(fleet, "raises_what_the_worker_lacks")

    with pytest.raises(OnlyThereError, match="where it was raised"):
        sent.get(timeout=patient(30))

    assert "in raises_what_the_worker_lacks" in sent.traceback


def test_the_surface_of_celery_is_whole(fleet: TestFleet, worker: WorkerProcess) -> None:
    sent = send(fleet, "header", headers={"my_header": "mine"})
    assert sent.get(timeout=patient(30)) == ["mine", None, sent.id]

    sent = send(fleet, "calls_another")
    other = sent.get(timeout=patient(30))
    assert [child.id for child in sent.children] == [other]

    returned = result_from_tuple(send(fleet, "returns_a_call").get(timeout=patient(30)), app=fleet.app)
    assert returned.get(timeout=patient(30)) == 4 and returned.parent.get(timeout=patient(30)) == 2


def test_a_function_that_no_module_registers_is_a_failure_that_says_so(fleet: TestFleet, worker: WorkerProcess) -> None:
    @fleet.app.task(name="team_functions.unknown", child=True)
    def unknown() -> None: ...

    sent = unknown.delay()

    with pytest.raises(Exception, match=r"team_functions\.unknown"):
        sent.get(timeout=patient(30))
    record = eventually(lambda: (it := fleet.app.ledger.get(sent.id)).state.final and it, what="the end of the record")
    assert record.state == "FAILED" and "--include" in record.error["message"]


def test_what_cannot_be_asked_for_is_said_at_once(fleet: TestFleet) -> None:
    def nothing() -> None: ...

    fleet.app.finalize()
    with pytest.raises(InvalidTemplate, match=r"task bad\.resources"):
        fleet.app.task(name="bad.resources", resources="A100:many", shared=False)(nothing)
    task = fleet.app.task(name="good.one", child=True, shared=False)(nothing)
    with pytest.raises(InvalidTemplate, match="names a folder"):
        task.apply_async(task_id="user:42")


def test_a_function_that_wants_to_be_acknowledged_early_runs_all_the_same(
    fleet: TestFleet, worker: WorkerProcess, tmp_path: Path
) -> None:
    sent = send(fleet, "acknowledged_early", str(tmp_path / "file"))

    eventually(lambda: fleet.state(sent.id) == "SUCCEEDED", what="its end")
    assert (tmp_path / "file").read_text() == "done"
    assert sent.state == "PENDING"  # nobody reads it
