"""Each field of a template has a reader, or is told to have none: a field that nothing reads would promise what is not
kept. The fields of libraries are checked against their own schemas (`gpuflow.spec.fields`); those of ours beside them,
and what stands around a spec (stages, metadata), are in the table too.
"""

from __future__ import annotations

import re
import typing
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import canonical, parse
from gpuflow.spec.models_data import EvalFile
from gpuflow.spec.models_kinds import Adapter
from gpuflow.spec.models_task import Metadata, TaskSpec
from gpuflow.spec.sections import ENGINE, INFERENCE, LORA, TRAINING_SCHEMAS, is_used, training_section
from gpuflow.spec.stages import Entry

ROOT = Path(__file__).resolve().parents[3]

#: Model -> who reads it: a file for all of its fields, or one for each field.
READERS: dict[str, str | dict[str, str]] = {
    "TaskSpec": {
        "taskType": "gpuflow/submission.py",
        "resources": "gpuflow/submission.py",
        "model": "executors/modeling/loading.py",
        "checkpoint": "gpuflow/artifacts/inputs.py",
        "data": "executors/inference.py",
        "inference": "executors/inference.py",
        "training": "executors/training/run.py",
        "lora": "executors/training/run.py",
        "reward_model": "executors/grpo.py",
        "generation": "executors/grpo.py",
        "qdrant": "executors/rag.py",
        "embedding": "executors/rag.py",
        "index": "executors/rag.py",
        "search": "executors/rag.py",
        "query": "executors/rag.py",
        "echo": "executors/echo.py",
        "command": "executors/command.py",
        "container": "executors/container.py",
        "function": "gpuflow/spec/function_section.py",
        "parameters": "gpuflow/merge/specs.py",
        "output": "gpuflow/artifacts/destination.py",
        "postprocess": "gpuflow/artifacts/manifest.py",
        "parallel": "gpuflow/spec/sharding.py",
        "env": "gpuflow/worker/preparation.py",
        "secrets": "gpuflow/worker/secret_sources.py",
        "notify": "gpuflow/ledger/backend.py",
        "retry": "gpuflow/worker/supervisor.py",
        "timeout": "gpuflow/worker/attempt.py",
        "priority": "gpuflow/submission.py",
        "merge": "gpuflow/merge/keys.py",
        "target": "gpuflow/cli/submit.py",
        "engine": "gpuflow/routing/offers.py",
        "environment": "gpuflow/routing/offers.py",
        "sloSeconds": "told",
        "resultTtlSeconds": "gpuflow/submission.py",
    },
    "Resources": {
        "accelerators": "gpuflow/routing/resources.py",
        "hardware": "gpuflow/routing/resources.py",
        "labels": "gpuflow/routing/resources.py",
        "replicas": "gpuflow/spec/sharding.py",
    },
    "Hardware": "gpuflow/routing/resources.py",
    "GpuAsk": "gpuflow/routing/gpu_fields.py",
    "Model": {
        "source": "executors/modeling/location.py",
        "adapters": "executors/sessions/adapters.py",
        "vllm": "executors/sessions/vllm_engine.py",
        "transformers": "executors/inference.py",
    },
    "ModelSource": "executors/modeling/location.py",
    "Adapter": {
        "type": "one value",
        "url": "gpuflow/artifacts/inputs.py",
        "path": "executors/sessions/adapters.py",
        "name": "told",
        "weight": "executors/sessions/adapters.py",
    },
    "Checkpoint": {"load": "gpuflow/artifacts/inputs.py", "merge_first": "executors/training/beginning.py"},
    "Load": {
        "type": "gpuflow/spec/checking.py",
        "url": "gpuflow/artifacts/inputs.py",
        "path": "gpuflow/artifacts/inputs.py",
        "headers": "gpuflow/artifacts/inputs.py",
    },
    "Data": {
        "type": "executors/data/sources.py",
        "items": "executors/data/sources.py",
        "prompts": "executors/data/sources.py",
        "messages": "executors/data/sources.py",
        "preferences": "executors/data/sources.py",
        "url": "executors/data/hub.py",
        "path": "executors/data/sources.py",
        "upload": "gpuflow/artifacts/uploads.py",
        "sha256": "gpuflow/artifacts/data_files.py",
        "name": "executors/data/hub.py",
        "split": "executors/data/sources.py",
        "eval_split": "executors/data/sources.py",
        "column": "executors/generation/prompts.py",
        "columns": "executors/data/columns.py",
        "separator": "executors/training/run.py",
        "shuffle": "executors/data/sources.py",
        "seed": "executors/data/sources.py",
        "include": "executors/retrieval/documents.py",
        "max_items": "executors/data/sources.py",
        "shard": "executors/data/shards.py",
        "revision": "executors/data/hub.py",
        "trust_remote_code": "told",
        "template": "gpuflow/spec/checking.py",
    },
    "Shard": "executors/data/shards.py",
    "GraphTemplate": "gpuflow/spec/graph_template.py",
    "Column": {
        "label": "gpuflow/spec/graph_template.py",
        "value": "gpuflow/spec/graph_template.py",
        "node": "gpuflow/spec/normalise.py",
        "path": "gpuflow/spec/normalise.py",
        "expr": "gpuflow/spec/normalise.py",
        "data": "gpuflow/spec/graph_template.py",
        "default": "gpuflow/spec/graph_template.py",
    },
    "RewardModel": {
        "identifier": "executors/training/rewards.py",
        "type": "executors/training/rewards.py",
        "revision": "executors/training/rewards.py",
        "path": "executors/training/rewards.py",
        "url": "gpuflow/artifacts/inputs.py",
        "headers": "gpuflow/artifacts/inputs.py",
        "trust_remote_code": "executors/training/rewards.py",
        "weight": "executors/training/scoring.py",
        "score": "executors/training/rewards.py",
    },
    "Generation": "executors/grpo.py",
    "Qdrant": "executors/retrieval/qdrant.py",
    "Embedding": {
        "model": "gpuflow/spec/normalise.py",
        "normalize": "executors/retrieval/index.py",
        "batch_size": "executors/vectors/embedder.py",
        "query_prefix": "executors/retrieval/index.py",
        "passage_prefix": "executors/retrieval/index.py",
    },
    "Index": "executors/rag.py",
    "Chunks": "executors/retrieval/chunking.py",
    "Search": {
        "top_k": "executors/rag.py",
        "score_threshold": "executors/rag.py",
        "index": "gpuflow/artifacts/inputs.py",
        "documents": "executors/rag.py",
        "chunks": "executors/rag.py",
        "context_characters": "executors/rag.py",
    },
    "Echo": "executors/echo.py",
    "EchoFailure": "executors/echo.py",
    "Command": {
        "command": "executors/command.py",
        "project": "gpuflow/artifacts/uploads.py",
        "upload": "gpuflow/artifacts/uploads.py",
        "url": "gpuflow/artifacts/program_files.py",
        "sha256": "gpuflow/artifacts/program_files.py",
        "path": "executors/command.py",
        "requirements": "executors/programs/venvs.py",
        "python": "executors/programs/venvs.py",
        "shell": "executors/command.py",
        "metrics": "executors/command.py",
    },
    "Function": "gpuflow/spec/function_section.py",
    "Container": "gpuflow/worker/containers/local.py",
    "Output": {
        "destination": "gpuflow/artifacts/destination.py",
        "artifacts": "gpuflow/artifacts/manifest.py",
        "aliases": "gpuflow/artifacts/manifest.py",
    },
    "Destination": {
        "type": "gpuflow/artifacts/destination.py",
        "url": "gpuflow/artifacts/destination.py",
        "path": "gpuflow/artifacts/destination.py",
        "headers": "gpuflow/artifacts/destination.py",
        "method": "gpuflow/spec/results_out.py",
        "timeoutSec": "gpuflow/spec/results_out.py",
        "retries": "gpuflow/spec/results_out.py",
        "secret": "gpuflow/spec/results_out.py",
    },
    "Postprocess": "gpuflow/artifacts/manifest.py",
    "JsonlExport": "gpuflow/artifacts/derived.py",
    "Parallel": "gpuflow/spec/sharding.py",
    "Notification": {
        "on": "gpuflow/ledger/backend.py",
        "url": "gpuflow/upkeep/notices.py",
        "headers": "gpuflow/upkeep/notices.py",
        "method": "gpuflow/upkeep/notices.py",
        "body": "gpuflow/upkeep/notices.py",
        "timeoutSec": "gpuflow/upkeep/notices.py",
        "retries": "tasks/maintenance.py",
        "secret": "gpuflow/upkeep/notices.py",
    },
    "Retry": "gpuflow/ledger/retries.py",
    "EvalFile": {
        "path": "executors/data/sources.py",
        "url": "gpuflow/artifacts/data_files.py",
        "upload": "gpuflow/artifacts/uploads.py",
        "sha256": "gpuflow/artifacts/data_files.py",
    },
    "Entry": "gpuflow/spec/stages.py",
    "Metadata": {
        "name": "gpuflow/spec/template.py",
        "owner": "gpuflow/spec/template.py",
        "labels": "gpuflow/spec/template.py",
        "annotations": "gpuflow/cli/summary.py",
    },
}

#: Fields of ours in a section whose other fields are a library's -> who reads them.
OWN: dict[str, dict[str, str]] = {
    "inference": {
        "system_prompt": "executors/generation/prompts.py",
        "stream": "executors/inference.py",
        "batch_size": "executors/generation/answers.py",
        "chat_template": "executors/generation/prompts.py",
        "chat_template_kwargs": "executors/generation/prompts.py",
        "add_generation_prompt": "executors/generation/prompts.py",
        "no_repeat_ngram_size": "executors/generation/parameters.py",
    },
    "training": {
        "allow_multi_gpu": "executors/distributed/plan.py",
        "nproc_per_node": "executors/distributed/plan.py",
        "save_model": "executors/training/run.py",
        "merge_adapter": "executors/training/run.py",
        "allow_non_finite_loss": "executors/training/arguments.py",
        "max_prompt_length": "executors/ppo.py",
    },
}

#: Fields that nothing reads, with a spec that has one: whoever gives one is told.
TOLD = {
    "TaskSpec.sloSeconds": {"taskType": "echo", "sloSeconds": 3},
    "Adapter.name": {
        "taskType": "inference",
        "model": {"source": {"identifier": "a/b"}, "adapters": [{"path": "/x", "name": "mine"}]},
        "data": {"prompts": ["a"]},
    },
    "Data.trust_remote_code": {
        "taskType": "echo",
        "data": {"type": "dataset", "url": "a/b", "trust_remote_code": True},
    },
}


def test_a_function_has_each_field_or_refuses_it() -> None:
    honoured = {"taskType", "function", "resources", "parallel", "timeout", "priority", "target"}
    refused = set(TaskSpec.model_fields) - honoured

    assert {name for name in TaskSpec.model_fields if is_used(name, "function")} == honoured
    for name in refused:
        with pytest.raises(InvalidTemplate, match=f"spec.{name}: is not used by taskType function"):
            canonical({"taskType": "function", "function": "a.b", name: {}})


def models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in models(part)]


def fields() -> dict[str, str]:
    """Return `Model.field` -> name of the field, of all that a template may hold."""
    found: dict[str, str] = {}
    waiting: list[type[BaseModel]] = [TaskSpec, EvalFile, Entry, Metadata]
    done: set[type[BaseModel]] = set()
    while waiting:
        model = waiting.pop()
        if model in done:
            continue
        done.add(model)
        for name, info in model.model_fields.items():
            found[f"{model.__name__}.{name}"] = name
            waiting += models(info.annotation)
    return found


def reader(place: str) -> str | None:
    model, _, name = place.partition(".")
    given = READERS.get(model)
    return given if isinstance(given, str) or given is None else given.get(name)


@cache
def text(file: str) -> str:
    return (ROOT / file).read_text("utf-8")


@pytest.mark.parametrize(("place", "name"), fields().items())
def test_a_field_has_a_reader(place: str, name: str) -> None:
    file = reader(place)

    assert file is not None, f"{place} is new: name who reads it, or tell in gpuflow.spec that nobody does"
    if file == "one value":
        assert Adapter.model_fields["type"].annotation == typing.Literal["lora"], "others are refused"
    elif file == "told":
        warnings = parse({"apiVersion": "gpuflow/v1", "spec": TOLD[place]}).warnings
        assert any(one.path.endswith(name) and "is not used" in one.message for one in warnings)
        assert canonical(TOLD[place])
    else:
        assert re.search(rf"""["']{name}["']|\.{name}\b""", text(file)), f"{file} does not read {place}"


@pytest.mark.parametrize(("section", "name"), [(section, name) for section in OWN for name in OWN[section]])
def test_a_field_of_ours_among_those_of_a_library_has_a_reader(section: str, name: str) -> None:
    assert re.search(rf"""["']{name}["']""", text(OWN[section][name])), f"nobody reads {section}.{name}"


def test_every_field_of_ours_among_those_of_a_library_is_in_the_table() -> None:
    trainings = [training_section(task_type).own for task_type in TRAINING_SCHEMAS]
    assert set(OWN["inference"]) == set(INFERENCE.own)
    assert set(OWN["training"]) == {name for own in trainings for name in own}
    assert not {**LORA.own, **ENGINE.own}


def test_the_table_has_no_field_that_is_gone() -> None:
    named = {f"{model}.{name}" for model, given in READERS.items() if isinstance(given, dict) for name in given} | set(
        TOLD
    )
    assert named <= set(fields())
    assert set(READERS) == {place.partition(".")[0] for place in fields()}
