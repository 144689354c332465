"""`gpuflow.context` outside of any worker, and in what a child makes of it."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpuflow
from gpuflow import context, surroundings
from gpuflow.errors import ArtifactError, GPUFlowError
from gpuflow.event_text import message
from gpuflow.protocol import Emitter, Request, complete_checkpoints, parse_line

VARIABLES = ("OUTPUT_DIR", "CHECKPOINT_DIR", "RESUME_FROM", "TASK_ID", "ATTEMPT", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output folder."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "output"))
    return tmp_path / "output"


def test_it_is_a_public_module_that_loads_neither_celery_nor_redis() -> None:
    assert gpuflow.context is context
    program = "import sys; from gpuflow import context; print({'celery', 'redis', 'pydantic'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"


def test_outside_of_a_worker_there_are_sensible_values(folder: Path) -> None:
    assert (context.task_id, context.attempt, context.gpus, context.should_stop()) == (None, 1, [], False)
    assert context.output_dir == folder and folder.is_dir()
    assert context.checkpoint_dir == folder / "checkpoints"
    assert context.resume_from is None
    with pytest.raises(AttributeError, match="no attribute 'gpu'"):
        context.gpu  # noqa: B018


def test_without_a_folder_there_is_a_temporary_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTPUT_DIR")
    monkeypatch.setattr(surroundings._Process, "outside", surroundings.Outside())
    monkeypatch.setattr(surroundings.tempfile, "mkdtemp", lambda prefix: str(folder / prefix))

    assert context.output_dir == context.output_dir == folder / "gpuflow-output-"


def test_what_a_task_has_started_sees_its_variables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TASK_ID": "one", "ATTEMPT": "3", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}.items():
        monkeypatch.setenv(name, value)

    assert (context.task_id, context.attempt, context.gpus) == ("one", 3, ["GPU-1", "GPU-2"])


def test_progress_and_log_are_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpuflow.context")

    context.progress(3, 60, "warming up", loss=1.25)
    context.progress(0.5)
    context.progress(7, unit="row", scaled=SimpleNamespace(item=lambda: 2), lost=float("nan"))
    context.log("a line", rows=7, name="two words")

    assert caplog.messages == [
        "progress 3/60 step warming up loss=1.25",
        "progress 50/100 %",
        "progress 7 row scaled=2",
        'a line rows=7 name="two words"',
    ]


@pytest.mark.parametrize("value", ["3", None, float("inf"), True])
def test_progress_is_a_number(folder: Path, value: object) -> None:
    with pytest.raises(TypeError, match="progress: done is"):
        context.progress(value)  # type: ignore[arg-type]


def test_a_file_of_the_folder_is_an_artifact(folder: Path) -> None:
    (context.output_dir / "model.bin").write_bytes(b"weights")

    reference = context.artifact("model.bin")

    inside = reference["$artifact"]
    assert inside["url"] == (folder / "model.bin").as_uri() and inside["bytes"] == 7
    assert inside["sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert context.local_path(json.loads(json.dumps(reference))) == folder / "model.bin"
    assert context.artifact(folder / "model.bin") == reference


def test_content_is_written(folder: Path) -> None:
    context.artifact("a/text.txt", content="text")
    context.artifact("raw.bin", content=b"\0\1")
    context.artifact(folder / "data.json", content={"rows": 3})

    assert (folder / "a" / "text.txt").read_text() == "text"
    assert (folder / "raw.bin").read_bytes() == b"\0\1"
    assert json.loads((folder / "data.json").read_text()) == {"rows": 3}
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


def test_what_lies_elsewhere_is_copied(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to(outside / "a.txt")

    file = context.artifact(outside / "a.txt")
    context.artifact(outside / "a.txt", "sub/b.txt")
    context.artifact(tmp_path / "link", "c.txt")
    whole = context.artifact(outside, "all")
    context.artifact(outside, "all")  # again

    assert context.local_path(file) == folder / "a.txt"
    assert (folder / "sub" / "b.txt").read_text() == (folder / "all" / "a.txt").read_text() == "a"
    assert not (folder / "c.txt").is_symlink() and (folder / "c.txt").read_text() == "a"
    assert whole["$artifact"] == {"url": f"{(folder / 'all').as_uri()}/", "bytes": 1}
    assert context.local_path(whole) == folder / "all"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../x", "leads out"),
        ("a/../../x", "leads out"),
        ("", "leads out"),
        ("a\0b", "leads out"),
        ("out/x", "a link on the way"),
        ("checkpoints/x", "keeps that name"),
        ("manifest.json", "keeps that name"),
        (".x", "keeps that name"),
    ],
)
def test_a_name_never_leaves_the_folder(folder: Path, tmp_path: Path, name: str, words: str) -> None:
    (context.output_dir / "out").symlink_to(tmp_path)
    (tmp_path / "x").write_text("not ours")
    (tmp_path / "source").write_text("source")

    for call in (
        lambda: context.artifact(name),
        lambda: context.artifact(name, content="y"),
        lambda: context.artifact(tmp_path / "source", name) if name else context.artifact(name),
    ):
        with pytest.raises(ArtifactError, match=words):
            call()

    assert (tmp_path / "x").read_text() == "not ours"
    with pytest.raises(ArtifactError, match="leads out"):
        context.artifact(tmp_path / "x", content="y")


def test_what_is_not_there_or_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (context.output_dir / "link").symlink_to(tmp_path)
    for path, words in (("none", "no such file"), (tmp_path / "none", "no such file"), ("link", "it is a link")):
        with pytest.raises(ArtifactError, match=words):
            context.artifact(path)


def test_a_reference_is_believed_in_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = context.artifact("one.txt", content="one")
    (folder / "one.txt").write_text("two")
    with pytest.raises(ArtifactError, match="was changed since"):
        context.local_path(reference)
    for wrong in ({}, {"$artifact": {"url": "https://x/y"}}, {"$artifact": "x"}, {"$artifact": {"url": "file://h/x"}}):
        with pytest.raises(ArtifactError, match="no reference to a file"):
            context.local_path(wrong)
    with pytest.raises(ArtifactError, match="share one RESULTS_DIR"):
        context.local_path({"$artifact": {"url": (tmp_path / "gone").as_uri()}})
    child = in_child(tmp_path / "results" / "one" / "attempt-1", monkeypatch)
    assert child.results_dir == tmp_path / "results"
    with pytest.raises(ArtifactError, match="lies outside of"):
        context.local_path(reference)


def test_a_checkpoint_is_complete_at_the_end_of_its_block_alone(folder: Path) -> None:
    with context.checkpoint(5) as place:
        (place / "state").write_text("5")
        assert complete_checkpoints(context.checkpoint_dir) == []
    assert context.resume_from == place == folder / "checkpoints" / "checkpoint-5"
    with pytest.raises(ZeroDivisionError), context.checkpoint(6) as broken:
        (broken / "state").write_text(str(1 / 0))
    assert not broken.exists() and context.resume_from == place
    with pytest.raises(GPUFlowError, match=r"checkpoint 5 .* is complete already"), context.checkpoint(5):
        pass


def test_names_count_on_and_the_newest_stay(folder: Path) -> None:
    for step in (None, "epoch one", 7, "last"):
        with context.checkpoint(step, keep=3) as place:
            pass
    kept = complete_checkpoints(context.checkpoint_dir)
    assert [path.name for path in kept] == ["checkpoint-2", "checkpoint-7", "checkpoint-8"]
    assert json.loads((place / "complete.json").read_text()) == {"step": 8, "name": "last"}


@pytest.mark.parametrize("step", [-1, True, 1.5, "", "x" * 201])
def test_a_step_is_a_number_or_a_name(folder: Path, step: object) -> None:
    with pytest.raises(GPUFlowError, match="checkpoint"), context.checkpoint(step):  # type: ignore[arg-type]
        pass


def in_child(
    output_dir: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None = None
) -> surroundings.InChild:
    output_dir.mkdir(parents=True)
    monkeypatch.setattr(surroundings._Process, "child", None)
    request = Request(
        task_id="one", task_type="function", spec={}, output_dir=str(output_dir), attempt=2, gpus=("GPU-1",),
        resume_from="/earlier/checkpoint-4",
    )  # fmt: skip
    return surroundings.begin_child(request, Emitter(stream or io.StringIO()))


def test_a_child_tells_by_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    in_child(tmp_path / "task" / "attempt-2", monkeypatch, stream)

    context.progress(1, 2, "half", loss=3)
    context.log("to the log")
    context.artifact("a.txt", content="a")
    with context.checkpoint() as place:
        pass

    events = [parse_line(line) for line in stream.getvalue().splitlines()]
    half = {"current": 1, "total": 2, "unit": "step", "metrics": {"loss": 3}, "message": "half"}
    assert [(one.name, one.data) for one in events] == [
        ("progress", half),
        ("artifact", {"path": "a.txt"}),
        ("checkpoint", {"path": str(place), "step": 5}),  # after the one that it goes on from
    ]
    assert capfd.readouterr().err == "to the log\n"
    assert (context.task_id, context.attempt, context.gpus) == ("one", 2, ["GPU-1"])
    assert context.resume_from == Path("/earlier/checkpoint-4")


def test_only_a_child_that_asks_holds_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = in_child(tmp_path / "task" / "attempt-2", monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert not child.should_stop()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        assert child.should_stop() and child.is_cancelled
        child.noticed = True
        assert child.should_stop() and not child.is_cancelled
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_notice_alone_is_no_cancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = in_child(tmp_path / "task" / "attempt-2", monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    try:
        child.noticed = True
        assert context.should_stop() and not child.is_cancelled
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_a_child_has_forked_ends_by_sigterm(tmp_path: Path) -> None:
    program = f"""
        import os, signal, sys
        from gpuflow import context, surroundings
        from gpuflow.protocol import Emitter, Request

        request = Request(task_id="one", task_type="function", spec={{}}, output_dir="{tmp_path}/one/attempt-1")
        surroundings.begin_child(request, Emitter(sys.stdout))
        context.should_stop()
        begun, begins = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(begins, b"x")
            signal.pause()
        os.read(begun, 1)
        os.kill(pid, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), context.should_stop())
    """

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.splitlines()[-1] == "-15 False"


def test_the_message_of_a_progress_stands_in_its_line() -> None:
    data = {"current": 50, "total": 100, "unit": "%", "metrics": {"loss": 1.5}, "message": "half"}

    assert message("progress", data) == "50/100 % loss=1.5: half"
