"""Training data with tool calls on a tiny model: each row reaches the model as its template writes it."""

from __future__ import annotations

import pytest

from executors.sft import SupervisedTuning
from tests.fixtures.tiny_model import make_tiny_model

pytestmark = pytest.mark.ml

#: As public templates write tools: the offer at the front, a call as JSON.
TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}[call {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}"
)
ASK = {"role": "user", "content": "Go."}


def _row(name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    tool = {"type": "function", "function": {"name": name, "parameters": {key: {} for key in arguments}}}
    return {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [tool]}


def _squeezed(text):
    return "".join(text.split())


@pytest.fixture
def trained_texts(monkeypatch):
    """What the trainer was given to train on, as text."""
    texts = []
    make = SupervisedTuning.trainer

    def kept(self, parts):
        trainer = make(self, parts)
        texts.extend(trainer.processing_class.decode(row["input_ids"]) for row in trainer.train_dataset)
        return trainer

    monkeypatch.setattr(SupervisedTuning, "trainer", kept)
    return texts


def test_calls_of_different_tools_are_trained_as_they_are(run, tmp_path, trained_texts):
    from transformers import AutoTokenizer

    model = make_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    rows = [
        _row("add", {"a": 1}),
        _row("say", {"words": "hi"}),
        {"messages": [ASK, {"role": "assistant", "content": "No."}]},
    ]
    spec = {
        "data": {"type": "list", "items": rows},
        "training": {"max_steps": 1, "per_device_train_batch_size": 1, "save_model": False},
    }

    ended = run("sft", spec, model=model)

    assert ended.result["metrics"]["train_rows"] == 3
    expected = [
        tokenizer.apply_chat_template(
            [{**message, "content": message["content"] or ""} for message in row["messages"]],
            tools=row.get("tools"),
            tokenize=False,
        )
        for row in rows
    ]
    written = zip(map(_squeezed, expected), map(_squeezed, trained_texts), strict=True)
    assert all(wanted in text for wanted, text in written), (expected, trained_texts)


def test_a_template_without_tools_is_told_before_the_model_loads(run):
    spec = {"data": {"type": "list", "items": [_row("add", {"a": 1})]}, "training": {"max_steps": 1}}

    ended = run("sft", spec)

    assert (ended.code, ended.error["type"]) == (1, "BadInput")
    assert "leaves out the tool 'add'" in ended.error["message"]
