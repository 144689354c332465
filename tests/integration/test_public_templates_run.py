"""The public templates of FlowMesh run by `gpuflow run` as a new user has it, with a tiny model in place of theirs.

What is swapped is in `tests.support.public_templates`; all else is as in their files. As a program it prints the table
of docs/howto/coming-from-flowmesh.md: `python -m tests.integration.test_public_templates_run [NAME...]`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from executors.modeling.presets import prepared_folder
from gpuflow.cluster.commands import with_our_packages
from gpuflow.spec.presets import load_preset
from tests.fixtures.fake_qdrant import fake_qdrant
from tests.fixtures.tiny_model import PAIRS, make_tiny_model
from tests.support.engines import build
from tests.support.public_templates import NEED_VLLM, TEMPLATES, Stand, runnable
from tests.support.waiting import patient

pytestmark = [pytest.mark.ml, pytest.mark.timeout(900)]

CHAT, EMBEDDING = "smollm2-135m-instruct", "all-minilm-l6-v2"
KEY = "example-key"
#: Those that run each time: a graph with a condition, a chat with exported rows, and a chain of LoRA and inference.
SHORT = ("conditional_echo_test", "inference_hf_chat", "lora_then_inference")
RUN = tuple(name for name in TEMPLATES if name not in NEED_VLLM)
#: In an environment of its own, which `tox -e ml` lays over this Python, or GPUFLOW_ENV_DIR holds.
PPO = tuple(name for name in TEMPLATES if name.startswith("ppo_"))


@dataclass(frozen=True, kw_only=True)
class Done:
    seconds: float
    code: int
    stages: list[dict[str, Any]]
    said: str


@contextmanager
def standing(folder: Path) -> Iterator[Stand]:
    """Make what stands in for models, data and services."""
    # Its answers end at their limit: to TRL's PPO an answer of one token in a batch of one is NaN.
    for preset in (EMBEDDING, CHAT):
        place = prepared_folder(preset, load_preset("models", preset), str(folder / "cache"))
        _without_early_end(make_tiny_model(place, positions=16_384))
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps(
                {
                    "question": pair["prompt"],
                    "answer": pair["completion"],
                    "prompt": f"def {pair['prompt'].split()[-1][:-1]}():",
                    "canonical_solution": "    return 1",
                }
            )
            + "\n"
            for pair in PAIRS
        ),
        "utf-8",
    )
    points = [
        {"id": n, "vector": [1.0 / (n + 1)] * 128, "payload": {"text": one["prompt"]}} for n, one in enumerate(PAIRS)
    ]
    collections = {"demo_collection": {"size": 128, "points": points}}
    with fake_qdrant(collections=collections, key=KEY) as qdrant:
        yield Stand(
            chat=CHAT,
            embedding=EMBEDDING,
            sentiment=str(_classifier(folder)),
            rows=str(rows),
            qdrant=qdrant.url,
            receiver=f"{qdrant.url}/results",
        )


def _without_early_end(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    # The tokens that end an answer and that fill up a batch: all others are a thousand times likelier.
    weights["lm_head.weight"][:2] = 0.0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def _classifier(folder: Path) -> Path:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tiny = make_tiny_model(folder / "tiny", positions=1024)
    names = {0: "negative", 1: "positive"}
    made = AutoModelForSequenceClassification.from_pretrained(
        tiny, num_labels=2, id2label=names, label2id={name: number for number, name in names.items()}
    )
    made.save_pretrained(folder / "sentiment")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "sentiment")
    return folder / "sentiment"


def run(name: str, folder: Path, stand: Stand) -> Done:
    """Run one template from an empty home, in an empty folder."""
    place = folder / name
    place.mkdir()
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(runnable(name, stand), sort_keys=False), "utf-8")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GPUFLOW_", "XDG_", "PYTEST_"))}
    kept.pop("REDIS_URL", None)
    kept |= {key: value for key, value in os.environ.items() if key.startswith("GPUFLOW_TEST_")}
    environments = {"GPUFLOW_ENV_DIR": str(_environments(folder))} if name in PPO else {}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "from gpuflow.cli import main; main()", "run", str(file), "--json"],
        env=with_our_packages(
            {
                **kept,
                **environments,
                "HOME": str(place),
                "GPUFLOW_CACHE_DIR": str(folder / "cache"),
                "HF_HUB_OFFLINE": "1",
                "GPUFLOW_READ_ROOTS": str(folder),
                "QDRANT_API_KEY": KEY,
            }
        ),
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(600),
    )
    seconds = time.monotonic() - began
    stages = json.loads(done.stdout)["stages"] if done.stdout.startswith("{") else []
    return Done(seconds=seconds, code=done.returncode, stages=stages, said=done.stderr)


def _environments(folder: Path) -> Path:
    if given := os.environ.get("GPUFLOW_ENV_DIR"):
        return Path(given)
    overlay, made = Path(os.environ.get("PPO_TRL", "/nowhere")), folder / "environments"
    if not made.exists() and (overlay / "trl").is_dir():
        made.mkdir()
        script = f'#!/bin/sh\nexport PYTHONPATH="{overlay}:$PYTHONPATH"\nexec {sys.executable} "$@"\n'
        build(made, script, name="ppo")
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("public")


@pytest.fixture(scope="module")
def stand(folder: Path) -> Iterator[Stand]:
    with standing(folder) as made:
        yield made


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in SHORT else pytest.mark.long) for one in RUN])
def test_a_public_template_runs(name: str, folder: Path, stand: Stand) -> None:
    if name in PPO and not (_environments(folder).is_dir()):
        pytest.fail("PPO_TRL names no folder with TRL; run this by tox -e long")
    done = run(name, folder, stand)

    assert done.code == 0, done.said[-3000:]
    states = {stage["name"]: stage["state"] for stage in done.stages}
    skipped = {"echo-conditional"} & set(states)
    assert {one for one, state in states.items() if state != "SUCCEEDED"} == skipped
    for stage in done.stages:
        if stage["name"] not in skipped:
            _check(name, stage["result"])


def _check(name: str, result: dict[str, Any]) -> None:
    """Check what an author looks at first: answers for all items, and the numbers of the training."""
    if "steps" not in result:
        assert result.get("items", result), name
        return
    assert result["steps"] > 0
    assert result["rows_trained"] > 0
    asked = [TEMPLATES[name], *(entry["spec"] for entry in TEMPLATES[name].get("stages", ()))]
    rates = {float(spec["training"]["learning_rate"]) for spec in asked if "learning_rate" in spec.get("training", {})}
    assert result["learning_rate"] in rates
    assert result["dtype"] == "float32"  # without a GPU


def main() -> int:
    names = sys.argv[1:] or list(RUN)
    worst = 0
    print("| template | seconds | exit code |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="gpuflow-public-") as root, standing(Path(root)) as made:
        for name in names:
            done = run(name, Path(root), made)
            print(f"| `{name}` | {done.seconds:.1f} | {done.code} |", flush=True)
            if done.code:
                print(done.said[-3000:], file=sys.stderr, flush=True)
            worst = max(worst, done.code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
