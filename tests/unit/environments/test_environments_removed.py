"""What is left of an environment goes, whatever has become of its definition; and a check waits for no build."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from gpuflow.environments import Place, find, note_problem
from gpuflow.environments.places import Marker
from tests.support.environments import Workshop
from tests.support.waiting import patient


def stand_in(workshop: Workshop, variant: str = "cpu", name: str = "tiny") -> Place:
    """Leave what a build leaves, but for the packages."""
    from gpuflow.environments import load

    place = Place(workshop.settings, name, variant)  # type: ignore[arg-type]
    place.home.mkdir(parents=True, exist_ok=True)
    digest = load(workshop.settings, name).digest("cpu")
    folder = place.new_folder(digest)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").touch()
    place.commit(
        Marker(
            name=name,
            variant=place.variant,
            digest=digest,
            folder=folder.name,
            python_version="3",
            built_at=1.0,
            build_seconds=1.0,
            size_bytes=1,
        )
    )
    return place


@pytest.mark.parametrize("definition", [None, "variants: {cpu: {steps: [[tinydep]]}}", "- no mapping", "good"])
def test_an_environment_goes_whatever_its_definition(workshop: Workshop, definition: str | None) -> None:
    place = stand_in(workshop)
    stand_in(workshop, "cuda")  # no variant of the definition any more
    file = workshop.env_dir / "tiny.yaml"
    if definition is None:
        file.unlink()
    elif definition != "good":
        file.write_text(definition)

    removed = workshop.call("remove", "tiny")

    assert removed.returncode == 0, removed.stderr
    assert removed.stdout.count("freed") == 2
    assert sorted(path.name for path in place.home.iterdir()) == ["cpu.lock", "cuda.lock"]


def test_one_variant_of_an_environment_without_definition(workshop: Workshop) -> None:
    place = stand_in(workshop)
    (workshop.env_dir / "tiny.yaml").unlink()

    other = workshop.call("remove", "tiny", "--variant", "cuda")
    this = workshop.call("remove", "tiny", "--variant", "cpu")

    assert (other.returncode, this.returncode) == (2, 0)
    assert "it has cpu" in other.stderr
    assert place.marker() is None


@pytest.mark.parametrize("name", ["nothing", "..", "../elsewhere", "tiny/../tiny", "gone"])
def test_what_is_no_environment_is_left_alone(workshop: Workshop, tmp_path: Path, name: str) -> None:
    stand_in(workshop)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "cpu-a-b").mkdir()
    (workshop.env_dir / "gone").mkdir()

    refused = workshop.call("remove", name)

    assert refused.returncode == 2
    assert "no environment" in refused.stderr
    assert (tmp_path / "elsewhere" / "cpu-a-b").is_dir()
    assert find(workshop.settings, "tiny") is not None


def test_a_problem_is_noted_but_for_a_build_that_goes_on(workshop: Workshop) -> None:
    place = stand_in(workshop)
    ready = find(workshop.settings, "tiny")
    assert ready is not None

    with place.locked():
        told = threading.Thread(target=note_problem, args=(workshop.settings, ready, "in a build"), daemon=True)
        told.start()
        told.join(timeout=patient(20))
        waits = told.is_alive()
    assert not waits
    assert json.loads(place.marker_file.read_text())["problem"] == ""

    note_problem(workshop.settings, ready, "it let a child down")
    assert json.loads(place.marker_file.read_text())["problem"] == "it let a child down"
    assert json.loads(place.marker_file.read_text())["checked_at"] <= time.time()
