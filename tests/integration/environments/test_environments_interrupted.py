"""Builds that are killed, interrupted, made twice at once, or fail: no half environment ever counts."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gpuflow.environments.installing import _cause, _mend
from tests.support.environments import YAML_VERSION, Workshop, make_endless_sdist, make_wheel
from tests.support.waiting import eventually, patient

Begin = Callable[..., "subprocess.Popen[str]"]


def in_pip(workshop: Workshop, told: Path) -> None:
    """Let the build hang in pip, in a build of a source package."""
    make_endless_sdist(workshop.wheels, "endless", "1.0", told)
    workshop.define(recipe={"steps": [["tinydep==1.0"], ["endless==1.0"]]})


def in_check(workshop: Workshop, told: Path) -> None:
    """Let the build hang in its check: all is installed, and nothing said so yet."""
    code = f"""
import os, signal
with open({str(told)!r} + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename({str(told)!r} + ".new", {str(told)!r})
while True:
    signal.pause()
"""
    workshop.define(recipe={"code": code})


def wait_for_child(told: Path) -> psutil.Process:
    eventually(told.exists, within=60, what="the build to come to where it hangs")
    return psutil.Process(int(told.read_text()))


@pytest.mark.parametrize("hang", [in_pip, in_check])
def test_kill_9_in_the_middle_leaves_no_process_and_nothing_that_counts(
    workshop: Workshop, begun: Begin, tmp_path: Path, hang: Callable[[Workshop, Path], None]
) -> None:
    hang(workshop, tmp_path / "told")
    creating = begun("create", "tiny", "--wheelhouse", str(workshop.wheels))
    child = wait_for_child(tmp_path / "told")
    assert workshop.status() == "building"

    creating.send_signal(signal.SIGKILL)
    creating.communicate()

    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, what="the child to end")
    eventually(lambda: workshop.status() == "absent", what="the lock to be free")
    assert len(workshop.folders()) == 1  # what was half built: it counts for nothing
    assert workshop.call("check", "tiny").returncode == 1

    workshop.define()
    if hang is in_pip:
        assert workshop.call("remove", "tiny").returncode == 0
        assert workshop.folders() == []
        return
    assert workshop.create().returncode == 0
    assert workshop.status() == "ready"
    assert len(workshop.folders()) == 1


def test_sigterm_ends_a_build_and_leaves_nothing(workshop: Workshop, begun: Begin, tmp_path: Path) -> None:
    in_pip(workshop, tmp_path / "told")
    creating = begun("create", "tiny", "--wheelhouse", str(workshop.wheels))
    child = wait_for_child(tmp_path / "told")

    creating.terminate()
    creating.communicate()

    assert creating.returncode == 128 + signal.SIGTERM
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, what="the child to end")
    assert workshop.folders() == []
    assert workshop.status() == "absent"


def test_of_two_creates_one_builds_and_the_other_waits_and_uses_it(
    workshop: Workshop, begun: Begin, tmp_path: Path
) -> None:
    gate, count = tmp_path / "gate", tmp_path / "count"
    os.mkfifo(gate)
    workshop.define(recipe={"code": f"open({str(count)!r}, 'a').write('.'); open({str(gate)!r}).read()"})
    arguments = ("create", "tiny", "--force", "--wheelhouse", str(workshop.wheels))
    first = begun(*arguments)
    eventually(count.exists, within=60, what="the first to come to its check")

    second = begun(*arguments)
    assert second.stderr is not None
    assert "another process builds tiny (cpu); waiting" in second.stderr.readline()
    gate.write_text("go on")
    outputs = [process.communicate(timeout=patient(60)) for process in (first, second)]

    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    assert "built in" in outputs[0][0]
    assert "was here" in outputs[1][0]
    assert count.read_text() == "."
    assert len(workshop.folders()) == 1


def test_a_build_that_replaces_one_leaves_the_former_in_use_until_it_is_whole(built: Workshop) -> None:
    before = built.folders()
    make_wheel(built.wheels, "tinydep", "2.0", {"tinydep.py": b"raise ValueError('bad release')\n"})
    built.define(recipe={"steps": [["tinydep==2.0", f"PyYAML=={YAML_VERSION}"]]})

    failed = built.create("tiny", "--force")
    built.define()

    assert failed.returncode == 1
    assert "was built but does not work: import tinydep: ValueError: bad release" in failed.stderr
    assert built.status() == "ready"
    assert built.folders() == before


def test_a_missing_package_is_named_with_the_mend_and_nothing_is_left(workshop: Workshop) -> None:
    workshop.define(recipe={"steps": [["tinydep==1.0"], ["not-to-be-had==7.1"]]})

    failed = workshop.create()

    assert failed.returncode == 1
    line = failed.stderr.splitlines()[-1]
    assert line.startswith("gpuflow: pip could not install not-to-be-had==7.1: No matching distribution found for")
    assert "give the wheels with --wheelhouse DIR" in line
    assert (workshop.env_dir / "tiny" / "cpu.log").read_text("utf-8").count("$ pip install") == 2
    assert workshop.folders() == []
    assert workshop.status() == "absent"


def test_a_file_system_that_takes_no_more_fails_the_build_and_leaves_nothing(workshop: Workshop, begun: Begin) -> None:
    make_wheel(workshop.wheels, "large", "1.0", {"large.bin": bytes(8 << 20)})
    workshop.define(recipe={"steps": [["large==1.0"]]})
    limit = 4 << 20

    creating = begun(
        "create",
        "tiny",
        "--wheelhouse",
        str(workshop.wheels),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    _, said = creating.communicate(timeout=patient(60))

    assert creating.returncode == 1
    assert "pip could not install large==1.0: Could not install packages due to an OSError" in said
    assert "make room on that disk, or set GPUFLOW_ENV_DIR to a larger one" in said
    assert workshop.folders() == []


def test_a_full_disk_is_said_in_pips_words_with_the_mend() -> None:
    said = [
        "Installing collected packages: torch",
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
    ]

    assert _cause(said, 1) == "Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert _mend(said) == "make room on that disk, or set GPUFLOW_ENV_DIR to a larger one"


def test_too_little_room_is_said_before_anything_is_fetched(workshop: Workshop) -> None:
    workshop.define(recipe={"size_gb": 1e9})

    failed = workshop.create()

    assert failed.returncode == 1
    assert "needs about 1400000000.0 GB to be built" in failed.stderr
    assert "set GPUFLOW_ENV_DIR to a larger disk" in failed.stderr
    assert workshop.folders() == []
