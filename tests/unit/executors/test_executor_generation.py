"""Sampling parameters, prompts and the text of an answer: pure, no model."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from executors.base import ExecutorError
from executors.generation import parameters
from executors.generation.answers import batches
from executors.generation.parameters import Sampling, read_sampling
from executors.generation.prompts import Rendered, encoded, read_prompts, render
from executors.generation.rows import Row
from executors.training.shaping import shape, shape_preferences
from gpuflow.spec.engines import VLLM_ALONE
from gpuflow.spec.fields import load_schema
from gpuflow.spec.sections import INFERENCE

END = 256


def _decode(tokens):
    """A tokenizer of bytes, as byte-level BPE is at its smallest."""
    return bytes(token for token in tokens if token != END).decode("utf-8", "replace")


def _row(**sampling):
    return Row(Sampling(**sampling), _decode, {END})


def _feed(row, text, *, end=True):
    told = ""
    for token in [*text.encode(), *([END] if end else [])]:
        row.push(token)
        told += row.take_delta()
    row.close()
    return told + row.take_delta()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"structured_outputs": {"grammar": "root ::= a"}}, "structured_outputs.grammar needs the engine vllm"),
        ({"structured_outputs": {"jsn": {}}}, "jsn is unknown"),
        ({"logprobs": 5}, "inference.logprobs is not supported by the transformers engine"),
        ({"logit_bias": {"5": 1}}, "inference.logit_bias is not supported"),
        ({"temperature": -1}, "inference.temperature is -1; it must be 0"),
        ({"top_p": 0}, "inference.top_p"),
        ({"max_tokens": 0}, "inference.max_tokens"),
        ({"min_tokens": 9, "max_tokens": 5}, "inference.min_tokens"),
        ({"n": 2, "temperature": 0}, "all answers would be equal"),
        ({"repetition_penalty": 0}, "inference.repetition_penalty"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given, says):
    with pytest.raises(ExecutorError, match=says):
        read_sampling(given)


def test_each_field_of_sampling_is_honoured_or_is_of_vllm_alone():
    honoured = parameters._SAMPLING | parameters._OWN | parameters._HARMLESS
    fields = {*load_schema("sampling"), *INFERENCE.own} - set(INFERENCE.managed)

    assert fields == honoured | VLLM_ALONE
    assert not honoured & VLLM_ALONE
    for name in VLLM_ALONE:
        with pytest.raises(ExecutorError, match=f"inference.{name} is not supported"):
            read_sampling({name: 1})
        assert read_sampling({name: [], "max_tokens": 3}).max_tokens == 3


def test_reads_sampling_parameters():
    sampling = read_sampling({"stop": "x", "temperature": 0, "stream": True, "system_prompt": "s", "logprobs": None})

    assert sampling.stop == ("x",)
    assert sampling.generate_arguments() == {
        "max_new_tokens": 256,
        "do_sample": False,
        "num_return_sequences": 1,
        "repetition_penalty": 1.0,
    }
    assert read_sampling({"top_k": -1}).generate_arguments()["top_k"] == 0
    assert read_sampling(None) == Sampling()


@pytest.mark.parametrize(
    ("stop", "include", "text", "expected", "reason"),
    [
        ((), False, "hello", "hello", "stop"),
        (("\n",), False, "one\ntwo", "one", "stop"),
        (("\n",), True, "one\ntwo", "one\n", "stop"),
        (("END", "EN"), False, "an END", "an ", "stop"),
        (("STOP",), False, "no STO here", "no STO here", "stop"),
        (("ü",), False, "grün", "gr", "stop"),
    ],
)
def test_stop_strings_trim_the_answer(stop, include, text, expected, reason):
    row = _row(stop=stop, include_stop_str_in_output=include)

    told = _feed(row, text)

    assert (row.text, told, row.finish_reason) == (expected, expected, reason)


@pytest.mark.parametrize(
    ("include", "special", "expected"), [(False, True, "ab"), (True, True, "abX"), (False, False, "ab")]
)
def test_a_stop_token_is_no_part_of_the_text_unless_it_is_asked_for(include, special, expected):
    row = Row(Sampling(include_stop_str_in_output=include, skip_special_tokens=special), _decode, {END, ord("X")})

    told = _feed(row, "abXc", end=False)

    assert (row.text, told, row.finish_reason, row.tokens) == (expected, expected, "stop", 3)


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, "a"), (1, "a"), (2, "a.bc"), (4, "a.bc"), (5, "a.bc.d"), (7, "a.bc.d.")]
)
def test_a_stop_string_ends_an_answer_after_min_tokens_alone(min_tokens, expected):
    row = _row(stop=(".", "b."), min_tokens=min_tokens)

    _feed(row, "a.bc.d.", end=False)

    assert row.text == expected


def test_a_stop_string_may_begin_within_min_tokens():
    row = _row(stop=("bc.",), min_tokens=3)

    _feed(row, "a.bc.d.", end=False)

    assert row.text == "a."


def test_an_answer_without_end_token_ends_by_length():
    row = _row()

    _feed(row, "abc", end=False)

    assert (row.finish_reason, row.tokens) == ("length", 3)


def test_the_end_token_counts_and_what_follows_does_not():
    row = _row()
    for token in [65, END, 66, 66]:
        row.push(token)

    assert (row.text, row.tokens, row.finish_reason) == ("A", 2, "stop")


@given(st.text(max_size=60), st.lists(st.text(min_size=1, max_size=4), max_size=3))
@example("0K0", ["K", "0K0"])
def test_the_stream_equals_the_answer(text, stops):
    row = _row(stop=tuple(stops))

    told = _feed(row, text)

    # The stop string that is complete first ends the answer, also where a longer one begins before it.
    ends = next((end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)), len(text))
    cut = min((text.find(stop, 0, ends) for stop in stops if stop in text[:ends]), default=len(text))
    assert told == row.text == text[:cut]


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_do_no_harm(raw):
    row = _row()
    told = ""
    for byte in raw:
        row.push(byte)
        told += row.take_delta()
    row.close()

    assert told + row.take_delta() == row.text


class _Plain:
    chat_template = None


def test_reads_prompts_of_every_form():
    chat = [{"role": "user", "content": "hi"}]

    prompts = read_prompts(["a", {"prompt": "b", "id": 7}, {"messages": chat}, chat, {"question": 5}], {})

    assert [prompt.messages[0]["content"] for prompt in prompts] == ["a", "b", "hi", "hi", "5"]
    assert prompts[1].given == {"prompt": "b", "id": 7}
    assert [prompt.index for prompt in prompts] == [0, 1, 2, 3, 4]
    (named,) = read_prompts([{"body": "x", "text": "y"}], {"column": "body"})
    assert named.messages[0]["content"] == "x"


@pytest.mark.parametrize(
    ("entries", "data", "says"),
    [
        ([], {}, "no prompts"),
        ([{"frage": "x"}], {}, "item 0 has no messages or prompt; its columns are: frage"),
        ([{"text": "x"}], {"column": "body"}, "item 0 has no 'body'; its columns are: text"),
        ([["hi"]], {}, r"item 0\[0\] must have a role"),
        (["a", None], {}, "item 1 is NoneType"),
        ([""], {}, "item 0 is str"),
    ],
)
def test_bad_prompts_are_named(entries, data, says):
    with pytest.raises(ExecutorError, match=says):
        read_prompts(entries, data)


def test_without_a_template_contents_stand_below_each_other():
    (prompt,) = read_prompts(["hi"], {})

    assert render(prompt, _Plain(), {"system_prompt": "Be kind."}) == Rendered(text="Be kind.\n\nhi", templated=False)


class _Begins(_Plain):
    """A tokenizer without a template of its own, which begins each text with token 1."""

    def apply_chat_template(self, messages, *, chat_template, **_):
        return f"\x01{chat_template}{messages[0]['content']}"

    def __call__(self, texts, *, add_special_tokens):
        return {"input_ids": [[1] * add_special_tokens + list(text.encode()) for text in texts]}


def test_a_template_that_the_task_brings_writes_the_only_begin_token():
    (prompt,) = read_prompts(["hi"], {})

    templated, plain = render(prompt, _Begins(), {"chat_template": "x"}), render(prompt, _Begins(), {})

    assert encoded([plain, templated, plain], _Begins()) == [[1, *b"hi"], [1, *b"xhi"], [1, *b"hi"]]


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        ("", []),
        ("+++++", [(0, 2), (2, 4), (4, 5)]),
        ("+-+++-", [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6)]),
        ("--", [(0, 1), (1, 2)]),
    ],
)
def test_a_prompt_that_leaves_too_little_room_goes_alone(room, expected):
    spans = batches([one == "+" for one in room], 2)

    assert [(span.start, span.stop) for span in spans] == expected


@pytest.mark.parametrize(
    ("row", "chat", "separator", "expected"),
    [
        ({"text": "t"}, True, None, {"text": "t"}),
        (
            {"prompt": "p", "completion": "c"},
            True,
            None,
            {"prompt": [{"role": "user", "content": "p"}], "completion": [{"role": "assistant", "content": "c"}]},
        ),
        ({"prompt": "p", "completion": "c"}, True, " ", {"prompt": "p ", "completion": "c"}),
        ({"prompt": "p", "completion": "c"}, False, None, {"prompt": "p\n", "completion": "c"}),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            True,
            None,
            {"messages": [{"role": "user", "content": "a"}]},
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            False,
            None,
            {"text": "a\n\nb"},
        ),
    ],
)
def test_rows_take_the_shape_of_the_trainer(row, chat, separator, expected):
    assert shape([row], chat=chat, separator=separator) == [expected]


def test_preferences_that_repeat_the_prompt_ask_it_once():
    chat = [{"role": "user", "content": "Why?"}]
    good, bad = ([*chat, {"role": "assistant", "content": text}] for text in ("So.", "No."))
    asked_once = [{"prompt": chat, "chosen": good[1:], "rejected": bad[1:]}]

    assert (
        shape_preferences([{"prompt": "Why?", "chosen": good, "rejected": bad}], chat=True, separator=None)
        == asked_once
    )
    assert (
        shape_preferences([{"prompt": chat, "chosen": good, "rejected": bad}], chat=True, separator=None) == asked_once
    )
    text = {"prompt": "Why?", "chosen": "Why? So.", "rejected": "Why? No."}
    assert shape_preferences([text], chat=False, separator="") == [
        {"prompt": "Why?", "chosen": " So.", "rejected": " No."}
    ]
    other = {"prompt": "Why?", "chosen": "Why? So.", "rejected": "No."}
    assert shape_preferences([other], chat=False, separator="") == [other]
