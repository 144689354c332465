"""A built environment: what it holds, how it is found, what its check sees, and how it is mended and removed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpuflow.cli.checks_environments import built_environments
from gpuflow.environments import Place, find, python_of, working
from gpuflow.environments.packages import packages_path
from gpuflow.errors import GPUFlowError
from tests.support.environments import YAML_VERSION, Workshop


def test_it_is_listed_found_and_checked(built: Workshop) -> None:
    row = next(row for row in json.loads(built.call("list", "--json").stdout) if row["name"] == "tiny")
    path = built.call("path", "tiny").stdout.strip()
    checked = json.loads(built.call("check", "tiny", "--json").stdout)

    assert (row["status"], row["variant"], row["path"], row["task_types"]) == ("ready", "cpu", path, ["tiny"])
    assert row["size_bytes"] > 1_000_000
    assert [(one["ok"], one["versions"]) for one in checked] == [(True, {"tinydep": "1.0", "PyYAML": YAML_VERSION})]


def test_a_worker_gets_its_python_variables_and_task_types(built: Workshop) -> None:
    ready = find(built.settings, "tiny")

    assert ready is not None
    assert ready.python == built.folders()[0] / "bin" / "python"
    assert ready.task_types == {"tiny"}
    assert ready.variables == {"TINY": "yes"}
    assert working(built.settings) == {"default": Path(sys.executable), "tiny": ready.python}
    assert python_of(built.settings, "default", gpus=True) == Path(sys.executable)


def test_a_child_in_it_sees_our_packages_and_nothing_else_of_ours(built: Workshop) -> None:
    ready = find(built.settings, "tiny")
    assert ready is not None
    program = (
        "import importlib.util as u, json, executors.__main__, gpuflow.protocol, gpuflow.spec.presets as p, sys;"
        "print(json.dumps([sys.prefix, [bool(u.find_spec(n)) for n in ('tinydep', 'celery', 'redis', 'click')],"
        " p.list_presets('environments')]))"
    )

    done = subprocess.run(
        [str(ready.python), "-P", "-c", program],
        env={"PYTHONPATH": ready.python_path or ""},
        cwd=built.root,
        capture_output=True,
        text=True,
        check=True,
    )

    prefix, seen, presets = json.loads(done.stdout)
    assert prefix == str(built.folders()[0])
    assert seen == [True, False, False, False]
    assert "vllm" in presets
    assert sorted(path.name for path in packages_path(built.settings).iterdir()) == ["executors", "gpuflow"]


def test_creating_it_again_builds_nothing(built: Workshop) -> None:
    before = built.folders()

    done = built.create()

    assert done.returncode == 0
    assert "was here" in done.stdout
    assert built.folders() == before


def test_scripts_in_it_name_the_folder_where_they_lie(built: Workshop) -> None:
    (folder,) = built.folders()

    assert (folder / "bin" / "pip").read_text("utf-8").startswith(f"#!{folder}/bin/python")
    assert not (folder / ".tmp").exists()


def test_what_breaks_is_found_by_check_kept_from_workers_and_mended_by_force(built: Workshop) -> None:
    (folder,) = built.folders()
    next(folder.glob("lib/python*/site-packages/tinydep.py")).write_text("raise ValueError('rotten')")

    checked = built.call("check", "tiny")

    assert checked.returncode == 1
    assert "import tinydep: ValueError: rotten" in checked.stdout
    assert "run `gpuflow env create tiny --variant cpu --force`" in checked.stdout
    assert built.status() == "broken"
    assert "tiny" not in working(built.settings)
    (found,) = built_environments(built.settings)
    assert (found.name, found.status) == ("env tiny (cpu)", "fail")
    assert found.mend == "run `gpuflow env create tiny --variant cpu --force`"
    with pytest.raises(GPUFlowError, match=r"cannot be used: import tinydep: .* --force` on this machine"):
        python_of(built.settings, "tiny")

    assert built.create("tiny", "--force").returncode == 0

    assert built.status() == "ready"
    assert [one.status for one in built_environments(built.settings)] == ["ok"]
    assert len(built.folders()) == 1
    assert built.folders() != [folder]


@pytest.mark.parametrize(
    ("dist_info", "new_version", "problem"),
    [("tinydep", "1.1", "tinydep is 1.1, not 1.0"), ("unwanted", "1.0", "unwanted 1.0 is installed, which must not")],
)
def test_check_compares_what_is_installed_with_the_pins(
    built: Workshop, dist_info: str, new_version: str, problem: str
) -> None:
    site = next(built.folders()[0].glob("lib/python*/site-packages"))
    info = site / f"{dist_info}-1.0.dist-info"
    made = not info.exists()
    info.mkdir(exist_ok=True)
    before = (info / "METADATA").read_text("utf-8") if not made else None
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist_info}\nVersion: {new_version}\n", "utf-8")

    broken = built.call("check", "tiny")
    if before is None:
        (info / "METADATA").unlink()
        info.rmdir()
    else:
        (info / "METADATA").write_text(before, "utf-8")

    assert broken.returncode == 1
    assert problem in broken.stdout
    assert built.call("check", "tiny").returncode == 0  # and what it found is remembered
    assert built.status() == "ready"


def test_other_pins_make_it_outdated_until_it_is_created_again(built: Workshop) -> None:
    built.define(recipe={"uninstall": []})

    assert built.status() == "outdated"
    assert "tiny" not in working(built.settings)
    assert "pins are not those" in built.call("check", "tiny").stdout

    built.define(description="pins as before, another text", check={"imports": []})

    assert built.status() == "ready"
    built.define()


def test_a_python_that_has_gone_is_seen_without_a_check(built: Workshop) -> None:
    python = built.folders()[0] / "bin" / "python"
    target = python.readlink()
    python.unlink()
    python.symlink_to("/nowhere/python")
    try:
        assert built.status() == "broken"
        assert "tiny" not in working(built.settings)
        assert "--force" in built.call("check", "tiny").stdout
    finally:
        python.unlink()
        python.symlink_to(target)
    assert built.status() == "broken"  # the check found it so, and a check takes it back
    assert built.call("check", "tiny").returncode == 0
    assert built.status() == "ready"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "name": "tiny"}'])
def test_a_marker_that_cannot_be_read_counts_as_none(built: Workshop, text: str) -> None:
    place = Place(built.settings, "tiny", "cpu")
    before = place.marker_file.read_text("utf-8")
    place.marker_file.write_text(text, "utf-8")

    found = find(built.settings, "tiny")
    place.marker_file.write_text(before, "utf-8")

    assert found is None


def test_what_is_in_use_is_not_removed(built: Workshop) -> None:
    python = built.folders()[0] / "bin" / "python"
    with subprocess.Popen(
        [str(python), "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None
        user.stdout.readline()
        refused = built.call("remove", "tiny")
        user.communicate("\n")

    assert refused.returncode == 1
    assert f"in use by process {user.pid}" in refused.stderr
    assert built.status() == "ready"


def test_a_check_that_hangs_is_ended_in_time(built: Workshop, tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = f"import os, signal; open({str(told)!r}, 'w').write(str(os.getpid())); signal.pause()"
    built.define(recipe={"code": code}, check={"timeout_seconds": 3})

    failed = built.call("check", "tiny")
    built.define()

    assert failed.returncode == 1
    assert "its check was not done after 3 s" in failed.stdout
    assert not told.exists() or not psutil.pid_exists(int(told.read_text()))
    assert built.call("check", "tiny").returncode == 0


def test_remove_leaves_nothing_of_it(workshop: Workshop) -> None:
    assert workshop.create().returncode == 0

    removed = workshop.call("remove", "tiny")

    assert "freed" in removed.stdout
    assert workshop.status() == "absent"
    assert [path.name for path in (workshop.env_dir / "tiny").iterdir()] == ["cpu.lock"]
    assert "not built" in workshop.call("remove", "tiny").stderr
    assert workshop.call("check", "tiny").returncode == 1
    assert workshop.call("path", "tiny").returncode == 1
