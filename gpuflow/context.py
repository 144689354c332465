"""What a team's function can tell and ask while it runs: progress, files, checkpoints, its GPUs, whether it is to end.

    from gpuflow import app, context

    @app.task(resources="A100:1")
    def train(steps):
        step = load(context.resume_from) if context.resume_from else 0
        while step < steps:
            step, loss = train_step(step)
            context.progress(step, steps, loss=loss)
            if context.should_stop():
                with context.checkpoint(step) as folder:
                    save(folder)
                raise context.Stopped(f"step {step} is saved")
        return context.artifact("model.safetensors")

The same calls work in the child of a function, in a task that runs in a thread of its worker, and outside of any
worker, in a script or a test: there progress and log go to Python's logging, files to the folders that OUTPUT_DIR and
CHECKPOINT_DIR name, or to a temporary one. Importing this loads neither Celery nor Redis.

Values, looked up at each use (so import the module, and not its names):

* `task_id`: the id of the task; None outside of one. `attempt`: which attempt of it this is, from 1.
* `gpus`: the UUIDs of the GPUs that are its own; [] for none.
* `output_dir`: the folder of what this attempt makes; the manifest of the task lists the files in it.
* `checkpoint_dir`: the folder of this attempt's checkpoints. `resume_from`: the newest complete checkpoint of an
  earlier attempt, a folder that `checkpoint` has given there; None for a fresh start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from gpuflow.checkpoints import mark_complete, remove, remove_old
from gpuflow.errors import ArtifactError, GPUFlowError
from gpuflow.protocol import complete_checkpoints, is_complete, write_whole
from gpuflow.surroundings import here

if TYPE_CHECKING:
    task_id: str | None
    attempt: int
    gpus: list[str]
    output_dir: Path
    checkpoint_dir: Path
    resume_from: Path | None

_VALUES: Final = frozenset({"task_id", "attempt", "gpus", "output_dir", "checkpoint_dir", "resume_from"})
#: The key of a reference to a file of a task (`gpuflow.spec.artifact_reference`).
_REFERENCE: Final = "$artifact"
#: What the worker itself writes into the output folder, and what it lists in no manifest.
_OF_THE_WORKER: Final = frozenset({"manifest.json", "logs", "checkpoints", "work", "result"})
_STEP: Final = re.compile(r"checkpoint-([0-9]+)")
_BLOCK_BYTES: Final = 1 << 20
_LONGEST_NAME: Final = 200

__all__ = [
    "Stopped",
    "artifact",
    "attempt",
    "checkpoint",
    "checkpoint_dir",
    "gpus",
    "local_path",
    "log",
    "output_dir",
    "progress",
    "resume_from",
    "should_stop",
    "task_id",
]


class Stopped(BaseException):
    """The function ends early because `should_stop()` said so; the message says what is saved.

    Its attempt is given back, and another one goes on, with `resume_from`; after a cancel that is the end. Raised
    though nobody asked for it, it is a failure. No `except Exception` and no `autoretry_for` catches it.
    """


def progress(
    done: float, total: float | None = None, message: str = "", *, unit: str = "step", **metrics: float
) -> None:
    """Tell how far the work is: `done` of `total` in `unit`, or a share from 0.0 to 1.0 (a float without a total).

    `metrics` are numbers such as `loss`; those of NumPy and torch will do, and what is not finite is left out. It shows
    in `gpuflow status` and `logs`, as Celery's state PROGRESS, and in Flower. Raises TypeError for what is no number.
    """
    current, whole = _number("done", done), None if total is None else _number("total", total)
    if current is None:
        raise TypeError(f"progress: done is {done}; give a finite number")
    if whole is None and isinstance(current, float) and 0.0 <= current <= 1.0:
        current, whole, unit = round(100 * current, 2), 100, "%"
    found = {name: number for name, value in metrics.items() if (number := _number(name, value)) is not None}
    event = {"current": current, "total": whole, "unit": unit, "metrics": found}
    here().progress({**event, "message": message} if message else event)


def log(text: object = "", **fields: Any) -> None:
    """Write a line to the log of the task (`gpuflow logs`): the text, and fields as `name=value`.

    In a thread of a worker it is a line of the worker's log, with the id of the task; elsewhere of Python's logging.
    """
    parts = [str(text)] if str(text) else []
    parts += [f"{name}={_shown(value)}" for name, value in fields.items()]
    here().log(" ".join(parts))


def artifact(path: str | os.PathLike[str], name: str | None = None, *, content: Any = None) -> dict[str, Any]:
    """Make a file part of the result, and return a reference to it, which another task can be given.

    A relative path is one in `output_dir`; a file or folder that lies elsewhere is copied there, as `name` or under its
    own name. With `content` the file is written: bytes or text as they are, anything else as JSON.

    The reference is JSON: `{"$artifact": {"url", "sha256", "bytes"}}`; that of a folder has no digest. `local_path` in
    another function gives its path; of a JSON file, templates and `gpuflow.load_reference` take it for its value.
    Raises ArtifactError for a name that leads out of the folder, or that the worker has for its own, and for what is
    not there; OSError from the disk.
    """
    place = here()
    root, given = place.output_dir.resolve(), Path(path)
    real = given.parent.resolve() / given.name
    if given.is_absolute():
        inside = real.relative_to(root).as_posix() if real.is_relative_to(root) else None
    else:
        inside = given.as_posix()
    source = given if inside is None else _target(root, inside)
    if content is not None:
        target = _target(root, name or inside or str(given))
        _write(target, content)
    else:
        target = source if inside is not None and name is None else _target(root, name or given.name)
        if target != source:
            _copy(source, target, str(path))
    if target.is_symlink() or not target.exists():
        cause = "it is a link" if target.is_symlink() else "there is no such file or folder"
        raise ArtifactError(f"artifact {str(path)!r}: {cause}; write it to {root} first, or give the path of a file")
    place.declare(target.relative_to(root).as_posix())
    return {_REFERENCE: _described(target)}


def local_path(reference: Mapping[str, Any]) -> Path:
    """Return the path of what `artifact` has returned a reference to, in this task or another one.

    The file is read and compared with its digest. Raises ArtifactError for what is no such reference, what is not to be
    had on this machine (it shares no RESULTS_DIR with the other one), and what was changed.
    """
    inside = reference.get(_REFERENCE) if isinstance(reference, Mapping) else None
    url = urlsplit(str(inside["url"])) if isinstance(inside, Mapping) and "url" in inside else None
    if not isinstance(inside, Mapping) or url is None or url.scheme != "file" or url.netloc:
        raise ArtifactError(f"no reference to a file of a task: {str(reference)[:200]}; give what artifact() returned")
    path, root = Path(unquote(url.path)), here().results_dir
    resolved = path.resolve()
    if root is not None and not resolved.is_relative_to(root.resolve()):
        raise ArtifactError(f"{path} is no file of a task: it lies outside of {root}, the results of this machine")
    if not resolved.exists():
        raise ArtifactError(f"{path} is not on this machine; let the workers share one RESULTS_DIR")
    if resolved.is_file() and _described(resolved).get("sha256") != inside.get("sha256"):
        raise ArtifactError(f"{path} is not what the reference says: it was changed since; run its task again")
    return path


@contextmanager
def checkpoint(step: int | str | None = None, *, keep: int = 2) -> Iterator[Path]:
    """Give a folder for a checkpoint, which counts as complete once the block has ended, and not before.

    `step` is the number of what is done; the highest one is the newest. A name is kept in the checkpoint's
    `complete.json`; it, and a checkpoint without a step, has the number after the newest. What a block has written that
    raises is removed. Of this attempt's checkpoints the newest `keep` stay. Raises GPUFlowError for a step that has
    one, OSError from the disk.
    """
    place = here()
    parent = place.checkpoint_dir
    number, more = _numbered(step, parent, place.resume_from)
    folder = parent / f"checkpoint-{number}"
    if is_complete(folder):
        raise GPUFlowError(f"checkpoint {number} of this attempt is complete already; give the step that it is of")
    remove(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
        mark_complete(folder, step=number, **more)
    except BaseException:
        remove(folder)
        raise
    place.saved(folder, number)
    remove_old(parent, keep=max(keep, 1))


def should_stop() -> bool:
    """Say whether the attempt is to end: its worker hands it back, or stops at once, or a user cancels it.

    It costs next to nothing: ask between steps. Then save what is worth it, and raise `Stopped`. There are
    GPUFLOW_NOTICE_SEC seconds after a notice, and GPUFLOW_GRACE_SEC more, which is all that there is after a cancel. A
    function that has asked once, on its main thread, is not ended by SIGTERM before that. A worker that only drains
    lets what runs finish, and says nothing here. A soft time limit raises, as in Celery, and a hard one ends it.
    """
    return here().should_stop()


def __getattr__(name: str) -> Any:
    if name in _VALUES:
        return getattr(here(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _number(name: str, value: Any) -> float | int | None:
    """Return a number as JSON holds it; None for one that is not finite."""
    if not isinstance(value, int | float) and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"progress: {name} is {type(value).__name__}; give a number")
    return value if math.isfinite(value) else None


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if re.search(r"[\s\"=]", text) or not text else text


def _target(root: Path, name: str) -> Path:
    """Return the path of a name in the output folder. Raises ArtifactError."""
    parts = PurePosixPath(name).parts
    cause = None
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        cause = "it leads out of the output folder"
    elif parts[0].startswith(".") or parts[0] in _OF_THE_WORKER:
        cause = "the worker keeps that name for its own"
    elif not (root / name).parent.resolve().is_relative_to(root):
        cause = "a link on the way leads out of the output folder"
    if cause is not None:
        raise ArtifactError(f"artifact {name!r}: {cause}; give a name such as model/weights.bin")
    return root.joinpath(*parts)


def _copy(source: Path, target: Path, shown: str) -> None:
    """Copy a file or a folder; a file appears by rename. Raises ArtifactError, OSError."""
    if not source.exists():
        raise ArtifactError(f"artifact {shown!r}: there is no such file or folder")
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if source.is_dir():
            shutil.copytree(source, fresh)
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
        else:
            shutil.copyfile(source, fresh)
        fresh.replace(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        with contextlib.suppress(OSError):
            fresh.unlink()


def _write(target: Path, content: Any) -> None:
    if isinstance(content, bytes | bytearray | memoryview):
        data = bytes(content)
    else:
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        data = text.encode("utf-8", "surrogatepass")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, data)


def _described(path: Path) -> dict[str, Any]:
    """Return where a file lies, its SHA-256 and its size; of a folder, where it lies and what its files weigh."""
    if path.is_dir():
        sizes = (one.stat().st_size for one in path.rglob("*") if one.is_file() and not one.is_symlink())
        return {"url": f"{path.as_uri()}/", "bytes": sum(sizes)}
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return {"url": path.as_uri(), "sha256": digest.hexdigest(), "bytes": size}


def _numbered(step: int | str | None, folder: Path, resumed: Path | None) -> tuple[int, dict[str, Any]]:
    """Return the number of a checkpoint, and what stands beside it in its marker."""
    if isinstance(step, bool) or (isinstance(step, int) and step < 0) or not isinstance(step, int | str | None):
        raise GPUFlowError(f"a checkpoint is of a step from 0 on, or has a name; got {step!r}")
    if isinstance(step, int):
        return step, {}
    if step is not None and not 0 < len(step) <= _LONGEST_NAME:
        raise GPUFlowError(f"a checkpoint's name has 1 to {_LONGEST_NAME} characters; got {len(step)}")
    earlier = [one for one in (resumed, *complete_checkpoints(folder)) if one is not None]
    numbers = [int(match[1]) for one in earlier if (match := _STEP.fullmatch(one.name))]
    return 1 + max(numbers, default=0), {} if step is None else {"name": step}
