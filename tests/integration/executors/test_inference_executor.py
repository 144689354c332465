"""The task type inference on a tiny model; one task and a cancel by real child processes."""

from __future__ import annotations

import json
import signal

import pytest

from tests.fixtures.executor_child import Child, request_json
from tests.fixtures.hub import hub

pytestmark = pytest.mark.ml

PROMPTS = [
    "Hello Ana, the red car is",
    "Where is the blue lamp?",
    "Good morning",
    "Dear Bo, the green house is here. Dear Bo, the green house is here.",
    "ü",
]


def _texts(items):
    return {"type": "list", "items": items}


def _outputs(ended):
    return [item["output"] for item in ended.result["items"]]


def _alone(run, prompt, inference):
    (output,) = _outputs(run("inference", {"data": _texts([prompt]), "inference": inference}))
    return output


def test_a_batch_answers_as_single_prompts_do(start, run, tmp_path):
    greedy = {"temperature": 0, "max_tokens": 24}

    batched = start("inference", {"data": _texts(PROMPTS), "inference": greedy}).end()
    single = run("inference", {"data": _texts(PROMPTS), "inference": {**greedy, "batch_size": 1}}, out="single")

    assert _outputs(batched) == _outputs(single)
    assert len(set(_outputs(batched))) > 1
    result = batched.result
    assert [item["input"] for item in result["items"]] == PROMPTS
    assert [item["index"] for item in result["items"]] == list(range(5))
    assert {item["finish_reason"] for item in result["items"]} <= {"stop", "length"}
    usage = result["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage == single.result["usage"]
    assert (result["engine"], usage["completion_tokens"] <= 5 * 24) == ("transformers", True)
    assert batched.named("artifact") == [{"path": "responses.json"}]
    assert json.loads((tmp_path / "out" / "responses.json").read_text("utf-8")) == result
    assert batched.log == ""
    last = batched.named("progress")[-1]
    assert (last["current"], last["total"], last["unit"]) == (5, 5, "item")
    assert last["metrics"]["tokens_per_second"] > 0


def test_streamed_deltas_add_up_to_the_answers(run):
    greedy = {"temperature": 0, "max_tokens": 24}
    plain = run("inference", {"data": _texts(PROMPTS), "inference": greedy})
    text = max(_outputs(plain), key=len)
    stop = text[len(text) // 2 :][:3]

    streamed = run("inference", {"data": _texts(PROMPTS), "inference": {**greedy, "stream": True, "stop": [stop]}})

    told = [""] * len(PROMPTS)
    for event in streamed.named("text_delta"):
        told[event["request"]] += event["delta"]
    assert told == _outputs(streamed)
    assert told == [output.split(stop)[0] for output in _outputs(plain)]
    stopped = [item for item in streamed.result["items"] if item["output"] != _outputs(plain)[item["index"]]]
    assert stopped
    assert {item["finish_reason"] for item in stopped} == {"stop"}


def test_a_seed_repeats_and_sampling_varies(run):
    def sample(**inference):
        spec = {"data": _texts(PROMPTS[:2]), "inference": {"max_tokens": 16, "temperature": 1.5, **inference}}
        return _outputs(run("inference", spec))

    assert sample(seed=1) == sample(seed=1)
    assert sample(seed=1) != sample(seed=2)
    assert sample(seed=1, top_k=1) == sample(seed=2, top_k=1)
    assert sample(seed=1, top_p=1e-6) == sample(seed=1, top_k=1)


def test_a_long_prompt_cuts_no_other_answer(run):
    data = {"type": "list", "items": ["Hello", "Hello " * 110, "Dear Bo"]}
    inference = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}

    items = run("inference", {"data": data, "inference": inference}).result["items"]

    counts = [item["usage"]["completion_tokens"] for item in items]
    assert (counts[0], counts[2]) == (40, 40)
    assert 0 < counts[1] < 40


def test_n_answers_a_prompt(run):
    ended = run(
        "inference", {"data": _texts(PROMPTS[:2]), "inference": {"n": 3, "seed": 1, "max_tokens": 8, "stream": True}}
    )

    for item in ended.result["items"]:
        assert len(item["outputs"]) == 3
        assert item["output"] == item["outputs"][0]
        assert len(set(item["outputs"])) > 1
    assert {(event["request"], event["sample"]) for event in ended.named("text_delta")} <= {
        (request, sample) for request in range(2) for sample in range(3)
    }


def test_penalties_change_the_answer_and_eos_can_be_ignored(run):
    greedy = {"temperature": 0, "max_tokens": 40}
    plain = _alone(run, PROMPTS[0], greedy)

    assert _alone(run, PROMPTS[0], {**greedy, "frequency_penalty": 100.0}) != plain
    assert _alone(run, PROMPTS[0], {**greedy, "presence_penalty": 100.0}) != plain
    assert _alone(run, PROMPTS[0], {**greedy, "repetition_penalty": 5.0}) != plain
    ended = run("inference", {"data": _texts(PROMPTS[:1]), "inference": {**greedy, "ignore_eos": True}})
    assert ended.result["usage"]["completion_tokens"] == 40


def test_chats_and_system_prompts_reach_the_model(run):
    greedy = {"temperature": 0, "max_tokens": 12}
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]

    as_chat = run("inference", {"data": _texts([{"messages": chat}, {"prompt": "Hello"}]), "inference": greedy})
    as_text = run("inference", {"data": _texts(["Hello"]), "inference": {**greedy, "system_prompt": "Be brief."}})

    chat_item, prompt_item = as_chat.result["items"]
    (text_item,) = as_text.result["items"]
    assert chat_item["output"] == text_item["output"]
    assert chat_item["usage"] == text_item["usage"]
    assert chat_item["usage"]["prompt_tokens"] > prompt_item["usage"]["prompt_tokens"]
    assert chat_item["input"] == {"messages": chat}


def test_a_model_without_template_takes_plain_text(run, plain_model):
    ended = run(
        "inference",
        {"data": _texts(["Hello Ana"]), "inference": {"temperature": 0, "max_tokens": 4}},
        model=plain_model,
    )

    assert ended.result["items"][0]["usage"]["prompt_tokens"] <= 3


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"inference": {"logprobs": 3}}, "inference.logprobs is not supported"),
        ({"data": {"type": "list", "items": [{"frage": "x"}]}}, "its columns are: frage"),
        ({"data": {"type": "list", "items": ["word " * 600]}}, "the model takes 256"),
        ({"model": {"adapters": [{"type": "lora", "path": "/nowhere"}]}}, "/nowhere is no folder"),
        ({"model": {"transformers": {"dtype": "float99"}}}, "float99"),
        ({"model": {"source": {"type": "local", "identifier": "/nowhere"}}}, "/nowhere is no folder"),
    ],
)
def test_bad_input_is_told(run, spec, says):
    ended = run("inference", {"data": _texts(["a"]), **spec})

    assert ended.code == 1
    assert (ended.error["type"], ended.error["retryable"]) == ("BadInput", False)
    assert says in ended.error["message"]


def test_sigterm_in_the_middle_cancels(start, tmp_path):
    child = start(
        "inference",
        {"data": _texts(["Hello"] * 4000), "inference": {"ignore_eos": True, "max_tokens": 200, "batch_size": 1}},
    )
    child.until("progress")

    child.signal(signal.SIGTERM)
    ended = child.end()

    assert (ended.code, ended.finish) == (143, {"status": "cancelled"})
    assert not (tmp_path / "out" / "responses.json").exists()


def test_no_sequence_comes_twice_and_what_is_not_used_stands_in_the_result(run):
    said = {"type": "list", "items": [{"prompt": "Good morning", "metadata": {"id": 7}}, {"prompt": "Hi", "other": 1}]}
    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    plain = run("inference", {"data": said, "inference": greedy})
    once = run(
        "inference",
        {"data": said, "inference": {**greedy, "no_repeat_ngram_size": 1}, "model": {"vllm": {"max_model_len": 64}}},
    )

    assert _outputs(once) != _outputs(plain)
    first, second = once.result["items"]
    assert (first["input"], first["metadata"]) == ("Good morning", {"id": 7})
    assert second["input"] == {"prompt": "Hi", "other": 1}
    (warning,) = once.result["warnings"]
    assert "model.vllm is not used: this task runs on the transformers engine" in warning
    assert "warnings" not in plain.result


def test_an_id_that_the_hub_does_not_have_is_not_tried_again(tmp_path):
    model = {"source": {"type": "huggingface", "identifier": "ana/absent"}}
    request = request_json("inference", {"data": _texts(["Hello"]), "model": model}, tmp_path / "out")
    with hub(tmp_path, "ana/there") as address:
        child = Child(request, {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"})
        ended = child.end()
        child.close()

    assert (ended.error["type"], ended.error["retryable"]) == ("NotFound", False)
    assert "check the name" in ended.error["message"]
