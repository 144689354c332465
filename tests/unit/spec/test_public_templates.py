"""The public templates of FlowMesh are read as the page says, and nothing that differs is silent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.spec.sections import TASK_TYPES
from gpuflow.spec.sharding import shard_count
from gpuflow.templates import parse
from tests.support.public_templates import NEED_VLLM, TEMPLATES, Stand, runnable, template

PAGE = Path(__file__).resolve().parents[3] / "docs" / "howto" / "coming-from-flowmesh.md"
#: File -> task types in order, number of tasks, and the fields of which something is told.
READ = {
    "echo_local": ("echo", 1, set()),
    "echo_three_node_graph": ("echo echo echo", 3, {"output.destination"}),
    "conditional_echo_test": ("echo echo echo", 3, {"output.destination"}),
    "inference_hf_tiny": ("inference", 1, set()),
    "inference_hf_chat": ("inference", 1, set()),
    "inference_tf_llama": ("inference", 1, set()),
    "inference_vllm_tiny": ("inference", 1, {"model.vllm"}),
    "inference_vllm_chat": ("inference", 1, {"model.vllm"}),
    "inference_vllm_qwen3": ("inference", 1, {"model.vllm"}),
    "inference_vllm_llama": ("inference", 8, {"model.vllm", "sloSeconds"}),
    "inference_vllm_mistral": ("inference", 8, {"model.vllm", "sloSeconds"}),
    "inference_vllm_structured": ("inference", 1, {"model.vllm", "output.destination"}),
    "inference_vllm_all_args": (
        "inference",
        1,
        {
            "inference.templates[2].max",
            "inference.templates[2].min",
            "model.vllm.swap_space",
            "output.destination",
        },
    ),
    "inference_vllm_http_callback": ("inference", 1, {"model.vllm", "output.destination.headers.Authorization"}),
    "multi_step_cot": ("inference inference inference", 3, {"stages[1].spec.model.vllm"}),
    "dag_inference_example": ("inference inference inference", 3, {"graph.nodes[2].spec.data.template"}),
    "embedding_vllm_tiny": ("embedding", 1, {"model.vllm"}),
    "rag_query_qdrant": ("rag", 1, set()),
    "sft_llama_1b": ("sft", 1, set()),
    "sft_llama_3b": ("sft", 1, {"training.visible_devices", "training.deepspeed"}),
    "sft_llama_1b_multi_gpu": ("sft", 1, {"output.destination", "training"}),
    "sft_llama_two_stage": ("sft sft", 2, {"output.destination", "output.destination.headers.Authorization"}),
    "lora_sft_llama": ("lora_sft", 1, {"sloSeconds"}),
    "lora_sft_llama_two_stage": (
        "lora_sft lora_sft",
        2,
        {"output.destination", "output.destination.headers.Authorization"},
    ),
    "lora_then_inference": ("lora_sft inference", 2, {"stages[0].spec.output.destination"}),
    "dpo_training_llama_1b": ("dpo", 1, set()),
    "dpo_training_ministral": ("dpo", 1, set()),
    "dpo_training_llama_1b_multi_gpu": ("dpo", 1, {"output.destination"}),
    "ppo_training_ministral": ("ppo", 1, {"training.optimize_cuda_cache"}),
    "ppo_training_llama_1b_multi_gpu": ("ppo", 1, {"training.optimize_cuda_cache"}),
}
STAND = Stand(chat="smollm2-135m-instruct", embedding="all-minilm-l6-v2", sentiment="/s", rows="/r.jsonl",
              qdrant="http://h", receiver="http://h/x")  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_public_template_is_read_as_the_page_says(name):
    found = parse(template(name))

    tasks = sum(max(1, shard_count(stage.spec)) for stage in found.stages)
    told = {one.path.removeprefix("spec.") for one in found.warnings}
    assert (" ".join(stage.task_type for stage in found.stages), tasks, told) == READ[name]
    (row,) = rows(name)
    assert re.fullmatch(r"\d+", row[2].strip()), row
    assert int(row[2]) == tasks, row
    assert set(found.stages[0].task_type.split()) <= set(row[1].replace(",", " ").split()), row
    assert row[3].strip().startswith("nothing") == (not told), row


def test_all_of_our_task_types_are_read_and_one_is_refused():
    assert {task_type for types, _, _ in READ.values() for task_type in types.split()} == set(TASK_TYPES) - {
        "reward",
        "grpo",
        "command",
        "container",
        "function",
    }
    assert set(TEMPLATES) - set(READ) == {"ppo_training_llama_1b"}
    with pytest.raises(InvalidTemplate) as caught:
        parse(template("ppo_training_llama_1b"))
    assert {one.path for one in caught.value.mistakes} == {"spec.training.early_stopping"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_page_has_how_long_it_ran_and_how_it_ended(name):
    (row,) = rows(name)
    if name in NEED_VLLM:
        assert parse(template(name)).stages[0].spec["engine"] == "vllm"
        assert row[4].strip() == row[5].strip() == "needs vLLM"
        return
    assert parse(runnable(name, STAND)).stages
    assert float(row[4]) > 0
    assert row[5].strip() == "0"


def test_variables_that_hold_secrets_are_named_as_secrets():
    found = parse(template("rag_query_qdrant")).stages[0].spec
    assert found["secrets"] == ["QDRANT_API_KEY"]
    given = template("rag_query_qdrant")
    given["spec"] |= {"env": {"QDRANT_API_KEY": "x"}, "secrets": ["OTHER"]}
    assert parse(given).stages[0].spec["secrets"] == ["OTHER"]
    given["spec"]["env"] = {"HOME_KEYS": "${HOME}"}
    assert parse(given).stages[0].spec["secrets"] == ["OTHER", "QDRANT_API_KEY"]


def rows(name: str) -> list[list[str]]:
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if re.match(rf"\| [^|]*`{name}`", line)]
    return [line.strip("|").split("|") for line in lines if line.count("|") == 7]
