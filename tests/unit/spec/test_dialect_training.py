"""A training of a foreign template is given what its own project gives where the author left a field out.

The numbers are those of mlsys-io/FlowMesh, src/worker/executors; docs/howto/coming-from-flowmesh.md shows both values.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import Template
from gpuflow.spec.checking import canonical
from gpuflow.spec.dialect_training import DEFAULTS, LORA_DEFAULTS
from gpuflow.spec.fields import load_schema
from gpuflow.spec.sections import TRAINING_SCHEMAS
from gpuflow.templates import parse

PAGE = Path(__file__).resolve().parents[3] / "docs" / "howto" / "coming-from-flowmesh.md"
MODEL = {"source": {"type": "huggingface", "identifier": "example/chat-1b"}}
ROWS = {"items": [{"prompt": "a", "completion": "b"}]}
TASKS = {
    "sft": {"taskType": "sft", "model": MODEL, "data": ROWS},
    "lora_sft": {"taskType": "lora_sft", "model": MODEL, "data": ROWS},
    "dpo": {
        "taskType": "dpo",
        "model": MODEL,
        "data": {"preferences": [{"prompt": "a", "chosen": "b", "rejected": "c"}]},
    },
    "ppo": {"taskType": "ppo", "model": MODEL, "data": {"prompts": ["a"]}, "reward_model": {"type": "sentiment"}},
}
GPU = {"hardware": {"gpu": {"type": "any", "count": 1}}}
#: Task type -> what is trained with where `training` is left out; written once more here, so that a slip is seen.
TRAINED = {
    "sft": {
        "learning_rate": 5e-5,
        "num_train_epochs": 1.0,
        "per_device_train_batch_size": 2,
        "max_length": 1024,
        "bf16": False,
    },
    "lora_sft": {
        "learning_rate": 2e-4,
        "num_train_epochs": 1.0,
        "per_device_train_batch_size": 2,
        "max_length": 1024,
        "bf16": False,
    },
    "dpo": {"learning_rate": 5e-7, "num_train_epochs": 1.0, "per_device_train_batch_size": 4},
    "ppo": {
        "learning_rate": 1.41e-5,
        "num_train_epochs": 1.0,
        "per_device_train_batch_size": 1,
        "response_length": 64,
        "max_prompt_length": 512,
    },
}
#: A name that the author may write for each default.
WRITTEN = {"per_device_train_batch_size": "batch_size", "max_length": "max_seq_length"}


def repr_of(value):
    is_long = isinstance(value, str) and len(value) > 20
    return type(value).__name__ if is_long or value == 10**5000 else repr(value)


def foreign(spec, version="flowmesh/v1"):
    return parse({"apiVersion": version, "metadata": {"name": "x"}, "spec": spec})


def spec_of(spec, version="flowmesh/v1"):
    return foreign(spec, version).stages[0].spec


def told(spec):
    return {one.path.removeprefix("spec."): one.message for one in foreign(spec).warnings}


def mistakes(spec):
    with pytest.raises(InvalidTemplate) as caught:
        foreign(spec)
    return {one.path.removeprefix("spec."): one.message for one in caught.value.mistakes}


# -- what is left out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["flowmesh/v1", "mloc/v1"])
@pytest.mark.parametrize("task_type", TRAINED)
def test_what_is_left_out_is_filled_in_as_they_have_it(task_type, version):
    assert spec_of(TASKS[task_type], version)["training"] == TRAINED[task_type]


@pytest.mark.parametrize("task_type", TRAINED)
def test_a_spec_of_ours_keeps_the_defaults_of_the_libraries(task_type):
    assert "training" not in canonical(TASKS[task_type])
    assert "lora" not in canonical(TASKS[task_type])


@pytest.mark.parametrize(
    ("task_type", "name"), [(task_type, name) for task_type, values in TRAINED.items() for name in values]
)
def test_what_is_written_is_kept(task_type, name):
    value = {"bf16": True, "num_train_epochs": 3.0, "learning_rate": 1e-3}.get(name, 7)
    for spelling in {name, WRITTEN.get(name, name)}:
        found = spec_of({**TASKS[task_type], "training": {spelling: value}})["training"]
        assert found == {**TRAINED[task_type], name: value}
        assert type(found[name]) is type(value)


@pytest.mark.parametrize("name", ["learning_rate", "batch_size"])
def test_a_null_is_left_out(name):
    assert spec_of({**TASKS["sft"], "training": {name: None}})["training"] == TRAINED["sft"]


def test_the_adapter_is_theirs_too():
    assert spec_of(TASKS["lora_sft"])["lora"] == dict(LORA_DEFAULTS)
    written = spec_of({**TASKS["lora_sft"], "lora": {"r": 4, "dropout": 0.0}})["lora"]
    assert written == {**LORA_DEFAULTS, "r": 4, "lora_dropout": 0.0}
    assert "lora" not in spec_of(TASKS["sft"])
    assert "lora" not in spec_of(TASKS["dpo"])


def test_an_adapter_that_is_trained_on_keeps_its_own_shape():
    load = {"load": {"type": "http", "url": "http://h/lora.tar.gz"}}
    assert "lora" not in spec_of({**TASKS["lora_sft"], "checkpoint": load})
    merged = {**TASKS["lora_sft"], "checkpoint": {**load, "merge_first": True}, "training": {"merge_adapter": True}}
    assert spec_of(merged)["lora"] == dict(LORA_DEFAULTS)


@pytest.mark.parametrize("task_type", ["reward", "grpo"])
def test_trainings_that_they_do_not_have_keep_ours(task_type):
    spec = {**TASKS["dpo" if task_type == "reward" else "ppo"], "taskType": task_type}
    assert "training" not in spec_of(spec)


def test_each_training_of_theirs_is_here_and_its_defaults_are_fields_of_the_trainer():
    assert set(TRAINED) == set(DEFAULTS) < set(TRAINING_SCHEMAS)
    for task_type, values in DEFAULTS.items():
        assert set(values) <= set(load_schema(TRAINING_SCHEMAS[task_type]))
    assert set(LORA_DEFAULTS) <= set(load_schema("lora"))


def test_a_stage_is_filled_in_after_the_base_and_a_matrix_after_that():
    base = {"taskType": "sft", "model": MODEL, "data": ROWS, "training": {"learning_rate": 1e-3}}
    stages = [
        {"name": "a", "spec": {"training": {"num_train_epochs": 2}}},
        {"name": "b", "matrix": {"training.batch_size": [3, 4], "training.learning_rate": [1e-4]}},
    ]
    first, second = foreign({**base, "stages": stages}).stages
    assert first.spec["training"] == {**TRAINED["sft"], "learning_rate": 1e-3, "num_train_epochs": 2.0}
    sizes = [one["training"]["per_device_train_batch_size"] for one in second.tasks(lambda _: None)]
    rates = [one["training"]["learning_rate"] for one in second.tasks(lambda _: None)]
    assert (sizes, rates) == ([3, 4], [1e-4, 1e-4])


def test_what_was_filled_in_is_shown_and_stored():
    template = foreign({**TASKS["lora_sft"], "training": {"num_train_epochs": 2}})
    shown = {one.path: one.message for one in template.filled}
    assert shown["spec.training"].endswith(
        "filled in as FlowMesh has it: learning_rate 0.0002, per_device_train_batch_size 2, max_length 1024, bf16 false"
    )
    assert "r 16, lora_alpha 32, lora_dropout 0.05, target_modules q_proj/k_proj/v_proj/o_proj" in shown["spec.lora"]
    assert not template.warnings
    assert Template.from_dict(json.loads(json.dumps(template.to_dict()))) == template
    assert "filled" not in parse({"taskType": "sft", "model": MODEL, "data": ROWS}).to_dict()


def test_the_page_has_each_default_with_both_values():
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    for name, value in {**DEFAULTS["sft"], **DEFAULTS["ppo"], **LORA_DEFAULTS}.items():
        row = next((row for row in rows if row.startswith(f"| `{name}`")), None)
        assert row is not None, name
        theirs = row.split("|")[2]
        values = [one.get(name) for one in DEFAULTS.values()] if name in DEFAULTS["ppo"] else [value]
        for one in values:
            text = f"{one:g}".replace("e-0", "e-") if isinstance(one, float) else str(one)
            assert isinstance(one, list) or one is None or text in theirs, (row, one)


# -- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task_type", TRAINED)
def test_with_bf16_a_gpu_holds_the_weights_so_too(task_type):
    asked = {**TASKS[task_type], "training": {"bf16": True}}
    on_cpu = {"dtype": "float32"} if task_type == "lora_sft" else None
    assert spec_of(asked)["model"].get("transformers") == on_cpu
    for resources in (GPU, {"accelerators": "A100:1"}, "A100:1"):
        assert spec_of({**asked, "resources": resources})["model"]["transformers"] == {"dtype": "bfloat16"}
    for resources in ({"hardware": {"gpu": {"count": 0}}}, {"accelerators": "cpu"}, {"hardware": {"cpu": 2}}):
        assert spec_of({**asked, "resources": resources})["model"].get("transformers") == on_cpu
    named = {**asked, "resources": GPU, "model": {**MODEL, "transformers": {"dtype": "float32"}}}
    assert spec_of(named)["model"]["transformers"] == {"dtype": "float32"}


def test_trl_chooses_for_dpo_and_ppo_as_it_does_there():
    assert all("bf16" not in spec_of(TASKS[name])["training"] for name in ("dpo", "ppo"))
    assert "bf16" not in spec_of({**TASKS["sft"], "training": {"fp16": True}})["training"]
    halved = {"training": {"fp16": True}, "resources": GPU}
    assert spec_of({**TASKS["lora_sft"], **halved})["model"]["transformers"] == {"dtype": "float16"}
    assert "transformers" not in spec_of({**TASKS["sft"], **halved})["model"]  # no optimizer steps on float16 weights


# -- words that their trainers read --------------------------------------------------------------------------------


def test_quantised_weights_are_asked_for_as_ours_are():
    spec = {**TASKS["lora_sft"], "training": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}}
    assert spec_of(spec)["model"]["transformers"]["quantization_config"] == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    eight = spec_of({**TASKS["lora_sft"], "training": {"load_in_8bit": "true"}})["model"]["transformers"]
    assert eight == {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    off = {"load_in_4bit": False, "load_in_8bit": False, "bnb_4bit_use_double_quant": True}
    assert spec_of({**TASKS["sft"], "training": off})["training"] == TRAINED["sft"]
    assert not told({**TASKS["sft"], "training": off})


@pytest.mark.parametrize("task_type", ["sft", "dpo", "ppo"])
def test_quantised_weights_alone_are_refused(task_type):
    assert set(mistakes({**TASKS[task_type], "training": {"load_in_4bit": True}})) == {"training.load_in_4bit"}


def test_a_training_begins_from_the_path_that_it_names():
    spec = {**TASKS["sft"], "training": {"resume_from_path": "/models/a"}}
    assert spec_of(spec)["checkpoint"] == {"load": {"path": "/models/a"}}
    both = {**spec, "checkpoint": {"load": {"url": "http://h/x"}}}
    assert spec_of(both)["checkpoint"] == {"load": {"url": "http://h/x"}}
    assert set(told(both)) == {"training.resume_from_path"}


def test_what_leads_to_other_weights_is_refused():
    load = {"type": "http", "url": "http://h/x"}
    assert set(mistakes({**TASKS["sft"], "checkpoint": {"load": {**load, "subdir": "a"}}})) == {
        "checkpoint.load.subdir"
    }
    found = mistakes({**TASKS["sft"], "checkpoint": {"load": {"type": "http", "taskId": "abc"}}})
    assert "leads to no files here" in found["checkpoint.load.taskId"]


def test_rows_are_found_by_their_spellings():
    pairs = {**TASKS["dpo"], "data": {"jsonl_path": "/data/pairs.jsonl", "chosen_field": "good"}}
    columns = {"prompt": "prompt", "chosen": "good", "rejected": "rejected"}
    assert spec_of(pairs)["data"] == {"type": "jsonl", "path": "/data/pairs.jsonl", "columns": columns}
    of_the_hub = {**TASKS["dpo"], "data": {"dataset_name": "a/b", "chosen_column": "good"}}
    assert spec_of(of_the_hub)["data"] == {"type": "dataset", "url": "a/b", "columns": columns}
    fetched = {**TASKS["dpo"], "data": {"jsonl": {"download_url": "http://h/a.jsonl"}}}
    assert spec_of(fetched)["data"] == {"type": "jsonl", "url": "http://h/a.jsonl"}
    with_key = {**TASKS["dpo"], "data": {"jsonl": {"url": "http://h/a.jsonl", "headers": {"A": "b"}}}}
    assert set(mistakes(with_key)) == {"data.jsonl.headers"}
    texts = {**TASKS["sft"], "data": {"dataset_name": "a/b", "text_field": "body"}}
    assert spec_of(texts)["data"] == {"type": "dataset", "url": "a/b", "columns": {"text": "body"}}


@pytest.mark.parametrize(("given", "column"), [({}, "query"), ({"query_field": "ask"}, "ask")])
def test_a_file_of_prompts_for_ppo_has_them_under_query(given, column):
    found = spec_of({**TASKS["ppo"], "data": {"jsonl": {"path": "/data/a.jsonl", **given}}})
    assert found["data"] == {"type": "jsonl", "path": "/data/a.jsonl", "columns": {"prompt": column}}


def test_the_length_of_ppo_cuts_prompts_and_is_that_of_answers_where_none_is_given():
    found = spec_of({**TASKS["ppo"], "training": {"max_seq_length": 80}})["training"]
    assert (found["response_length"], found["max_prompt_length"]) == (80, 80)
    with_answers = {**TASKS["ppo"], "training": {"max_seq_length": 80}, "generation": {"max_new_tokens": 9}}
    found = spec_of(with_answers)["training"]
    assert "response_length" not in found
    assert found["max_prompt_length"] == 80


def test_what_ends_an_answer_of_ppo_is_honoured_or_refused():
    assert spec_of({**TASKS["ppo"], "generation": {"stop": "eos"}})["training"]["stop_token"] == "eos"
    assert set(mistakes({**TASKS["ppo"], "generation": {"stop": "###"}})) == {"generation.stop"}
    twice = {**TASKS["ppo"], "generation": {"temperature": 0.5}, "training": {"temperature": 0.9}}
    assert "temperature" not in spec_of(twice)["training"]
    assert set(told(twice)) == {"training.temperature"}


def test_a_sentiment_is_scored_as_they_score_it():
    assert spec_of(TASKS["ppo"])["reward_model"] == {"type": "sentiment", "score": "margin"}
    scaled = {
        "type": "sentiment",
        "scale": 2.0,
        "positive_label": "POSITIVE",
        "negative_label": "neg",
        "max_length": 512,
    }
    assert spec_of({**TASKS["ppo"], "reward_model": scaled})["reward_model"] == {
        "type": "sentiment",
        "score": "margin",
        "weight": 2.0,
    }
    other = {"type": "sentiment", "positive_label": "joy", "negative_label": "grief", "max_length": 64}
    assert set(mistakes({**TASKS["ppo"], "reward_model": other})) == {
        "reward_model.positive_label",
        "reward_model.negative_label",
        "reward_model.max_length",
    }
    assert "the answer alone" in told({**TASKS["ppo"], "reward_model": {"identifier": "a/b"}})["reward_model"]
    assert "score" not in canonical(TASKS["ppo"])["reward_model"]


def test_deepspeed_is_told_or_refused_and_never_dropped():
    two = {"hardware": {"gpu": {"type": "any", "count": 2}}}
    assert "each GPU holds all of it" in told({**TASKS["sft"], "resources": two})["training"]
    assert (
        "no environment of gpuflow brings"
        in told({**TASKS["sft"], "training": {"deepspeed": {"a": 1}}})["training.deepspeed"]
    )
    assert set(mistakes({**TASKS["sft"], "training": {"zero_stage": 3}})) == {"training.zero_stage"}
    assert set(told({**TASKS["sft"], "training": {"zero_stage": 2}})) == {"training.zero_stage"}
    sharded = {"fsdp": "full_shard auto_wrap", "zero_stage": 3, "nproc_per_node": 2}
    for training in ({"auto_deepspeed": False}, sharded):
        assert not told({**TASKS["sft"], "resources": two, "training": training})


@pytest.mark.parametrize(
    ("task_type", "side", "is_told"),
    [("sft", "left", False), ("sft", "right", False), ("dpo", "left", True), ("ppo", "left", False)],
)
def test_the_side_of_the_padding_changes_no_loss(task_type, side, is_told):
    spec = {**TASKS[task_type], "training": {"padding_side": side}}
    assert bool(told(spec)) is is_told
    assert "padding_side" not in spec_of(spec)["training"]


@pytest.mark.parametrize("task_type", TRAINED)
@pytest.mark.parametrize(
    "value",
    [[], [1], {}, {"a": [None]}, "", "x", "${a}", -1, 1e400, 10**5000, True, False, "9" * 5000, "٣"],
    ids=repr_of,
)
def test_no_value_of_a_field_breaks_the_reader(task_type, value):
    fields = {
        "training": [
            "max_seq_length", "load_in_4bit", "bnb_4bit_quant_type", "resume_from_path", "zero_stage", "bf16",
            "auto_deepspeed", "deepspeed", "padding_side", "learning_rate", "early_stopping", "temperature",
        ],
        "generation": ["stop", "temperature", "max_new_tokens"],
        "reward_model": ["scale", "positive_label", "max_length", "type", "identifier"],
        "data": ["jsonl", "jsonl_path", "text_field", "columns"],
        "model": ["transformers"],
        "checkpoint": ["load"],
    }  # fmt: skip
    for section, names in fields.items():
        for name in names:
            given = TASKS[task_type].get(section)
            spec = {**TASKS[task_type], section: {**(given or {}), name: value}}
            for one in (spec, {**spec, section: value}, {**spec, "resources": {"hardware": {"gpu": {"count": value}}}}):
                with contextlib.suppress(InvalidTemplate):
                    foreign(one)


@pytest.mark.parametrize("name", ["lr", "epochs", "max_prompt_length", "tokenizer"])
def test_a_field_whose_meaning_is_known_and_that_is_not_taken_is_a_mistake(name):
    assert set(mistakes({**TASKS["sft"], "training": {name: 1}})) == {f"training.{name}"}


def test_of_inference_and_engines_likewise():
    ask = {"taskType": "inference", "model": {**MODEL, "vllm": {"swap_space": 4}}, "data": {"prompts": ["a"]}}
    assert {"model.vllm", "model.vllm.swap_space"} == set(told(ask))
    assert set(mistakes({**ask, "inference": {"num_beams": 4}})) == {"inference.num_beams"}
