"""The quick start on the real model, by the command line, in an empty folder with an empty home."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import eventually, patient

pytestmark = [pytest.mark.ml, pytest.mark.timeout(1200)]

COMMAND = str(Path(sys.executable).with_name("gpuflow"))


def left_over(mark: str) -> list[str]:
    """Return the processes that still run with the mark of a test."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("GPUFLOW_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return found


def outcome(stdout: str) -> dict[str, dict]:
    return {stage["name"]: stage for stage in json.loads(stdout)["stages"]}


def test_the_quick_start_learns_answers_and_leaves_nothing_behind(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [COMMAND, "run", "quickstart", "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-3000:]
    stages = outcome(done.stdout)
    assert [stage["state"] for stage in stages.values()] == ["SUCCEEDED"] * 3
    tuned = stages["tune"]["result"]
    assert tuned["eval_loss_after"] < 0.8 * tuned["eval_loss_before"]
    before, after = ([item["output"] for item in stages[name]["result"]["items"]] for name in ("before", "after"))
    assert len(before) == len(after) == 4
    assert all(before) and all(after)
    assert before != after
    for stage in stages.values():
        folder = Path(stage["folders"][0])
        assert folder.is_relative_to(tmp_path)
        assert (folder / "responses.json").is_file()
        assert (folder / "manifest.json").is_file()
    assert Path(tuned["final_lora_archive"]).is_file()
    assert left_over(str(tmp_path)) == []


@pytest.mark.long
def test_ctrl_c_in_the_middle_leaves_no_process_and_resume_finishes(
    environment: dict[str, str], tmp_path: Path
) -> None:
    command = [COMMAND, "run", "quickstart", "--set", "graph.nodes.tune.training.max_steps=6"]
    log = tmp_path / "log"
    with log.open("w") as out:
        first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            eventually(
                lambda: re.search(r"before: .*(done|succeeded)", log.read_text()), within=300, what="one stage done"
            )
            first.send_signal(signal.SIGINT)
            assert first.wait(timeout=patient(60)) == 130
        finally:
            first.kill()
    assert left_over(str(tmp_path)) == []
    (run_id,) = set(re.findall(r"gpuflow resume ([0-9a-f-]{36})", log.read_text()))

    done = subprocess.run(
        [COMMAND, "resume", run_id, "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert {stage["state"] for stage in outcome(done.stdout).values()} == {"SUCCEEDED"}
    assert left_over(str(tmp_path)) == []
