"""Trainings and answers against plain scripts of TRL and transformers with the same settings: equal numbers.

Both sides run in this process, on the same weights, in float32.
"""

from __future__ import annotations

import csv
import json
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest

from gpuflow.templates import parse
from tests.fixtures.tiny_model import PAIRS, make_tiny_model

pytestmark = pytest.mark.ml

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
SETTINGS = {
    "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_length": 48, "seed": 5,
    "lr_scheduler_type": "constant",
}  # fmt: skip
#: What a script for a CPU says beside the settings.
SCRIPT = {"use_cpu": True, "bf16": False, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
LONG = {"prompt": "Where is the red car? " * 20, "completion": "Here."}
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _asked(text):
    return [{"role": "user", "content": text}]


def _said(text):
    return [{"role": "assistant", "content": text}]


def _call(name):
    tool = {"type": "function", "function": {"name": name, "parameters": {}}}
    call = {"type": "function", "function": {"name": name, "arguments": {"a": 1}}}
    return {
        "messages": [*_asked("Add it."), {"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": [tool],
    }


CHAT_PAIRS = [{"prompt": _asked(p["prompt"]), "completion": _said(p["completion"])} for p in PAIRS]
LONG_CHAT = {"prompt": _asked(LONG["prompt"]), "completion": _said(LONG["completion"])}
CHATS = [{"messages": [*_asked(p["prompt"]), *_said(p["completion"])]} for p in PAIRS]
TEXTS = [{"text": f"{p['prompt']} {p['completion']}"} for p in PAIRS]
SEPARATED = [{"prompt": f"{p['prompt']} ", "completion": p["completion"]} for p in PAIRS]
QUESTIONS = [{"question": p["prompt"], "answer": p["completion"]} for p in PAIRS]
CALLS = [_call("add"), _call("say")] * 4
PREFERENCES = [{"prompt": p["prompt"], "chosen": p["completion"], "rejected": "Hello, I say no."} for p in PAIRS]
CHAT_PREFERENCES = [
    {"prompt": _asked(p["prompt"]), "chosen": _said(p["completion"]), "rejected": _said("Hello, I say no.")}
    for p in PAIRS
]
TEXT_PREFERENCES = [
    {"chosen": f"{p['prompt']} {p['completion']}", "rejected": f"{p['prompt']} Hello, I say no."} for p in PAIRS
]
TOOL_PREFERENCES = [
    {
        "prompt": row["messages"][:1],
        "chosen": row["messages"][1:],
        "rejected": _said("Hello, I say no."),
        "tools": row["tools"],
    }
    for row in CALLS
]
WHOLE_CHATS = [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in CHAT_PREFERENCES]


def _jsonl(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"type": "jsonl", "path": str(path)}


def _csv(folder, rows):
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return {"type": "csv", "path": str(path)}


def _list(_folder, rows):
    return {"type": "list", "items": rows}


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = make_tiny_model(tmp_path_factory.mktemp("tools"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def _plain(task_type, model, rows, lora, folder, settings=SETTINGS):
    """Train as a script of TRL does; return its rows, steps and losses."""
    import datasets
    import trl
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    kinds = {"dpo": (trl.DPOConfig, trl.DPOTrainer)}
    config, trainer = kinds.get(task_type, (trl.SFTConfig, trl.SFTTrainer))
    arguments = config(output_dir=str(folder), **SCRIPT, **settings)
    set_seed(arguments.seed)
    made = trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows, on_mixed_types="use_json"),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **(LORA if lora is True else lora)) if lora else None,
    )
    made.train()
    losses = [(log["step"], log["loss"]) for log in made.state.log_history if "loss" in log]
    return len(made.train_dataset), made.state.global_step, losses


@pytest.fixture
def plain(tmp_path):
    """Run a script beside the tests: its libraries must not take the folder tests/vllm for vLLM."""

    def run_plain(*args, **settings):
        tests = Path(__file__).resolve().parents[2]
        path = [folder for folder in sys.path if Path(folder or ".").resolve() != tests]
        with warnings.catch_warnings(), mock.patch.object(sys, "path", path):
            warnings.simplefilter("ignore")
            return _plain(*args, tmp_path / "plain", **settings)

    return run_plain


@pytest.mark.parametrize(
    ("task_type", "write", "given", "scripted", "extra"),
    [
        ("lora_sft", _list, [*PAIRS, LONG], [*CHAT_PAIRS, LONG_CHAT], {}),
        ("sft", _jsonl, PAIRS, CHAT_PAIRS, {}),
        ("lora_sft", _jsonl, CHATS, CHATS, {}),
        ("lora_sft", _list, TEXTS, TEXTS, {}),
        ("lora_sft", _csv, TEXTS, TEXTS, {}),
        ("sft", _csv, QUESTIONS, CHAT_PAIRS, {}),
        ("lora_sft", _csv, QUESTIONS, SEPARATED, {"separator": " "}),
        ("lora_sft", _list, CALLS, CALLS, {}),
        ("lora_sft", _csv, QUESTIONS, CHAT_PAIRS, {}),
        ("sft", _jsonl, CHATS, CHATS, {}),
        ("sft", _list, TEXTS, TEXTS, {}),
        ("sft", _csv, TEXTS, TEXTS, {}),
        ("sft", _jsonl, CALLS, CALLS, {}),
        ("dpo", _list, PREFERENCES, CHAT_PREFERENCES, {"lora": True}),
        ("dpo", _jsonl, WHOLE_CHATS, WHOLE_CHATS, {"lora": True}),
        ("dpo", _csv, PREFERENCES, CHAT_PREFERENCES, {}),
        ("dpo", _csv, PREFERENCES, CHAT_PREFERENCES, {"lora": True}),
        ("dpo", _jsonl, WHOLE_CHATS, WHOLE_CHATS, {}),
        ("dpo", _list, TEXT_PREFERENCES, TEXT_PREFERENCES, {}),
        ("dpo", _jsonl, TEXT_PREFERENCES, TEXT_PREFERENCES, {"lora": True}),
        ("dpo", _jsonl, TOOL_PREFERENCES, TOOL_PREFERENCES, {}),
        ("dpo", _list, TOOL_PREFERENCES, TOOL_PREFERENCES, {"lora": True}),
    ],
    ids=[
        "lora-pairs-list", "sft-pairs-jsonl", "lora-messages-jsonl", "lora-text-list", "lora-text-csv", "sft-pairs-csv",
        "lora-separator-csv", "lora-tools", "lora-pairs-csv", "sft-messages-jsonl", "sft-text-list", "sft-text-csv",
        "sft-tools-jsonl", "dpo-lora-list", "dpo-lora-chats-jsonl", "dpo-full-csv", "dpo-lora-csv",
        "dpo-full-chats-jsonl", "dpo-full-text-list", "dpo-lora-text-jsonl", "dpo-full-tools-jsonl",
        "dpo-lora-tools-list",
    ],
)  # fmt: skip
def test_a_training_has_the_rows_steps_and_losses_of_the_plain_script(
    run, plain, tmp_path, tiny_model, tool_model, task_type, write, given, scripted, extra
):
    model = tool_model if "tools" in given[0] else tiny_model
    is_lora = task_type == "lora_sft" or extra.get("lora", False)
    data = {**write(tmp_path, given), **({"separator": " "} if "separator" in extra else {})}
    settings = {**SETTINGS, "max_length": 192 if given is TOOL_PREFERENCES else SETTINGS["max_length"]}
    spec = {"data": data, "training": {**settings, "save_model": False}, **({"lora": LORA} if is_lora else {})}

    ended = run(task_type, spec, model=model)
    rows, steps, losses = plain(task_type, model, scripted, is_lora, settings=settings)

    history = json.loads((tmp_path / "out" / "responses.json").read_text())["history"]
    ours = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    assert (ended.result["rows_trained"], ended.result["steps"]) == (rows, steps)
    assert ours == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in losses]
    assert len(losses) == SETTINGS["max_steps"]
    assert ended.result["rows_dropped"] == ({"max_length": 1} if len(given) > len(PAIRS) else {})


@pytest.mark.parametrize(
    ("task_type", "settings", "lora"),
    [
        ("sft", {"learning_rate": 5e-5, "per_device_train_batch_size": 2, "max_length": 1024}, None),
        (
            "lora_sft",
            {"learning_rate": 2e-4, "per_device_train_batch_size": 2, "max_length": 1024},
            {
                "r": 16,
                "lora_alpha": 32,
                "lora_dropout": 0.05,
                "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            },
        ),
        ("dpo", {"learning_rate": 5e-7, "per_device_train_batch_size": 4}, None),
    ],
    ids=["sft", "lora", "dpo"],
)
def test_a_template_of_flowmesh_that_says_nothing_trains_as_a_script_with_its_defaults(
    run, plain, tmp_path, tiny_model, task_type, settings, lora
):
    rows = PREFERENCES if task_type == "dpo" else QUESTIONS
    file = tmp_path / "given.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {} if task_type == "dpo" else {"prompt_field": "question", "response_field": "answer"}
    data = {"jsonl": {"path": str(file), **columns}}
    spec = {"taskType": task_type, "model": {"source": {"identifier": "a/b"}}, "data": data}
    (stage,) = parse({"apiVersion": "flowmesh/v1", "spec": spec}).stages
    asked = {name: value for name, value in stage.spec.items() if name not in ("taskType", "model")}
    joined = [{"text": f"{row['question']}\n\n{row['answer']}"} for row in QUESTIONS]
    scripted = {**settings, "num_train_epochs": 1}

    ended = run(task_type, {**asked, "training": {**asked["training"], "logging_steps": 1, "save_model": False}})
    given = CHAT_PREFERENCES if task_type == "dpo" else joined
    _, steps, losses = plain(task_type, tiny_model, given, lora, settings=scripted)

    history = json.loads((tmp_path / "out" / "responses.json").read_text())["history"]
    assert ended.result["steps"] == steps == -(-len(rows) // settings["per_device_train_batch_size"])
    ours = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    assert ours == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in losses]


def test_greedy_answers_are_those_of_plain_transformers(run, tiny_model):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked = [pair["prompt"] for pair in PAIRS[:10]] + ["Hello", "Good morning Ana, where is the green house? " * 3]
    tokens, size = 24, 4

    ended = run(
        "inference",
        {
            "data": {"type": "list", "items": asked},
            "inference": {"temperature": 0, "max_tokens": tokens, "batch_size": size},
            "model": {"transformers": {"dtype": "float32"}},
        },
    )

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    chats = [tokenizer.apply_chat_template(_asked(text), tokenize=False, add_generation_prompt=True) for text in asked]
    expected = []
    for start in range(0, len(chats), size):
        batch = tokenizer(
            chats[start : start + size],
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
            return_token_type_ids=False,
        )
        with torch.inference_mode():
            made = model.generate(**batch, max_new_tokens=tokens, do_sample=False)
        expected += tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    assert [item["output"] for item in ended.result["items"]] == expected
    assert len({*expected}) > 1


@pytest.mark.parametrize(
    ("task_type", "rows", "lora"),
    [("sft", PAIRS, None), ("lora_sft", PAIRS, LORA), ("dpo", PREFERENCES, None), ("dpo", PREFERENCES, LORA)],
    ids=["sft", "lora", "dpo-full", "dpo-lora"],
)
def test_a_resumed_training_is_the_uninterrupted_one(run, tmp_path, task_type, rows, lora):
    from safetensors.torch import load_file

    training = {**SETTINGS, "max_steps": 6, "save_steps": 2, "save_total_limit": 5, "logging_steps": 1}
    spec = {"data": _jsonl(tmp_path, rows), "training": training, **({"lora": lora} if lora else {})}

    whole = run(task_type, spec, out="whole", checkpoint_dir=str(tmp_path / "checkpoints"))
    again = run(
        task_type, spec, out="again", checkpoint_dir=str(tmp_path / "more"), resume_from=whole.result["checkpoints"][0]
    )

    losses = {}
    for name in ("whole", "again"):
        history = json.loads((tmp_path / name / "responses.json").read_text())["history"]
        losses[name] = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    assert again.result["resumed_from_step"] == 2
    assert losses["again"][-4:] == [(step, pytest.approx(loss, abs=1e-4)) for step, loss in losses["whole"][-4:]]
    file = "final_lora/adapter_model.safetensors" if lora else "final_model/model.safetensors"
    weights = [load_file(tmp_path / name / file) for name in ("whole", "again")]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].allclose(weights[1][name], atol=1e-5) for name in weights[0])
