"""Reading: hostile and broken files end in one clear line, and what YAML 1.1 misreads is read as written."""

from __future__ import annotations

import contextlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import parse, parse_text
from gpuflow.spec.reading import read_mapping, read_text

ECHO = "apiVersion: gpuflow/v1\nspec: {taskType: echo}\n"


def message(source, **options) -> str:
    with pytest.raises(InvalidTemplate) as caught:
        parse(source, **options)
    return str(caught.value)


def text_message(text: str) -> str:
    with pytest.raises(InvalidTemplate) as caught:
        parse_text(text, "f.yaml")
    return str(caught.value)


def test_a_file_of_50_mb_is_refused_before_it_is_read(tmp_path, monkeypatch):
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as stream:
        stream.truncate(50 * 2**20)
    monkeypatch.setattr("pathlib.Path.open", lambda *a, **k: pytest.fail("it was opened"))

    assert "has 50.0 MiB, more than the 10.0 MiB" in message(huge)


def test_max_bytes_moves_the_limit(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(ECHO)

    assert "more than" in message(path, max_bytes=10)
    assert parse(path, max_bytes=len(ECHO)).stages[0].task_type == "echo"


def test_a_pipe_is_refused_and_never_waited_for(tmp_path):
    fifo = tmp_path / "pipe.yaml"
    os.mkfifo(fifo)

    assert "is not a regular file" in message(fifo)


def test_a_folder_is_refused(tmp_path):
    assert "is a folder" in message(tmp_path)


def test_a_broken_link_is_refused(tmp_path):
    link = tmp_path / "link.yaml"
    link.symlink_to(tmp_path / "gone.yaml")

    assert "is not a regular file" in message(link)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"a: 1\nb: \xff\xfa\n", "latin.yaml:2: is not UTF-8: byte 0xff; save it as UTF-8"),
        ("a: 1".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b"a: \x00\n", "U+0000"),
        (b"a: 1\n\x07\n", "which YAML does not allow"),
    ],
)
def test_bytes_that_are_no_text(tmp_path, raw, words):
    path = tmp_path / "latin.yaml"
    path.write_bytes(raw)

    assert words in message(path)


def test_a_byte_order_mark_is_no_matter(tmp_path):
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + ECHO.encode())

    assert parse(path).api_version == "gpuflow/v1"


@pytest.mark.parametrize("name", ["nowhere.yaml", "no/such/folder/x.yaml", "", "a" * 5000, "a\0b", "line\nbreak"])
def test_a_name_of_nothing(name):
    report = message(name)

    assert "no such file" in report
    assert len(report.splitlines()) == 1


def test_a_near_name_is_offered(tmp_path):
    (tmp_path / "train.yaml").write_text(ECHO)

    assert f"did you mean {tmp_path / 'train.yaml'}" in message(str(tmp_path / "trian.yaml"))


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGE_BOMB = "a0: &a0 {k0: 1, l0: 1}\n" + "".join(
    f"a{n}: &a{n} {{x{n}: *a{n - 1}, y{n}: *a{n - 1}, <<: *a{n - 1}}}\n" for n in range(1, 40)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "aliases repeat more than"),
        (MERGE_BOMB, "aliases"),
        ("[" * 100_000, "nests deeper than 64"),
        ("{a: " * 1000, "nests deeper than 64"),
        ("- " * 1000 + "x", "nests deeper than 64"),
        ("a: &a [1]\n" + "b: " + "[" * 60 + "*a" + "]" * 60 + "\nc: " + "[" * 63 + "*a", "deeper than 64"),
        ('{"a": ' * 100_000, "nests too deep"),
        ('{"a": ' * 100 + "1" + "}" * 100, "nests deeper than 64"),
        ('{"a": ' * 50_000 + "1" + "}" * 50_000, "nests"),
        ("a: *nothing\n", "names nothing finished"),
        ("a: !!binary aGk=\n", "tag !!binary is not allowed"),
        ("a: !custom x\n", "tag !custom is not allowed"),
        ("a: 1" + "0" * 5000 + "\n", "too large a number"),
        ("a: .inf\n", "not a finite number"),
        ('{"a": 1e400}', "not a finite number"),
        ('{"a": 1' + "0" * 5000 + "}", "too large a number"),
        ('{"a": "\\ud800"}', "half of a character"),
        ("<<: 3\n", "must be a mapping"),
        ("a: 'unclosed\n", "not valid YAML"),
        ("%YAML 3.0\n---\na: 1\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_what_could_hurt_ends_in_one_line(text, words):
    report = text_message(text)

    assert words in report
    assert len(report.splitlines()) <= 2


def test_a_duplicate_key_names_both_lines_wherever_it_stands():
    assert "f.yaml:2: a.b: is given twice, in lines 2 and 4" in text_message("a:\n  b: 1\n  c: 2\n  b: 3\n")


def test_words_that_yaml_1_1_turns_into_other_things_stay_words():
    data = read_text("on: no\ntime: 1:30\nday: 2024-01-02\nnumber: 0755\nyes: y\nlike: 1e3", "f").data

    assert data == {
        "on": "no", "time": "1:30", "day": "2024-01-02", "number": "0755", "yes": "y", "like": "1e3",
    }  # fmt: skip


def test_plain_scalars():
    data = read_text("[1, -2, 0x1f, 0o17, 1_000, 1.5, .5, 1.0e-3, true, False, null, ~, '1', !!str 1, '']", "f").data

    assert data == [1, -2, 31, 15, 1000, 1.5, 0.5, 0.001, True, False, None, None, "1", "1", ""]


def test_numbers_where_text_is_wanted_stay_as_they_are_written():
    text = "apiVersion: gpuflow/v1\nspec: {taskType: command, command: [run, 3.10, 1_000], env: {A: 0x10, B: .5, C: 7}}"
    spec = parse_text(text).stages[0].spec
    assert spec["command"]["command"] == ["run", "3.10", "1_000"]
    assert spec["env"] == {"A": "0x10", "B": ".5", "C": "7"}
    data = read_text("{a: 3.10, b: 0x10}", "x").data
    assert json.loads(json.dumps(data)) == {"a": 3.1, "b": 16}
    assert read_mapping(data).data["a"].text == "3.10"


def test_aliases_and_merge_keys_within_reason():
    data = read_text("base: &b {x: 1, y: 2}\none: {<<: *b, y: 3}\ntwo: {<<: [*b, {z: 4}]}\nsame: *b", "f").data

    assert data["one"] == {"x": 1, "y": 3}
    assert data["two"] == {"x": 1, "y": 2, "z": 4}
    assert data["same"] == {"x": 1, "y": 2}


def test_flow_mappings_are_yaml_and_json_is_json():
    assert parse_text("{taskType: echo}").stages[0].task_type == "echo"
    assert parse_text('\n {"taskType": "echo", "echo": {"message": "\\ud83d\\ude00\\/"}}').stages[0].spec["echo"] == {
        "message": "😀/"
    }


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(min_size=1), JSON_VALUES, min_size=1))
def test_json_reads_back_as_it_was(value):
    text = json.dumps(value, indent=1)

    assert read_text(text, "x", is_json=True).data == value
    assert read_mapping(value).data == value


@given(st.text(max_size=300))
def test_no_text_makes_it_raise_anything_else(text):
    with contextlib.suppress(InvalidTemplate):
        parse_text(text, "any.yaml")


@given(JSON_VALUES)
def test_no_value_in_a_field_makes_it_raise_anything_else(value):
    with contextlib.suppress(InvalidTemplate):
        parse({"taskType": "echo", "data": value, "resources": value, "env": value, "echo": value, "retry": value})


SELF: dict = {"taskType": "echo"}
SELF["echo"] = {"output": SELF}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"taskType": "echo", 1: 2}, "not text"),
        ({"taskType": "echo", "echo": {"output": {1, 2}}}, "spec.echo.output: is a set"),
        ({"taskType": "echo", "echo": {"output": b"x"}}, "is a bytes"),
        ({"taskType": "echo", "echo": {"output": float("nan")}}, "not a finite number"),
        ({"taskType": "echo", "echo": {"output": 10**400}}, "a huge integer"),
        ({"taskType": "echo", "echo": {"output": "\ud800"}}, "half of a character"),
        (SELF, "nests deeper than 64"),
    ],
)
def test_mappings_from_python_that_json_cannot_hold(value, words):
    assert words.removeprefix("spec.") in message(value)


def test_the_mapping_given_is_never_shared():
    given = {"taskType": "echo", "echo": {"output": {"a": [1]}}}
    template = parse(given)
    given["echo"]["output"]["a"].append(2)

    assert template.stages[0].spec["echo"]["output"] == {"a": [1]}


def test_other_things_are_a_type_error():
    with pytest.raises(TypeError, match="not a int"):
        parse(3)  # type: ignore[arg-type]
