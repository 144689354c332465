"""What the conformance suite asks of each executor: one request that works, one that cannot, and how to know."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuflow.settings import Settings
from gpuflow.worker.containers.local import local_container
from tests.fixtures.tiny_model import PAIRS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "executor" / "acme_wordcount" / "executor.py"

Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One task type. `good` and `bad` make specs (a tiny model is at hand); `check` looks at a result of `good`.

    `fault` is the way in which it runs out of memory; `environment` are variables of its children. `in_threads`: its
    progress comes from a thread, where no signal can be set.
    """

    task_type: str
    good: Callable[[Path], Spec]
    bad: Callable[[Path], Spec]
    check: Callable[[Mapping[str, Any]], bool]
    files: tuple[str, ...]
    needs_ml: bool = True
    fault: str = "cuda"
    in_threads: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def _model(folder: Path) -> Spec:
    return {"source": {"type": "local", "identifier": str(folder)}}


def _inference(model: Path, **inference: Any) -> Spec:
    return {
        "model": _model(model),
        "data": {"type": "list", "items": ["Hello Ana", "Where is the red car?", "Dear Bo"]},
        "inference": {"max_tokens": 4, "temperature": 0, "batch_size": 1, **inference},
    }


def _embedding(model: Path) -> Spec:
    return {"model": _model(model), "data": {"type": "list", "items": ["Hello Ana", "Where is the red car?"]}}


def _rag(model: Path) -> Spec:
    return {
        **_inference(model, system_prompt="Answer."),
        "embedding": {"model": str(model)},
        "search": {"documents": ["The red car is here.", "Hello Ana", "The lamp is gone."], "top_k": 1},
    }


def _training(model: Path, **training: Any) -> Spec:
    return {
        "model": _model(model),
        "data": {"type": "list", "items": list(PAIRS[:4])},
        "training": {
            "max_steps": 2,
            "per_device_train_batch_size": 1,
            "logging_steps": 1,
            "max_length": 32,
            **training,
        },
    }


def _lora(model: Path, **training: Any) -> Spec:
    return {**_training(model, **training), "lora": {"r": 2, "lora_alpha": 4}}


def _preferences(model: Path, **training: Any) -> Spec:
    rows = [
        {"prompt": pair["prompt"], "chosen": pair["completion"], "rejected": "I do not know."} for pair in PAIRS[:4]
    ]
    return {**_training(model, **training), "data": {"type": "preferences", "preferences": rows}}


def _prompts(model: Path) -> Spec:
    training = _training(
        model,
        gradient_accumulation_steps=2,
        num_generations=2,
        learning_rate=1e-3,
    )
    return {
        **training,
        "data": {"prompts": [pair["prompt"] for pair in PAIRS[:4]], "type": "prompts"},
        "training": {name: value for name, value in training["training"].items() if name != "max_length"},
        "reward_model": {"type": "function", "identifier": "distinct_words"},
        "generation": {"max_new_tokens": 4, "temperature": 1.0},
    }


def _policy(model: Path) -> Spec:
    training = {"max_steps": 2, "per_device_train_batch_size": 1, "num_ppo_epochs": 1}
    return {**_prompts(model), "training": training}


def _stepped(result: Mapping[str, Any]) -> bool:
    return result["steps"] == 2


def _trained(result: Mapping[str, Any]) -> bool:
    return result["steps"] == 2 and result["train_loss"] > 0


_PROGRAM = """
import json
tell = lambda **event: print(json.dumps(event), flush=True)
tell(event="progress", current=1, total=2)
print("hello", flush=True)
tell(event="progress", current=2, total=2)
open("made.txt", "w").close()
tell(event="artifact", path="made.txt")
tell(event="result", value={"rows": 3})
"""
_WORKER = """
import json, os, sys
tell = lambda **event: print(json.dumps(event), flush=True)
tell(event="connection", status="connected")
tell(event="progress", current=1, total=2)
print("hello", flush=True)
tell(event="progress", current=2, total=2)
open(os.path.join(os.environ["OUTPUT_DIR"], "made.txt"), "w").close()
tell(event="artifact", path="made.txt")
tell(event="result", value={"rows": 3})
tell(event="finish", status="completed")
"""
_SESSION = """
import json, os, sys
tell = lambda event, **data: print(json.dumps({"event": event, **data}), flush=True)
tell("connection", status="connected")
tell("ready")
for line in sys.stdin:
    told = json.loads(line)
    if told["op"] == "abort":
        tell("finish", id=told["id"], status="cancelled")
        continue
    tell("progress", current=1, total=2)
    print("hello", flush=True)
    tell("progress", current=2, total=2, id=told["id"])
    open(os.path.join(told["output_dir"], "made.txt"), "w").close()
    tell("artifact", path="made.txt")
    tell("result", value={"rows": told["request"]["rows"]})
    tell("finish", id=told["id"], status="completed")
"""
CONTAINER_IMAGE = "conformance:latest"


def container(folder: Path, engine: str = "none", **fields: Any) -> Spec:
    """Return the spec of a container as a worker gives it to its child; `folder` is for its preset."""
    preset = {"image": CONTAINER_IMAGE, "command": ["python", "-c", _WORKER], "process": {}, **fields}
    return _prepared(folder, engine, "conformance", preset)


def container_request(folder: Path, engine: str = "none", *, name: str = "conformance-session", **fields: Any) -> Spec:
    """Return the spec of a request to a container that answers several."""
    preset = {"image": CONTAINER_IMAGE, "command": ["python", "-c", _SESSION], "process": {"folder": str(folder)}}
    return _prepared(folder, engine, name, {**preset, "mode": "session", **fields}, request={"rows": 3})


def _prepared(folder: Path, engine: str, name: str, preset: Spec, **section: Any) -> Spec:
    (folder / f"{name}.yaml").write_text(json.dumps(preset))
    settings = Settings(container_engine=engine, container_presets=folder, state_dir=folder / "state")
    return local_container({"taskType": "container", "container": {"preset": name, **section}}, settings)


_NO_ROWS = {"type": "list", "items": [{"nothing": "of use"}]}

#: ppo is there where PPO_TRL names a folder with its TRL, as tox has it.
PROVIDERS = (
    Provider(
        task_type="echo",
        good=lambda _: {"data": {"items": ["a", "b"]}, "echo": {"steps": 2}},
        bad=lambda _: {"data": {"type": "jsonl", "path": "/there/is/no/such/file.jsonl"}},
        check=lambda result: [item["output"] for item in result["items"]] == ["a", "b"],
        files=("responses.json",),
        needs_ml=False,
        fault="memory",
    ),
    Provider(
        task_type="acme.wordcount",
        good=lambda _: {"data": {"type": "list", "items": ["a b a", "c"]}, "parameters": {"top": 1}},
        bad=lambda _: {"data": {"type": "list", "items": ["a"]}, "parameters": {"top": 0}},
        check=lambda result: [item["output"] for item in result["items"]] == [{"a": 2}, {"c": 1}],
        files=("responses.json",),
        needs_ml=False,
        fault="memory",
        environment={"GPUFLOW_EXECUTORS": f"acme.wordcount={EXAMPLE}:WordCount"},
    ),
    Provider(
        task_type="command",
        good=lambda _: {"command": {"command": ["python", "-c", _PROGRAM]}},
        bad=lambda _: {"command": {"command": "true", "path": "/there/is/no/such/folder"}},
        check=lambda result: (result["exit_code"], result["rows"], result["output"]) == (0, 3, "hello"),
        files=("made.txt",),
        needs_ml=False,
        fault="memory",
        in_threads=True,
    ),
    Provider(
        task_type="container",
        good=container,
        bad=lambda folder: container(folder, gpus=8),
        check=lambda result: (result["exit_code"], result["rows"], result["output"]) == (0, 3, "hello"),
        files=("made.txt",),
        needs_ml=False,
        fault="memory",
        in_threads=True,
    ),
    Provider(
        task_type="inference",
        good=_inference,
        bad=lambda model: _inference(model, top_p=7),
        check=lambda result: len(result["items"]) == 3 and all(item["finish_reason"] for item in result["items"]),
        files=("responses.json",),
    ),
    Provider(
        task_type="embedding",
        good=_embedding,
        bad=lambda model: {**_embedding(model), "data": {"type": "jsonl", "path": "/there/is/no/such/file.jsonl"}},
        check=lambda result: [len(item["embedding"]) for item in result["items"]] == [128] * 2,
        files=("responses.json",),
    ),
    Provider(
        task_type="rag",
        good=_rag,
        bad=lambda model: {**_rag(model), "search": {"index": {"path": "/there/is/no/such/index"}}},
        check=lambda result: [len(item["citations"]) for item in result["items"]] == [1] * 3,
        files=("responses.json",),
    ),
    Provider(
        task_type="sft",
        good=_training,
        bad=lambda model: {**_training(model), "data": _NO_ROWS},
        check=_trained,
        files=("final_model",),
    ),
    Provider(
        task_type="lora_sft",
        good=_lora,
        bad=lambda model: {**_lora(model), "data": _NO_ROWS},
        check=_trained,
        files=("final_lora",),
    ),
    Provider(
        task_type="dpo",
        good=lambda model: {**_preferences(model), "lora": {"r": 2, "lora_alpha": 4}},
        bad=lambda model: {**_preferences(model), "data": _NO_ROWS},
        check=_trained,
        files=("final_lora", "loss.png"),
    ),
    Provider(
        task_type="reward",
        good=_preferences,
        bad=lambda model: {**_preferences(model), "data": _NO_ROWS},
        check=_trained,
        files=("final_model", "loss.png"),
    ),
    Provider(
        task_type="grpo",
        good=_prompts,
        bad=lambda model: {**_prompts(model), "reward_model": {"type": "function", "identifier": "os.system"}},
        check=_stepped,
        files=("final_model", "loss.png"),
    ),
    *(
        (
            Provider(
                task_type="ppo",
                good=_policy,
                bad=lambda model: {**_policy(model), "reward_model": {"type": "function", "identifier": "os.system"}},
                check=_stepped,
                files=("final_model", "loss.png"),
                environment={"PYTHONPATH": os.environ["PPO_TRL"]},
            ),
        )
        if "PPO_TRL" in os.environ
        else ()
    ),
)
