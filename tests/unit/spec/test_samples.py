"""The sample templates: ours, and ones of the shapes that public FlowMesh and MLOC templates have."""

from __future__ import annotations

import json

import pytest

from gpuflow.spec import Template, parse, parse_text, pick
from gpuflow.spec.checking import canonical
from gpuflow.spec.presets import list_presets
from gpuflow.spec.sections import TRAINING_SCHEMAS

SAMPLES = {
    "pipeline": 0,
    "flowmesh_all_arguments": 1,
    "flowmesh_conditional": 0,
    "flowmesh_graph": 1,
    "flowmesh_lora_then_inference": 1,
    "mloc_cpu_inference": 0,
    "mloc_infer_then_dpo": 4,
    "mloc_ppo": 2,
    "mloc_rag": 2,
    "mloc_sft_multi_gpu": 2,
}

RESULTS = {
    "adapt": {"final_lora_archive": "/there/lora.tar.gz", "final_lora_archive_url": "http://host/lora.tar.gz"},
    "pros": {"items": [{"output": "fast"}]},
    "cons": {"items": [{"output": "loud"}]},
    "first": {"items": [{"output": "skip-me"}]},
    "bootstrap": {"jsonl_export": {"url": "http://host/pairs.jsonl", "path": "/x"}},
    "find": {"items": ["a passage"]},
    "before": {"items": [{"output": "hello"}]},
    "tune": {"final_lora_archive_url": "http://host/tuned.tar.gz"},
}


def lookup(reference):
    return pick(RESULTS[reference.name], reference)


@pytest.mark.parametrize(("name", "warnings"), SAMPLES.items())
def test_samples_are_read_with_everything_that_differs_told(templates, name, warnings):
    template = parse(templates / f"{name}.yaml")

    assert len(template.warnings) == warnings, template.warnings
    assert all(one.line and one.message for one in template.warnings)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_stored_template_comes_back_equal(templates, name):
    template = parse(templates / f"{name}.yaml")

    assert Template.from_dict(json.loads(json.dumps(template.to_dict()))) == template
    assert parse(template) is template


@pytest.mark.parametrize("name", SAMPLES)
def test_every_stage_gives_canonical_tasks_and_canonical_is_stable(templates, name):
    for stage in parse(templates / f"{name}.yaml").stages:
        tasks = stage.tasks(lookup)

        assert tasks
        for task in tasks:
            assert canonical(task) == task
            assert json.loads(json.dumps(task)) == task


def test_the_same_fields_in_gpuflow_v1_are_mistakes(templates):
    text = (templates / "flowmesh_all_arguments.yaml").read_text()

    with pytest.raises(Exception, match="unknown field") as caught:
        parse_text(text.replace("flowmesh/v1", "gpuflow/v1"), "x")
    assert {one.path.rsplit(".", 1)[-1] for one in caught.value.mistakes} == {
        "swap_space", "rope_scaling", "templates", "metadata",
    }  # fmt: skip


def test_the_pipeline_sample(templates):
    template = parse(templates / "pipeline.yaml")
    before, tune, ask = template.stages

    assert template.is_pipeline
    assert (template.name, template.owner) == ("support-bot", "ana")
    assert ask.depends_on == ("before", "tune")
    assert [str(one) for one in ask.references] == [
        "${tune.result.final_lora_archive_url}",
        "${before.result.items[0].output}",
    ]
    assert tune.matrix == {"training.learning_rate": ["1e-4", "1e-3"], "lora.lora_alpha": [16, 32]}
    assert [(t["training"]["learning_rate"], t["lora"]["lora_alpha"]) for t in tune.tasks(lookup)] == [
        (1e-4, 16), (1e-4, 32), (1e-3, 16), (1e-3, 32),
    ]  # fmt: skip
    assert ask.tasks(lookup)[0]["data"] == {
        "type": "prompts",
        "prompts": ["Was: hello. Costs ${PRICE}, by ${env:USER}."],
    }
    assert before.tasks(lookup)[0]["env"] == {"HF_HUB_OFFLINE": "1"}


def test_shapes_of_public_templates_become_ours(templates):
    def spec(name, stage=0):
        return parse(templates / f"{name}.yaml").stages[stage].tasks(lookup)[0]

    (briefing,) = spec("flowmesh_graph", 2)["data"]["items"]
    assert briefing.splitlines()[1:] == ["• Pros: fast", "• Cons: loud", "Weigh both."]
    assert spec("flowmesh_conditional", 2)["data"]["items"] == ["skip-me"]
    assert spec("mloc_infer_then_dpo", 1)["data"] == {
        "type": "jsonl",
        "url": "http://host/pairs.jsonl",
        "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    }
    assert spec("flowmesh_lora_then_inference")["data"] == {
        "type": "dataset", "url": "example/word-problems", "name": "main", "split": "train[:1%]",
        "columns": {"prompt": "question", "completion": "answer"}, "separator": "\n\nAnswer: ", "max_items": 100,
    }  # fmt: skip
    assert spec("mloc_cpu_inference")["resources"]["hardware"]["gpu"] == {"count": 0}
    assert spec("mloc_rag")["qdrant"]["api_key"] == "${env:QDRANT_API_KEY}"
    assert spec("mloc_ppo")["training"]["per_device_train_batch_size"] == 1
    assert spec("mloc_ppo")["training"]["save_strategy"] == "no"


def test_text_of_others_that_is_no_reference_stays_text():
    template = parse_text(
        "apiVersion: mloc/v1\nspec: {taskType: echo, data: {items: ['Price ${a b}', '${HOME}']}}", "x"
    )

    assert template.stages[0].tasks(lookup)[0]["data"]["items"] == ["Price ${a b}", "${env:HOME}"]
    assert "taken as plain text" in template.warnings[0].message


def test_a_base_section_that_no_stage_uses_is_a_warning():
    template = parse({"taskType": "echo", "training": {"max_steps": 1}, "stages": [{"name": "a"}]})

    assert [one.path for one in template.warnings] == ["training"]
    assert "training" not in template.stages[0].spec


def test_a_newer_stored_template_is_refused():
    with pytest.raises(Exception, match="update it"):
        Template.from_dict({"schema": 99})
    with pytest.raises(Exception, match="submit it again"):
        Template.from_dict({"api_version": "gpuflow/v1"})


@pytest.mark.parametrize("name", list_presets("pipelines"))
def test_every_shipped_pipeline_is_valid_and_says_nothing_for_nothing(name):
    template = parse(name)

    assert template.stages
    assert template.warnings == ()


def test_the_shipped_pipelines_show_each_task_type_that_trains():
    shown = {stage.spec["taskType"] for name in list_presets("pipelines") for stage in parse(name).stages}

    assert set(TRAINING_SCHEMAS) <= shown
