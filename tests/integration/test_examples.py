"""The shipped pipelines that need no torch, and the scripts of examples/, run as they are and print what they promise.

All pipelines run at once on one worker. The scripts that start fleets of their own run beside them.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflow.cli import summary
from gpuflow.client import PipelineRun, get, submit, submit_pipeline
from gpuflow.cluster.commands import with_our_packages
from gpuflow.schedules.duty import Schedules
from gpuflow.schedules.store import Schedule, ScheduleStore
from gpuflow.spec import parse
from gpuflow.spec.presets import load_preset
from tests.fixtures.fleets import OPTIONS
from tests.support.examples import PRINTED, ROOT
from tests.support.fleet import TestFleet
from tests.support.waiting import patient

EXAMPLES = ROOT / "examples"
KEY = "example-key"
#: What the worker of these examples has; the comments of the files name it.
WORKER = {
    "WORKER_TAGS": "example-lab",
    "EXAMPLE_TOKEN": "not-a-real-token",
    "CALLBACK_KEY": KEY,
    "GPUFLOW_EXECUTORS": f"acme.wordcount={EXAMPLES / 'executor' / 'acme_wordcount' / 'executor.py'}:WordCount",
}
#: Script -> its command line.
SCRIPTS = {
    "notebook": [
        "-c",
        "import asyncio, runpy, sys\nasync def cell(): runpy.run_path(sys.argv[1])\nasyncio.run(cell())",
    ],
    "test_pipelines": ["-m", "pytest", "-q", "-p", "no:cacheprovider"],
    "run_all": [],
}


def script(name: str, folder: Path, **more: str) -> subprocess.Popen[str]:
    """Start a script of examples/ as a new user: with an empty home, and nothing of gpuflow set."""
    (path,) = (found for found in EXAMPLES.rglob(f"{name}.py"))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GPUFLOW_", "XDG_", "PYTEST_"))}
    kept.pop("REDIS_URL", None)
    mark = {key: value for key, value in os.environ.items() if key.startswith("GPUFLOW_TEST_")}
    home = folder / f"home-{name}"
    home.mkdir()
    return subprocess.Popen(
        [sys.executable, *SCRIPTS.get(name, []), str(path), *(["echo", "function"] if name == "run_all" else [])],
        cwd=home,
        env=with_our_packages({**kept, **mark, "HOME": str(home), "PYTHONUNBUFFERED": "1", **more}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[TestFleet]:
    made = TestFleet(folder, options=OPTIONS)
    try:
        made.start_worker("w1", "--max-jobs", "4", env={**WORKER, "HOME": str(folder)})
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def scripts(fleet: TestFleet, folder: Path) -> Iterator[Callable[[str], str]]:
    """Return what a script has printed, when it has ended well; all of them were started at once."""
    processes = {name: script(name, folder) for name in SCRIPTS if name != "notebook"}
    processes["notebook"] = script("notebook", folder, REDIS_URL=fleet.broker.url)

    def printed(name: str) -> str:
        output, _ = processes[name].communicate(timeout=patient(120))
        assert processes[name].returncode == 0, output[-3000:]
        return output

    try:
        yield printed
    finally:
        for process in processes.values():
            process.terminate()
            process.communicate()


@pytest.fixture(scope="module")
def receiver(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The example receiver, and its address."""
    process = script("receiver", folder, CALLBACK_KEY=KEY, PORT="0")
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip().rpartition(" ")[2]
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="module")
def run_of(
    fleet: TestFleet, scripts: Callable[[str], str], receiver: tuple[subprocess.Popen[str], str]
) -> Callable[[str], PipelineRun]:
    """Return an example when it has ended; all of them were submitted at the start."""
    runs = {name: submit_pipeline(_template(name, receiver[1]), app=fleet.app) for name in PRINTED}
    return lambda name: runs[name].wait(timeout=patient(120))


def _template(name: str, address: str) -> dict[str, Any]:
    """Return a pipeline as it is; the callback goes to the port that the receiver has got."""
    text = json.dumps(load_preset("pipelines", name))
    template: dict[str, Any] = json.loads(text.replace("http://127.0.0.1:8765", address))
    return template


@pytest.mark.parametrize("name", PRINTED)
def test_a_pipeline_prints_what_it_promises(
    name: str, run_of: Callable[[str], PipelineRun], capsys: pytest.CaptureFixture[str]
) -> None:
    summary.show(run_of(name))

    printed = capsys.readouterr().out
    assert [words for words in PRINTED[name] if words not in printed] == [], printed


def test_a_condition_chooses_the_other_branch(fleet: TestFleet) -> None:
    template = load_preset("pipelines", "condition")
    template["spec"]["graph"]["nodes"][0]["spec"]["echo"]["output"]["score"] = 0.2

    run = submit_pipeline(template, app=fleet.app).wait(timeout=patient(60))

    assert [run[name].state for name in ("publish", "repair", "report")] == ["SKIPPED", "SUCCEEDED", "SUCCEEDED"]


def test_equal_calls_were_computed_once(run_of: Callable[[str], PipelineRun]) -> None:
    run = run_of("merge")

    assert len({run[name].result["pid"] for name in ("first", "second", "third")}) == 1


def test_the_destination_has_the_artifacts(run_of: Callable[[str], PipelineRun], folder: Path) -> None:
    run_of("destinations")

    found = {path.name: path.stat().st_size for path in (folder / "gpuflow-delivered").rglob("*.bin")}
    assert found == {"report.bin": 1024, "latest.bin": 1024}


def test_the_receiver_takes_the_callback_and_refuses_what_is_not_signed(
    run_of: Callable[[str], PipelineRun], receiver: tuple[subprocess.Popen[str], str]
) -> None:
    import urllib.error
    import urllib.request

    process, address = receiver
    run = run_of("callback")
    assert process.stdout is not None
    path, _, body = process.stdout.readline().partition(": ")
    assert (path, json.loads(body)["task_id"]) == ("/results", run["callback"].tasks[0].id)

    forged = urllib.request.Request(f"{address}/results", data=b"{}", headers={"webhook-timestamp": "1"})
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(forged)
    refused.value.close()


def test_the_example_executor_runs_on_the_fleet(fleet: TestFleet) -> None:
    task = submit(json.loads((EXAMPLES / "executor" / "request.json").read_text()), app=fleet.app)

    items = task.get(timeout=patient(60))["items"]

    assert items[1]["output"] == {"a": 3, "rose": 3}


def test_beat_submits_the_scheduled_one_when_it_is_due(fleet: TestFleet) -> None:
    now = 1_772_420_400.0  # 03:00 UTC
    template = parse(load_preset("pipelines", "schedule")).to_dict()
    ScheduleStore(fleet.app.redis, fleet.app.keys).put(
        Schedule(name="schedule", cron="0 3 * * *", created_at=now - 60, template=template)
    )

    (submitted,) = Schedules(fleet.app, lambda: now).look()

    run = get(submitted, app=fleet.app)
    assert isinstance(run, PipelineRun)
    assert run.wait(timeout=patient(60))["report"].result["output"] == "3 sites have reported"


def test_the_notebook_runs_in_a_running_event_loop(scripts: Callable[[str], str]) -> None:
    lines = scripts("notebook").splitlines()

    assert "output: 42" in lines
    assert "joined: [2, 3]" in lines
    assert any("join: succeeded" in line for line in lines), "progress is shown"
    assert "failed: BadInput - no such column: age" in lines
    assert [line for line in lines if line.startswith("tried: ")] == [
        f"tried: {{'rate': {rate}}}" for rate in (0.1, 0.01, 0.001)
    ]


async def test_the_service_answers_at_once_streams_and_cancels(
    fleet: TestFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    service = runpy.run_path(str(EXAMPLES / "python" / "service.py"))

    await service["serve"](fleet.app)

    assert capsys.readouterr().out.splitlines() == [
        *(f"request {number}: ['question {number}']" for number in range(8)),
        "watched: answer: SUCCEEDED",
        "slow: cancelled",
    ]


def test_the_pytest_example_passes(scripts: Callable[[str], str]) -> None:
    assert "4 passed" in scripts("test_pipelines")


def test_the_table_of_all_examples_is_printed(scripts: Callable[[str], str]) -> None:
    table = scripts("run_all")

    assert re.search(r"\| `echo` \| [\d.]+ \| 0 \|", table) and re.search(r"\| `function` \| [\d.]+ \| 0 \|", table)
