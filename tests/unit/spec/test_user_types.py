"""Task types of users' own executors: their names, their section, and where they are registered."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.protocol import is_user_type
from gpuflow.routing.families import USER_TASK, task_of
from gpuflow.settings import Settings
from gpuflow.spec import canonical, parse
from gpuflow.spec.user_types import entries_of, registered, usable


def package(folder: Path, name: str, **points: str) -> Path:
    """Install a package that registers executors, as pip would leave it."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{task_type.replace('__', '.')} = {place}\n" for task_type, place in points.items())
    (info / "entry_points.txt").write_text(f"[gpuflow.executors]\n{lines}")
    return folder


@pytest.mark.parametrize("name", ["acme.translate", "acme.nlp.translate", "my-team.job_2", "a.b"])
def test_a_name_with_a_dot_is_a_users_own(name: str) -> None:
    assert is_user_type(name)
    assert task_of(name) == USER_TASK
    assert canonical({"taskType": name})["taskType"] == name


@pytest.mark.parametrize(
    "name", ["echo", "translate", ".x", "acme.", "Acme.x", "acme..x", "acme.x y", "", None, 3, "a" * 300]
)
def test_other_names_are_not(name: object) -> None:
    assert not is_user_type(name)


def test_parameters_are_free_and_other_sections_are_checked() -> None:
    spec = {"taskType": "acme.x", "parameters": {"deep": [{"n": 1.5}]}, "resources": "A100:1", "timeout": "2h"}

    assert canonical(spec)["parameters"] == {"deep": [{"n": 1.5}]}
    with pytest.raises(InvalidTemplate, match=r"training: is not used by taskType acme\.x"):
        canonical({"taskType": "acme.x", "training": {}})
    with pytest.raises(InvalidTemplate, match="parameters: is not used by taskType echo"):
        canonical({"taskType": "echo", "parameters": {}})
    with pytest.raises(InvalidTemplate, match=r"must be echo.*owner\.name"):
        canonical({"taskType": "translate"})


def test_a_reference_goes_into_parameters_and_a_base_section_it_does_not_use_is_left_out() -> None:
    template = parse(
        {
            "apiVersion": "gpuflow/v1",
            "kind": "Pipeline",
            "spec": {
                "data": {"items": ["a"]},
                "training": {"max_steps": 1},
                "stages": [
                    {"name": "one", "spec": {"taskType": "echo"}},
                    {"name": "two", "spec": {"taskType": "acme.x", "parameters": {"of": "${one.result.items}"}}},
                ],
            },
        }
    )

    (reference,) = template.stage("two").references
    assert (reference.name, reference.path) == ("one", ("items",))
    assert "training" not in template.stage("two").spec


def test_entries_name_modules_and_files() -> None:
    found = usable(entries_of("acme.a=pkg.mod:Class, acme.b=/a/b.py:Other"))

    assert {name: one.place for name, one in found.items() if name.startswith("acme.")} == {
        "acme.a": "pkg.mod:Class",
        "acme.b": "/a/b.py:Other",
    }


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("acme.a", "give owner.name=module:Class"),
        ("acme.a=module", "give owner.name=module:Class"),
        ("acme.a=module:not a name", "give owner.name=module:Class"),
        ("echo=module:Class", "names without a dot are gpuflow's own"),
        ("acme.a=m:C,acme.a=n:D", "names acme.a twice"),
    ],
)
def test_a_bad_entry_is_named(entry: str, problem: str) -> None:
    assert any(problem in one.problem for one in registered(entries_of(entry)))


def test_a_relative_file_is_relative_to_where_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "gpuflow.toml").write_text('executors = ["acme.a=./mine.py:Class", "acme.b=pkg.mod:Class"]\n')

    assert Settings.load(env={}, cwd=tmp_path).executors == (f"acme.a={tmp_path}/mine.py:Class", "acme.b=pkg.mod:Class")
    given = {"GPUFLOW_EXECUTORS": "acme.c=mine.py:Class"}
    assert Settings.load(env=given, cwd=tmp_path / "x").executors == (f"acme.c={tmp_path}/x/mine.py:Class",)


def test_packages_register_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path, "one", acme__x="one.mod:X", echo="one.mod:Y")))

    found = {one.task_type: one for one in registered(())}

    assert (found["acme.x"].place, found["acme.x"].package, found["acme.x"].problem) == ("one.mod:X", "one", "")
    assert "names without a dot are gpuflow's own" in found["echo"].problem
    assert "echo" not in usable(())


def test_a_type_that_two_packages_claim_is_none_until_somebody_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        monkeypatch.syspath_prepend(str(package(tmp_path / name, name, acme__x=f"{name}.mod:X")))

    assert "acme.x" not in usable(())
    assert any("registered by two and by one" in one.problem for one in registered(()))
    assert usable(("acme.x=two.mod:X",))["acme.x"].place == "two.mod:X"
