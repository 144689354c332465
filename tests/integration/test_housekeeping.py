"""A real worker keeps its results folder and its model cache in bounds."""

from __future__ import annotations

import os
from pathlib import Path

from gpuflow.artifacts.partial import PartFile
from gpuflow.client import submit
from tests.support.fleet import TestFleet
from tests.support.waiting import eventually, patient

YEAR = 365 * 86_400


def make_old(path: Path) -> None:
    for one in [path, *path.rglob("*")]:
        at = one.lstat().st_mtime - YEAR
        os.utime(one, (at, at), follow_symlinks=False)


def test_an_old_final_task_goes_and_an_unfinished_one_stays(fleet: TestFleet) -> None:
    fleet.start_worker("w1")
    done, known, waiting = (submit(fleet.echo(), app=fleet.app) for _ in range(3))
    for task in (done, known, waiting):
        task.get(timeout=patient(30))
    fleet.workers[0].stop()
    (fleet.results / ".gpuflow-parts-cleaning").unlink()  # the next turn is due
    for task in (done, known, waiting):
        make_old(fleet.results / task.id)
    with PartFile(fleet.results / "uploads" / "x", "broken off") as part:
        part.append(b"half")
    make_old(part.path)
    (fleet.results / "mine").mkdir()
    make_old(fleet.results / "mine")
    client, keys = fleet.app.redis, fleet.app.keys
    client.delete(keys.task(done.id))  # as its expiry does
    client.hset(keys.task(waiting.id), mapping={"state": "QUEUED"})
    client.persist(keys.task(waiting.id))

    worker = fleet.start_worker("w2")

    eventually(lambda: not (fleet.results / done.id).exists(), within=30, what="the end of the old folder")
    assert (fleet.results / known.id / "attempt-1").is_dir()
    assert (fleet.results / waiting.id / "attempt-1").is_dir()
    assert (fleet.results / "mine").is_dir()
    eventually(lambda: not part.path.exists(), within=30, what="the end of the stale part")
    assert "record_gone" in eventually(lambda: worker.log() if "record_gone" in worker.log() else "", what="its line")


def test_a_worker_keeps_its_model_cache_below_the_limit(fleet: TestFleet) -> None:
    models = fleet.folder / "cache" / "models"
    for name, age in (("old", YEAR), ("new", 0)):
        (models / name).mkdir(parents=True)
        (models / name / "weights").write_bytes(b"x" * 60_000)
        at = (models / name).stat().st_mtime - age
        os.utime(models / name, (at, at))

    worker = fleet.start_worker("w1", env={"GPUFLOW_MODEL_CACHE_MAX_BYTES": "100kB"})

    eventually(lambda: not (models / "old").exists(), within=60, what="the end of the old model")
    assert (models / "new" / "weights").exists()
    eventually(lambda: "removed models/old" in worker.log(), what="its line in the log")
