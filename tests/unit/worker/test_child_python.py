"""By which Python a child starts, and what a worker offers as environments come and go; no large library, no pip."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import yaml

from gpuflow.environments import Place, load
from gpuflow.environments.places import Marker, interpreter
from gpuflow.settings import Settings
from gpuflow.worker.child_python import EnvironmentNotReady
from gpuflow.worker.outcome import cause_of
from gpuflow.worker.supported_runtimes import SupportedRuntimes

NAMED = {"inference": None, "echo": None, "acme.here": None, "acme.aside": "aside"}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr("gpuflow.environments.standing.find_spec", lambda _: object())  # as if all were installed
    aside = {
        "task_types": {"acme.served": []},
        "variants": {"cpu": {"steps": [["a==1"]], "size_gb": 1}},
    }
    (tmp_path / "aside.yaml").write_text(yaml.safe_dump(aside), "utf-8")
    return Settings.load(env={"GPUFLOW_ENV_DIR": str(tmp_path)}, cwd=tmp_path)


def build(settings: Settings, name: str, problem: str = "") -> Path:
    """Make a folder and a marker as a build leaves them; return its Python."""
    place = Place(settings, name, "cpu")
    place.home.mkdir(exist_ok=True)
    folder = place.new_folder("0")
    python = interpreter(folder)
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    digest = load(settings, name).digest("cpu")
    marker = Marker(
        name=name, variant="cpu", digest=digest, folder=folder.name, python_version="3", built_at=time.time(),
        build_seconds=1, size_bytes=1, problem=problem,
    )  # fmt: skip
    place.commit(marker)
    return python


def ask(task_type: str = "inference", **fields: str) -> dict[str, str]:
    return {"taskType": task_type, **fields}


def test_a_built_one_is_chosen_and_its_child_knows(settings: Settings) -> None:
    python = build(settings, "vllm")

    chosen = SupportedRuntimes(settings, NAMED, gpus=False).python_of(ask(), gpus=False)

    assert (chosen.argv, chosen.engine) == ((str(python), "-P", "-m", "executors"), "vllm")
    given = chosen.variables({"VLLM_CPU_KVCACHE_SPACE": "8", "PYTHONPATH": "/here"})
    assert given["GPUFLOW_ENVIRONMENT"] == given["GPUFLOW_ENGINE"] == "vllm"
    assert (given["VLLM_CPU_KVCACHE_SPACE"], given["VLLM_NO_USAGE_STATS"]) == ("8", "1")  # the task's own goes before
    assert (Path(given["PYTHONPATH"]) / "executors").is_dir()


def test_what_was_installed_beside_gpuflow_starts_as_ever(settings: Settings) -> None:
    chosen = SupportedRuntimes(settings, NAMED, gpus=False).python_of(ask("echo"), gpus=False)

    assert chosen.argv == (sys.executable, "-P", "-m", "executors")
    assert chosen.variables({"PYTHONPATH": "/here"}) == {"PYTHONPATH": "/here", "GPUFLOW_ENVIRONMENT": "default"}


def test_an_engine_that_is_named_has_no_stand_in(settings: Settings) -> None:
    supported_runtimes = SupportedRuntimes(settings, NAMED, gpus=False)

    with pytest.raises(EnvironmentNotReady) as raised:
        supported_runtimes.python_of(ask(engine="vllm"), gpus=False)

    assert str(raised.value) == (
        "inference by engine vllm cannot run on this worker: environment vllm (cpu) is not built; "
        "run `gpuflow env create vllm --variant cpu` on this machine"
    )
    assert cause_of(raised.value)["retryable"]
    assert "inference:vllm" in supported_runtimes.plain.lacking


def test_environments_that_come_and_go_are_noticed(settings: Settings) -> None:
    supported_runtimes = SupportedRuntimes(settings, NAMED, gpus=False)
    assert {"inference:vllm", "acme.aside"} & supported_runtimes.plain.names == set()

    build(settings, "vllm")
    python = build(settings, "aside")
    supported_runtimes.look()

    assert {"inference:vllm", "acme.aside"} <= supported_runtimes.plain.names
    assert supported_runtimes.python_of(ask("acme.aside"), gpus=False).use.python == python

    python.unlink()

    with pytest.raises(EnvironmentNotReady, match=r"of environment aside has gone; run `gpuflow env create aside"):
        supported_runtimes.python_of(ask("acme.aside"), gpus=False)
    supported_runtimes.look()
    assert "acme.aside" not in supported_runtimes.plain.names
    assert "cannot be used: its Python" in supported_runtimes.plain.lacking["acme.aside"].why


def test_one_that_let_a_child_down_is_not_offered_until_a_check_passes(settings: Settings) -> None:
    build(settings, "vllm")
    supported_runtimes = SupportedRuntimes(settings, NAMED, gpus=False)

    supported_runtimes.let_down(supported_runtimes.python_of(ask(), gpus=False), "a child could not begin in it")

    assert supported_runtimes.python_of(ask(), gpus=False).engine == "transformers"
    lack = supported_runtimes.plain.lacking["inference:vllm"]
    assert lack.why == "environment vllm (cpu) cannot be used: a child could not begin in it"
    assert lack.mend == "`gpuflow env create vllm --variant cpu --force`"


def test_gpus_choose_the_variant(settings: Settings) -> None:
    build(settings, "vllm")
    supported_runtimes = SupportedRuntimes(settings, NAMED, gpus=True)

    assert supported_runtimes.python_of(ask(), gpus=False).engine == "vllm"
    assert supported_runtimes.python_of(ask(), gpus=True).engine == "transformers"
    assert not supported_runtimes.same
    assert "inference:vllm" in supported_runtimes.plain.names - supported_runtimes.with_gpus.names
    assert supported_runtimes.with_gpus.lacking["inference:vllm"].mend == "`gpuflow env create vllm --variant cuda`"
    assert set(supported_runtimes.to_dict()) == {"cpu", "gpu"}
