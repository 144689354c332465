"""The canonical form: library names, typed values, only what was set; and the shipped schemas behind it."""

from __future__ import annotations

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.routing.session_names import session_name
from gpuflow.spec import canonical
from gpuflow.spec.fields import known_fields, load_schema
from gpuflow.spec.sections import ENGINE, INFERENCE, LORA, TRAINING_SCHEMAS, training_section

CHAT = {"role": "user", "content": "a"}
MODEL = {"source": {"identifier": "m"}}


def train(task_type: str = "sft", **training):
    spec = {"taskType": task_type, "model": MODEL, "data": {"url": "a/b"}, "training": training}
    if task_type in ("ppo", "grpo"):
        spec["reward_model"] = {"type": "sentiment"}
    return canonical(spec)["training"]


def ask(**inference):
    return canonical({"taskType": "inference", "model": MODEL, "data": {"items": ["x"]}, "inference": inference})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"batch_size": 4}, {"per_device_train_batch_size": 4}),
        ({"batch_size": "4"}, {"per_device_train_batch_size": 4}),
        ({"batch_size": 4, "per_device_train_batch_size": 4}, {"per_device_train_batch_size": 4}),
        ({"max_seq_length": 128}, {"max_length": 128}),
        ({"learning_rate": "1e-3"}, {"learning_rate": 0.001}),
        ({"learning_rate": 1}, {"learning_rate": 1.0}),
        ({"max_steps": 60.0}, {"max_steps": 60}),
        ({"max_steps": -1}, {"max_steps": -1}),
        ({"packing": "yes"}, {"packing": True}),
        ({"save_strategy": False}, {"save_strategy": "no"}),
        ({"report_to": ["wandb", "mlflow"]}, {"report_to": ["wandb", "mlflow"]}),
        ({"nproc_per_node": None}, {"nproc_per_node": None}),
        ({"lr_scheduler_type": "cosine-with-restarts"}, {"lr_scheduler_type": "cosine_with_restarts"}),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"allow_multi_gpu": True, "save_model": False}, {"allow_multi_gpu": True, "save_model": False}),
    ],
)
def test_training(given, expected):
    assert train(**given) == expected


def test_each_task_type_has_its_own_fields():
    assert train("dpo", beta=0.2, loss_type="sigmoid") == {"beta": 0.2, "loss_type": ["sigmoid"]}
    assert train("ppo", num_ppo_epochs=2, batch_size=1) == {"num_ppo_epochs": 2, "per_device_train_batch_size": 1}
    assert train("grpo", num_generations=4) == {"num_generations": 4}
    with pytest.raises(InvalidTemplate, match="max_completion_length"):
        train("grpo", max_seq_length=10)
    with pytest.raises(InvalidTemplate, match=r"spec\.training\.beta: unknown field"):
        train("sft", beta=0.2)


@pytest.mark.parametrize("task_type", ["ppo", "grpo"])
def test_a_training_by_rewards_needs_one(task_type):
    with pytest.raises(InvalidTemplate, match=f"taskType {task_type} needs reward_model"):
        canonical({"taskType": task_type, "model": MODEL, "data": {"prompts": ["a"]}})


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"generation": {"top_p": 0.5}}, "generation.top_p"),
        ({"generation": {"do_sample": False}}, "generation.do_sample"),
        ({"generation": {"repetition_penalty": 1.1}}, "generation.repetition_penalty"),
        ({"data": {"prompts": ["a"], "eval_split": 0.5}}, "data.eval_split"),
    ],
)
def test_what_ppo_cannot_do_is_a_mistake_and_what_it_does_anyhow_is_none(more, path):
    spec = {"taskType": "ppo", "model": MODEL, "data": {"prompts": ["a"]}, "reward_model": {"type": "sentiment"}}
    with pytest.raises(InvalidTemplate) as caught:
        canonical({**spec, **more})
    assert [one.path for one in caught.value.mistakes] == [f"spec.{path}"]
    same = {"do_sample": True, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1, "temperature": 0.5}
    assert canonical({**spec, "generation": same})
    assert canonical({**spec, "taskType": "grpo", **more})


@pytest.mark.parametrize("task_type", sorted(TRAINING_SCHEMAS))
def test_every_default_of_the_pinned_configs_passes(task_type):
    section = training_section(task_type)
    defaults = {
        name: entry["default"]
        for name, entry in load_schema(section.schema).items()
        if "default" in entry and name not in section.managed and name not in section.aliases
    }

    assert train(task_type, **defaults) == defaults


def test_every_default_of_the_others_passes():
    for section, wrap in ((LORA, "lora"), (INFERENCE, "inference"), (ENGINE, "vllm")):
        fields = {
            name: entry["default"]
            for name, entry in load_schema(section.schema).items()
            if "default" in entry and name not in section.managed
        }
        spec = {"taskType": "inference", "model": dict(MODEL), "data": {"items": ["x"]}}
        if wrap == "lora":
            spec |= {"taskType": "lora_sft", "data": {"url": "a/b"}, "lora": fields}
        elif wrap == "vllm":
            spec["model"]["vllm"] = fields
        else:
            spec["inference"] = fields
        done = canonical(spec)
        assert (done["model"]["vllm"] if wrap == "vllm" else done[wrap]) == fields


def test_schemas_hold_what_the_docs_name():
    assert {"batch_size", "per_device_train_batch_size", "max_length", "save_model", "report_to"} <= set(
        known_fields(training_section("sft"))
    )
    assert {"r", "lora_alpha", "alpha", "dropout", "target_modules"} <= set(known_fields(LORA))
    assert {"max_tokens", "temperature", "top_p", "seed", "stop", "n", "system_prompt", "stream"} <= set(
        known_fields(INFERENCE)
    )
    assert {"tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "dtype"} <= set(known_fields(ENGINE))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"temperature": 0, "seed": 1}, {"temperature": 0.0, "seed": 1}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
        ({"stop": "end"}, {"stop": "end"}),
        ({"system_prompt": "be brief", "stream": True}, {"system_prompt": "be brief", "stream": True}),
    ],
)
def test_inference(given, expected):
    assert ask(**given)["inference"] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"items": ["a"]}, {"type": "list", "items": ["a"]}),
        ({"prompts": ["a"]}, {"type": "prompts", "prompts": ["a"]}),
        ({"messages": [CHAT]}, {"type": "list", "messages": [CHAT]}),
        ({"upload": "./a.csv"}, {"type": "csv", "upload": "./a.csv"}),
        ({"path": "/data/a.parquet"}, {"type": "parquet", "path": "/data/a.parquet"}),
        ({"url": "https://x/a.jsonl?k=1"}, {"type": "jsonl", "url": "https://x/a.jsonl?k=1"}),
        ({"url": "org/set", "column": "q"}, {"type": "dataset", "url": "org/set", "column": "q"}),
        ({"type": "preset", "name": "chat", "max_items": 9}, {"type": "preset", "name": "chat", "max_items": 9}),
    ],
)  # fmt: skip
def test_data_says_its_type(given, expected):
    assert canonical({"taskType": "inference", "model": MODEL, "data": given})["data"] == expected


def test_shorthands():
    assert canonical({"taskType": "command", "command": "ls -l"})["command"] == {"command": "ls -l"}
    assert canonical({"taskType": "echo", "resources": "A100:2"})["resources"] == {"accelerators": "A100:2"}
    assert canonical({"taskType": "echo", "gpu": {"fraction": "0.5"}})["resources"] == {
        "hardware": {"gpu": {"fraction": 0.5}}
    }
    assert canonical({"taskType": "echo", "model": {"source": {"identifier": "m"}}})["model"]["source"] == {
        "type": "huggingface",
        "identifier": "m",
    }


def test_only_what_was_set_and_nulls_are_unset():
    assert canonical({"taskType": "echo", "timeout": None, "retry": {"max_attempts": "2"}}) == {
        "taskType": "echo",
        "retry": {"max_attempts": 2},
    }


def test_echo_takes_all_that_tests_need():
    echo = {
        "message": "hi", "output": {"a": [1, None]}, "sleep_seconds": 0.5, "steps": 3, "exit_code": 3, "children": 2,
        "fail": {"type": "Oops", "message": "m", "retryable": True}, "ignore_sigterm": True, "stdout_garbage": True,
        "silent": False, "ignore_notice": True, "checkpoint_steps": 5, "until_exists": "/tmp/gate",
    }  # fmt: skip
    assert canonical({"taskType": "echo", "echo": echo, "data": {"items": ["x"]}})["echo"] == echo


def test_data_that_looks_like_a_reference_is_data_at_dispatch():
    text = "call ${HOME} and ${a.b}"

    assert canonical({"taskType": "echo", "data": {"items": [text]}})["data"]["items"] == [text]


def test_an_environment_reference_may_stand_for_a_typed_value():
    assert train(max_steps="${env:STEPS}") == {"max_steps": "${env:STEPS}"}
    with pytest.raises(InvalidTemplate, match="a whole number"):
        train(max_steps="${tune.steps}")


def test_columns_of_a_graph_template_of_lists_make_rows():
    template = {
        "columns": [{"label": "Q", "value": ["a", "b"]}, {"label": "A", "value": [{"output": "x"}, {"output": "y"}]}]
    }
    data = {"type": "graph_template", "template": template}

    assert canonical({"taskType": "echo", "data": data})["data"]["items"] == ["Q:\na\n\nA:\nx", "Q:\nb\n\nA:\ny"]
    template["columns"][0]["value"] = ["a"]
    with pytest.raises(InvalidTemplate, match="equally long"):
        canonical({"taskType": "echo", "data": data})


def test_canonical_names_every_mistake():
    with pytest.raises(InvalidTemplate) as caught:
        canonical({"taskType": "inference", "inference": {"n": 0}, "priority": 11})

    assert {one.path for one in caught.value.mistakes} == {
        "spec.model", "spec.data", "spec.inference.n", "spec.priority",
    }  # fmt: skip


def embed(**fields):
    return canonical({"taskType": "embedding", "data": {"items": ["x"]}, **fields})


@pytest.mark.parametrize(
    ("given", "model", "left"),
    [
        ({"embedding": {"model": "org/m"}}, {"source": {"identifier": "org/m", "type": "huggingface"}}, None),
        ({"embedding": {"model": "gpt2-tiny"}}, {"source": {"identifier": "gpt2-tiny", "type": "preset"}}, None),
        ({"embedding": {"model": "/there/m"}}, {"source": {"identifier": "/there/m", "type": "local"}}, None),
        (
            {"embedding": {"model": "org/m", "normalize": False}, "model": {"vllm": {"seed": 1}}},
            {"source": {"identifier": "org/m", "type": "huggingface"}, "vllm": {"seed": 1}},
            {"normalize": False},
        ),
        (
            {"embedding": {"model": "org/other", "batch_size": 2}, "model": MODEL},
            {"source": {"identifier": "m", "type": "huggingface"}},
            {"batch_size": 2},
        ),
        ({"embedding": {"model": "${env:NAME}"}}, None, {"model": "${env:NAME}"}),
    ],
)
def test_the_model_of_an_embedding_is_model_source(monkeypatch, given, model, left):
    monkeypatch.setattr("gpuflow.spec.normalise.list_presets", lambda kind: ["gpt2-tiny"])

    spec = embed(**given)

    assert (spec.get("model"), spec.get("embedding")) == (model, left)
    assert canonical(spec) == spec


def test_both_ways_to_name_the_model_of_an_embedding_have_one_warm_session():
    source = {"identifier": "org/m"}

    names = {session_name(embed(embedding={"model": "org/m"})), session_name(embed(model={"source": source}))}

    assert len(names) == 1
    assert "" not in names


def test_an_embedding_needs_a_model():
    with pytest.raises(InvalidTemplate, match=r"needs model\.source or embedding\.model"):
        embed(embedding={"normalize": True})
    with pytest.raises(InvalidTemplate, match=r"spec\.embedding\.model: is required and missing"):
        canonical({"taskType": "rag", "query": "x", "embedding": {"normalize": True}})
