"""Templates made from a seed, valid and not: each task type with what it needs, and up to three changes."""

from __future__ import annotations

import copy
import random
from typing import Any, Final

_MODEL: Final = {"source": {"identifier": "smollm2-135m-instruct"}}
_ROWS: Final = {"type": "list", "items": [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]}
_PAIRS: Final = {"preferences": [{"prompt": "a", "chosen": "b", "rejected": "c"}]}
_PROMPTS: Final = {"prompts": ["a", "b", "c"]}
_SPECS: Final[dict[str, dict[str, Any]]] = {
    "echo": {"data": {"items": [1, 2, 3]}},
    "inference": {"model": _MODEL, "data": _PROMPTS},
    "embedding": {"model": _MODEL, "data": _PROMPTS},
    "rag": {"embedding": {"model": "all-minilm-l6-v2"}, "query": "q", "search": {"documents": {"items": ["a"]}}},
    "sft": {"model": _MODEL, "data": _ROWS},
    "lora_sft": {"model": _MODEL, "data": _ROWS, "lora": {"r": 8}},
    "dpo": {"model": _MODEL, "data": _PAIRS},
    "reward": {"model": _MODEL, "data": _PAIRS},
    "grpo": {"model": _MODEL, "data": _PROMPTS, "reward_model": {"type": "function", "identifier": "length"}},
    "ppo": {"model": _MODEL, "data": _PROMPTS, "reward_model": {"type": "sentiment"}},
    "command": {"command": "true"},
    "container": {"container": {"preset": "loading-worker"}},
    "acme.translate": {"parameters": {"to": "fr"}, "data": {"items": ["a"]}},
}

#: What is put somewhere, right or wrong: path, and values.
_CHANGES: Final[tuple[tuple[str, tuple[Any, ...]], ...]] = (
    (
        "resources.accelerators",
        (
            "A100:1",
            "A100:H100:2",
            "A100:99999999999999999999",
            "40GB+:1..4",
            ["H100:1", "24GB:1"],
            ["A100", "A100"],
            "A100:0",
            "cpu",
            "0.5",
            "any:1",
            "RTX4090",
            "A100-80GB:2",
            "TPU:1",
            ":",
            "A100:2:3",
            {"A100": 1},
            "80GB..40GB:1",
        ),
    ),
    (
        "resources.hardware",
        (
            {"cpu": "4"},
            {"memory": "16Gi"},
            {"gpu": {"count": 2, "type": "a100*"}},
            {"gpu": {"count": "1..4"}},
            {"cpu": -1},
            {"gpu": {"count": "4..1"}},
            {"gpu": {"memory": "lots"}},
            {"gpu": {"fraction": 0.5}},
            {"disk": "10"},
            {"gpu": {"shared": True, "count": 2}},
            {"gpu": {"type": "any", "count": 0}},
            {"gpu": {"compute_capability": "8.0"}},
        ),
    ),
    ("resources.labels", ({"team": "nlp"}, {"team": ["a"]}, {"location": "us-*"}, {"x": None})),
    ("resources.replicas", (1, 2, 0, 5000)),
    ("parallel", ({"enabled": True}, {"max_shards": 2}, {"enabled": False, "max_shards": 2}, {"max_shards": 0})),
    (
        "inference",
        (
            {"temperature": 0},
            {"temperature": -1},
            {"max_tokens": 16, "n": 2},
            {"templates": {"type": "object"}},
            {"no_repeat_ngram_size": 3},
            {"structured_outputs": {"regex": "a+"}},
            {"logprobs": 3},
            {"do_sample": True, "temperature": 0},
            {"colour": "red"},
            {"templates": [{"name": "a"}]},
        ),
    ),
    ("engine", ("vllm", "transformers", "auto", "other")),
    ("environment", ("fast", "no/name")),
    (
        "training",
        (
            {"max_steps": 3},
            {"learning_rate": 50},
            {"nproc_per_node": 2},
            {"allow_multi_gpu": False, "nproc_per_node": 2},
            {"report_to": "nowhere"},
            {"output_dir": "/x"},
            {"load_in_4bit": True},
            {"max_seq_length": 64},
            {"bf16": True},
            {"zero_stage": 3},
            {"lr": 1e-3},
            {"resume_from_path": "/models/x"},
        ),
    ),
    (
        "output",
        (
            {"destination": {"type": "http"}},
            {"destination": {"type": "http", "url": "http://h/x", "timeoutSec": 9}},
            {"destination": {"type": "callback", "url": "http://h/x", "retries": 2}},
            {"destination": {"type": "callback"}},
            {"destination": {"type": "ftp"}},
            {"artifacts": ["results.json"]},
            {"artifacts": ["/etc/passwd"]},
            {"destination": {"type": "s3", "url": "s3://bucket/x"}},
            {"aliases": {"a": "../b"}},
        ),
    ),
    (
        "postprocess",
        ({"jsonl_export": {"path": "a.jsonl", "fields": {"a": "output"}}}, {"jsonl_export": {"path": "a"}}),
    ),
    ("data.split", ("train", "train[:1%]")),
    ("data.seed", (3,)),
    ("data.columns", ({"prompt": "q"}, {"promt": "q"}, {"chosen": "a", "rejected": "b"})),
    ("data.eval_split", (0.2, "test")),
    ("data.upload", ("/nowhere/rows.jsonl",)),
    ("model.vllm", ({"max_model_len": 64},)),
    ("target", ("worker", "local")),
    ("prority", (3,)),
    ("data.metadata", ([{"id": 1}, {}, {}], [{}], "x")),
    (
        "data",
        (
            {"type": "dataset", "url": "a/b", "split": "train"},
            {"items": []},
            {"type": "jsonl"},
            {"type": "nothing"},
            {"type": "graph_template", "template": {"columns": [{"label": "a", "value": "b"}]}},
            {"type": "graph_template", "template": {"name": "unknown", "columns": [{"label": "a", "value": "b"}]}},
            {
                "type": "graph_template",
                "template": {"name": "two_column_briefing", "columns": [{"label": "a", "value": "b"}]},
            },
            {"items": [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]]},
        ),
    ),
    (
        "model",
        (
            {"source": {"identifier": "example/chat"}, "vllm": {"max_model_len": 64}},
            {"source": {}},
            {"source": {"identifier": "example/chat"}, "transformers": {"dtype": "float32"}},
            {"source": {"type": "ftp", "identifier": "a"}},
            {"source": {"identifier": "example/chat"}, "adapters": [{"type": "lora"}]},
        ),
    ),
    ("checkpoint", ({"load": {"path": "/models/x"}}, {"load": {}}, {"load": {"path": "/x", "url": "http://h/x"}})),
    ("retry", ({"max_attempts": 3}, {"max_attempts": 0})),
    ("timeout", ("2h", 0, "soon")),
    ("priority", (9, 12, True)),
    ("merge", ("always", "sometimes")),
    ("sloSeconds", (30, -1)),
    ("env", ({"A": "1"}, {"PATH": "/x"}, {"REDIS_URL": "x"})),
    ("secrets", (["HF_TOKEN"], ["no name"])),
    ("notify", ([{"on": ["failed"], "url": "http://h/x"}], [{"on": [], "url": "x"}], [{"on": ["failed"]}])),
    ("taskType", ("training", None, "acme.other", 7)),
    ("unknown_field", (1,)),
    ("enforce_cpu", (True, False)),
    ("condition", ({"node": "a", "field": "x", "equals": 1},)),
)


def make_template(seed: int) -> dict[str, Any]:
    """Return a template of this seed."""
    chance = random.Random(seed)
    version = chance.choice(["gpuflow/v1", "gpuflow/v1", "flowmesh/v1", "mloc/v1"])
    shape = chance.choice(["single", "stages", "graph"])
    if shape == "single":
        spec = _changed(chance)
    elif shape == "stages":
        spec = {"stages": [{"name": f"s{n}", "spec": _changed(chance)} for n in range(chance.randint(1, 3))]}
    else:
        nodes = [{"name": f"n{n}", "spec": _changed(chance)} for n in range(3)]
        nodes[2]["dependsOn"] = chance.choice([["n0", "n1"], ["n0"], "n1", ["n9"], ["n2"]])
        spec = {"graph": {"nodes": nodes}}
        if chance.random() < 0.2:
            nodes[2]["spec"] = {**_SPECS["inference"], "taskType": "inference"}
            nodes[2]["spec"]["data"] = {"items": [chance.choice(["${n0.items}", "${n0}", "{{n0.items}}", "${n9.x}"])]}
    return {"apiVersion": version, "metadata": {"name": f"made-{seed}"}, "spec": spec}


def _changed(chance: random.Random) -> dict[str, Any]:
    task_type = chance.choice(list(_SPECS))
    spec: dict[str, Any] = {"taskType": task_type, **copy.deepcopy(_SPECS[task_type])}
    for path, values in chance.sample(_CHANGES, chance.choice([0, 0, 1, 1, 2, 3])):
        *above, last = path.split(".")
        at: Any = spec
        for step in above:
            at = at.setdefault(step, {}) if isinstance(at, dict) else None
        if isinstance(at, dict):
            at[last] = copy.deepcopy(chance.choice(values))
    return spec
