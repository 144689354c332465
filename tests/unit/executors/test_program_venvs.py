"""The environments of programs: made once for the same content, and never what another task has made of them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from executors.base import ExecutorError
from executors.programs import venvs
from executors.programs.venvs import Wanted, python_for
from gpuflow.protocol import Emitter

NAME = "tiny_greeting-1.0-py3-none-any.whl"


class Pip:
    """Makes an environment as `venv` and `pip` do, from wheels alone, and keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []

    def __call__(self, argv: Sequence[str], environment: Mapping[str, str], what: str) -> None:
        if argv[1:3] == ["-m", "venv"]:
            place = Path(argv[3])
            (place / "lib" / "python3" / "site-packages").mkdir(parents=True)
            return
        wanted = list(argv[argv.index("--") + 1 :])
        self.given.append(wanted)
        self.environments.append(environment)
        for one in wanted:
            if one.endswith(".whl"):
                with zipfile.ZipFile(one) as archive:
                    archive.extractall(installed(Path(argv[0])))


def installed(python: Path) -> Path:
    return python.parents[1] / "lib" / "python3" / "site-packages"


def says(python: Path) -> str:
    return (installed(python) / "tiny_greeting.py").read_text()


def write_wheel(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_greeting.py", text)
    return path


@pytest.fixture
def emitter() -> Emitter:
    return Emitter(io.StringIO())


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    made = Pip()
    monkeypatch.setattr(venvs, "_call", made)
    return made


def test_what_changes_under_its_name_is_installed_again(tmp_path: Path, emitter: Emitter, pip: Pip) -> None:
    wheel, root = write_wheel(tmp_path / NAME, "one"), tmp_path / "cache"
    first = python_for(Wanted(requirements=[str(wheel)]), root, emitter)
    assert says(first) == "one"
    assert python_for(Wanted(requirements=[str(wheel)]), root, emitter) == first

    # Another content is another environment; the first one is there for whoever runs in it.
    write_wheel(wheel, "two")
    second = python_for(Wanted(requirements=[str(wheel)]), root, emitter)
    assert (says(second), says(first)) == ("two", "one")

    # The same content elsewhere, in a project, is the same.
    write_wheel(tmp_path / "project" / "lib" / NAME, "").write_bytes(wheel.read_bytes())
    project = Wanted(requirements=[f"./lib/{NAME}"], project=tmp_path / "project")
    assert python_for(project, root, emitter) == second

    # What a program has installed there by itself is not for others.
    (installed(second) / "intruder-6.6.dist-info").mkdir()
    third = python_for(Wanted(requirements=[str(wheel)]), root, emitter)
    assert third != second
    assert says(third) == "two"
    assert python_for(Wanted(requirements=[str(wheel)]), root, emitter) == third
    assert len(pip.given) == 3


def test_a_file_that_is_being_written_is_tried_again(
    tmp_path: Path, emitter: Emitter, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(tmp_path / NAME, "one")

    def copy_of_another(source: Path, target: Path) -> None:
        target.write_text("half")

    monkeypatch.setattr(venvs.shutil, "copyfile", copy_of_another)
    with pytest.raises(ExecutorError, match="is being written to") as caught:
        python_for(Wanted(requirements=[str(wheel)]), tmp_path, emitter)
    assert caught.value.retryable


def test_the_settings_of_one_task_do_not_reach_the_environments_of_others(
    tmp_path: Path, emitter: Emitter, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = {"PIP_INDEX_URL": "https://me:s3cret@mine", "HTTPS_PROXY": "http://p", "HOME": "/mine"}
    env = {"LD_PRELOAD": "x.so", "PIP_EXTRA_INDEX_URL": "https://theirs"}
    for name, value in {**secret, **env, "PYTHONPATH": "/of/somebody", "OF_THE_WORKER": "yes"}.items():
        monkeypatch.setenv(name, value)
    wanted = Wanted(requirements=["six"], env=frozenset(env), secrets=frozenset(secret))

    mine = python_for(wanted, tmp_path, emitter)
    assert python_for(wanted, tmp_path, emitter) == mine
    other = python_for(Wanted(requirements=["six"]), tmp_path, emitter)
    monkeypatch.setenv("PIP_INDEX_URL", "https://third")
    third = python_for(wanted, tmp_path, emitter)

    assert len({mine, other, third}) == 3
    (given, *_) = pip.environments
    assert (given["PIP_INDEX_URL"], given["HTTPS_PROXY"]) == (secret["PIP_INDEX_URL"], "http://p")
    assert given["OF_THE_WORKER"] == "yes"
    assert not {"HOME", "LD_PRELOAD", "PIP_EXTRA_INDEX_URL", "PYTHONPATH"} & set(given)
    assert "s3cret" not in (mine.parents[1] / "complete.json").read_text()


@pytest.mark.parametrize(
    ("wanted", "says_why"),
    [
        (Wanted(requirements=["--pre"]), "is an option of pip"),
        (Wanted(requirements=["/no/such-1.0-py3-none-any.whl"]), "is no file on this worker"),
        (Wanted(requirements=[f"./{NAME}"]), "is a file of a project"),
        (Wanted(requirements=["six"], secrets={"PIP_TARGET"}), "secrets: PIP_TARGET is not taken"),
        (Wanted(requirements=["six"], python="no-such-python"), "is not on this worker"),
    ],
)
def test_what_is_not_taken_is_told(tmp_path: Path, emitter: Emitter, wanted: Wanted, says_why: str) -> None:
    with pytest.raises(ExecutorError, match=says_why) as caught:
        python_for(wanted, tmp_path, emitter)
    assert caught.value.type == "BadInput"
    assert not (tmp_path / "venvs").exists()


def test_a_link_does_not_lead_out_of_the_project(tmp_path: Path, emitter: Emitter) -> None:
    write_wheel(tmp_path / "outside" / NAME, "outside")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / NAME).symlink_to(tmp_path / "outside" / NAME)

    with pytest.raises(ExecutorError, match="leads out of the project"):
        python_for(Wanted(requirements=[NAME], project=tmp_path / "project"), tmp_path, emitter)
