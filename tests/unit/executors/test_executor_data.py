"""Reading rows, giving columns their roles, splitting: no model, no network."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.base import ExecutorError
from executors.data.columns import training_rows, with_text_column
from executors.data.presets import chatterbot_pairs
from executors.data.sources import read_entries, read_rows
from executors.data.splits import split
from gpuflow.protocol import Emitter


@pytest.fixture
def emitter():
    return Emitter(io.StringIO())


def _read(data, emitter):
    return read_rows(data, None, emitter, bare="text")


def _file(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_reads_lists_chats_and_prompts(emitter):
    chat = [{"role": "user", "content": "hi"}]

    assert _read({"type": "list", "items": ["a", {"x": 1}, chat]}, emitter) == [
        {"text": "a"}, {"x": 1}, {"messages": chat},
    ]  # fmt: skip
    assert read_entries({"type": "prompts", "prompts": ["a"]}, None, emitter) == ["a"]
    assert _read({"type": "list", "messages": chat}, emitter) == [{"messages": chat}]
    assert _read({"type": "list", "messages": [chat, chat]}, emitter) == [{"messages": chat}, {"messages": chat}]


def test_reads_jsonl_and_csv(emitter, tmp_path):
    jsonl = _file(tmp_path, "a.jsonl", '\ufeff{"q": "1\u2028"}\n\n{"q": "ü"}\n')
    table = _file(tmp_path, "a b.csv", 'q,a\n"x, y","two\nlines"\n')

    assert _read({"type": "jsonl", "path": jsonl}, emitter) == [{"q": "1\u2028"}, {"q": "ü"}]
    assert _read({"type": "jsonl", "url": f"file://{jsonl}"}, emitter) == [{"q": "1\u2028"}, {"q": "ü"}]
    assert _read({"type": "csv", "path": table}, emitter) == [{"q": "x, y", "a": "two\nlines"}]


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("jsonl", '{"a": 1}\n{oops}\n', "line 2 is not JSON"),
        ("jsonl", '"text"\n7\n', "row 1 is int"),
        ("jsonl", "", "no rows"),
        ("jsonl", b'{"a": "\xff"}\n', "not UTF-8"),
        ("jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("csv", "a,b\n1\n", "row 0 has another number of cells"),
        ("csv", "a,b\n1,2,3\n", "row 0 has another number of cells"),
        ("csv", 'a,b\n"x,1\n', "is not csv"),
        ("csv", "a,b\n", "no rows"),
    ],
)
def test_a_bad_file_is_told_with_its_place(emitter, tmp_path, kind, text, says):
    path = _file(tmp_path, f"rows.{kind}", text)

    with pytest.raises(ExecutorError, match=says) as caught:
        _read({"type": kind, "path": path}, emitter)

    assert caught.value.type == "BadInput"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"type": "jsonl", "path": "/no/such/file"}, "/no/such/file is no file"),
        ({"type": "jsonl"}, "needs data.path or data.url"),
        ({"type": "mystery"}, "cannot be read here"),
        ({"type": "list", "items": [7]}, "row 0 is int"),
    ],
)
def test_a_bad_section_is_told(emitter, data, says):
    with pytest.raises(ExecutorError, match=says):
        _read(data, emitter)


def test_shuffles_by_seed_and_cuts(emitter):
    items = [str(number) for number in range(20)]
    data = {"type": "list", "items": items, "shuffle": True, "seed": 3, "max_items": 5}

    first, again = _read(data, emitter), _read(data, emitter)

    assert first == again
    assert len(first) == 5
    assert first != _read({**data, "seed": 4}, emitter)
    assert _read({**data, "shuffle": False}, emitter) == [{"text": text} for text in items[:5]]


@pytest.mark.parametrize(
    ("row", "data", "expected"),
    [
        ({"prompt": "p", "completion": "c", "x": 1}, {}, {"prompt": "p", "completion": "c"}),
        ({"question": "p", "answer": 4}, {}, {"prompt": "p", "completion": "4"}),
        ({"text": "t"}, {}, {"text": "t"}),
        ({"body": "t"}, {"column": "body"}, {"text": "t"}),
        ({"q": "p", "a": "c"}, {"columns": {"prompt": "q", "completion": "a"}}, {"prompt": "p", "completion": "c"}),
        (
            {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
            {},
            {"messages": [{"role": "user", "content": "h"}, {"role": "assistant", "content": "g"}]},
        ),
        (
            {"prompt": [{"role": "user", "content": "h", "id": "x"}], "completion": "c"},
            {},
            {"prompt": [{"role": "user", "content": "h"}], "completion": "c"},
        ),
    ],
)
def test_columns_get_their_roles(row, data, expected):
    assert training_rows([row], data) == [expected]


@pytest.mark.parametrize(
    ("rows", "data", "says"),
    [
        ([{"frage": "q", "antwort": "a"}], {}, "the columns found are: frage, antwort"),
        ([{"q": "q"}], {"columns": {"prompt": "q", "completion": "a"}}, "names a, but the columns found are: q"),
        ([{"q": "q"}], {"columns": {"chosen": "q"}}, "roles chosen"),
        ([{"text": "t"}, {"body": "t"}], {}, "row 1 lacks 'text'; its columns are: body"),
        ([{"text": ["t"]}], {}, "row 0: text is list"),
        ([{"prompt": "p", "completion": None}], {}, "row 0 lacks 'completion'"),
        (
            [*[{"prompt": "p", "completion": "c"}] * 2, {"messages": [{"role": "user", "content": "x"}]}],
            {},
            "row 2 lacks 'prompt', 'completion'; its columns are: messages",
        ),
        ([{"messages": "hi"}], {}, "row 0: messages must be a list"),
        ([{"messages": [{"role": "user"}]}], {}, r"row 0: messages\[0\] must have a role and a content"),
        ([{}], {}, "the columns found are: none"),
    ],
)
def test_wrong_columns_are_named(rows, data, says):
    with pytest.raises(ExecutorError, match=says) as caught:
        training_rows(rows, data)

    assert caught.value.type == "BadInput"


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("row", "data", "column", "warns"),
    [
        ({"content": "a"}, {}, "content", None),
        ({"content": "a", "text": "b"}, {}, "content", None),
        (CHAT, {}, None, "the rows have messages"),
        ({**CHAT, "content": "a"}, {}, None, "the rows have messages"),
        ({"prompt": "a", "completion": "b"}, {}, None, "the rows have prompt and completion"),
        ({"question": "a", "answer": "b", "content": "c"}, {}, None, "data.column: content"),
        (CHAT, {"columns": {"messages": "messages"}}, None, "the section data names the columns"),
        ({"body": "a", "content": "b"}, {"column": "body"}, "body", "the section data names the columns"),
        ({"body": "a", "content": "b"}, {"columns": {"text": "content"}}, None, None),
        ({"content": "b"}, {"column": "content"}, "content", None),
    ],
)
def test_the_field_of_texts_counts_for_rows_of_texts_alone(row, data, column, warns):
    named, warning = with_text_column([row], data, "content")

    assert named.get("column") == column
    assert (warns in warning) if warns else warning is None
    assert training_rows([row], named)


@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=60).filter(lambda rows: len(set(rows)) > 1),
    st.floats(0.01, 0.9),
    st.integers(0, 5),
)
def test_a_split_keeps_every_row_and_equal_rows_together(texts, share, seed):
    rows = [{"text": text, "n": 0} for text in texts]

    train, evaluation = split(rows, share, seed)

    assert train
    assert evaluation
    assert sorted(map(json.dumps, train + evaluation)) == sorted(map(json.dumps, rows))
    assert not {row["text"] for row in train} & {row["text"] for row in evaluation}
    assert split(rows, share, seed) == (train, evaluation)


def test_a_split_of_different_rows_has_the_size_asked():
    rows = [{"text": str(number)} for number in range(100)]

    train, evaluation = split(rows, 0.1, 0)

    assert (len(train), len(evaluation)) == (90, 10)
    assert split(rows, 0, 0) == (rows, [])


def test_a_split_that_leaves_nothing_is_told():
    with pytest.raises(ExecutorError, match="nothing to train on"):
        split([{"text": "a"}] * 5, 0.2, 0)


def test_conversations_become_pairs(tmp_path):
    files = []
    for name, text in {
        "facts": "conversations:\n- [q, a1, a2, q]\n- [lonely]\n- broken\n- [1, 2.5]\n",
        "talk": "conversations:\n- [one, two, three]\n",
        "code": "conversations:\n- [x, y]\n",
    }.items():
        files.append(tmp_path / f"{name}.yml")
        files[-1].write_text(text)

    pairs = list(chatterbot_pairs(files, {"exclude": ["code"], "turns": ["talk"]}))

    assert pairs == [("q", "a1"), ("q", "a2"), ("1", "2.5"), ("one", "two"), ("two", "three")]
