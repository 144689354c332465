"""Signatures: no two different documents have the same bytes to sign, and nothing but what was signed fits."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.broker.signed_messages import (
    SIGNATURE_HEADER,
    StoredCall,
    checked,
    signed_anew,
    signed_call,
    stored_call,
    with_signature,
)
from gpuflow.errors import InvalidSettings
from gpuflow.settings import Settings
from gpuflow.signatures import Kind, SignatureRefused, Signer, SigningKey, canonical, read_keys, signer_of

OURS, OLD, FOREIGN = (SigningKey(secret=letter * 64) for letter in (b"a", b"b", b"c"))
#: What JSON can hold, with texts that look like parts of JSON, lone surrogates, and numbers of both kinds.
TEXTS = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(
    ['"', "\\", "a:1", '","', "é", "\ud800"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def signer(*keys: SigningKey, fleet: str = "", days: float = 1, requires: bool = True) -> Signer:
    return Signer(keys or (OURS,), mode="require" if requires else "sign", fleet=fleet, seconds=days * 86_400)


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same one: 1 is neither 1.0 nor true."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other and (not isinstance(one, float) or str(one) == str(other)))


def message(**headers: Any) -> dict[str, Any]:
    return {
        "body": "W10=",
        "headers": {"task": "t", "id": "1", **headers},
        "properties": {"delivery_tag": "tag", "priority": 5, "body_encoding": "base64"},
    }


def reason(raw: str, by: Signer, queue: str | None = "q", **more: Any) -> str:
    try:
        checked(by, raw, queue=queue, **more)
    except SignatureRefused as error:
        return error.reason
    return ""


@given(VALUES, VALUES)
def test_two_documents_have_the_same_bytes_only_if_they_are_the_same(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) is same(one, other)


@given(VALUES)
def test_the_bytes_are_those_of_what_a_reader_finds_in_the_text(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, indent=1), json.dumps(value, ensure_ascii=False)):
        assert canonical(json.loads(text)) == canonical(json.loads(json.dumps(value)))


@given(VALUES, st.sampled_from(["message", "pipeline", "call"]), st.sampled_from(["", "t1:"]))
def test_a_signature_is_of_one_kind_of_one_fleet_by_one_key(value: Any, kind: Kind, fleet: str) -> None:
    token = signer(fleet=fleet).sign(kind, value)
    assert signer(OLD, OURS, fleet=fleet).check(kind, value, token).key == OURS.id
    with pytest.raises(SignatureRefused):
        signer(fleet=fleet).check("schedule", value, token)
    with pytest.raises(SignatureRefused):
        signer(fleet=fleet + "x").check(kind, value, token)
    with pytest.raises(SignatureRefused, match="is not in"):
        signer(FOREIGN, fleet=fleet).check(kind, value, token)


@given(st.text(max_size=120) | st.integers() | st.none() | st.lists(st.text(), max_size=2))
def test_whatever_stands_in_the_place_of_a_signature_is_refused(token: Any) -> None:
    with pytest.raises(SignatureRefused):
        signer().check("message", {}, token)


@given(st.integers(0, 200), st.characters(codec="ascii"))
def test_a_signature_with_one_other_character_is_refused(place: int, letter: str) -> None:
    token = signer().sign("message", {"a": 1})
    place %= len(token)
    changed = token[:place] + letter + token[place + 1 :]
    if changed != token:
        with pytest.raises(SignatureRefused):
            signer().check("message", {"a": 1}, changed)
    with pytest.raises(SignatureRefused):
        signer().check("message", {"a": 1}, token[:place])


def test_a_message_is_signed_with_all_that_it_holds_but_its_time() -> None:
    by = signer()
    sent = with_signature(by, message(), ["q", "r"], hints={"x": "echo"}, owner="ana")
    waits = {"at": 12.5, "x": "echo", **sent}
    assert reason(json.dumps(waits), by) == reason(json.dumps(waits), by, "r") == ""
    assert reason(json.dumps({**waits, "at": 99}), by) == ""
    assert reason(json.dumps(waits), by, "s") == "queue"
    changes: list[dict[str, Any]] = [
        {"x": "inference"},
        {"body": "W11="},
        {"y": 1},
        {"content-type": "application/x-python-serialize"},
        {"headers": {**sent["headers"], "task": "u"}},
        {"headers": {**sent["headers"], "id": "2"}},
        {"headers": {**sent["headers"], "new": 1}},
        {"headers": {**sent["headers"], "gpuflow_owner": "root"}},
        {"headers": {**sent["headers"], "gpuflow_queues": ["q", "r", "s"]}},
        {"properties": {**sent["properties"], "body_encoding": None}},
        {"properties": {**sent["properties"], "priority": 9}},
        {"properties": {**sent["properties"], "delivery_tag": "another"}},
    ]
    assert {reason(json.dumps({**waits, **change}), by) for change in changes} == {"forged"}
    assert reason("[", by) == reason("[]", by) == reason("[" * 100_000, by) == "malformed"
    assert reason(json.dumps(message()), by) == "unsigned"


def test_a_message_with_a_name_twice_is_refused_as_not_all_who_read_it_see_the_same_one() -> None:
    sent = json.dumps({"x": "echo", **with_signature(signer(), message(), ["q"], hints={"x": "echo"})})
    assert reason(sent, signer()) == ""
    for decoy in ('{"x": "inference", ' + sent[1:], sent[:-1] + ', "headers": {"task": "evil"}}'):
        assert reason(decoy, signer()) == "malformed"


def test_a_signature_ends_with_its_days_counted_from_when_a_delayed_message_is_due() -> None:
    over = signer(days=-1)
    assert reason(json.dumps(with_signature(over, message(), ["q"])), signer()) == "expired"
    later = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() + 3 * 86_400))
    assert reason(json.dumps(with_signature(over, message(gpuflow_eta=later), ["q"])), signer()) == ""
    stored = json.dumps(with_signature(over, message(), ["q"]))
    assert reason(stored, signer(), None, task_id="1") == "expired"
    assert reason(stored, signer(), None, task_id="1", is_timed=False) == ""
    assert reason(stored, signer(), None, task_id="2", is_timed=False) == "forged"


def test_a_message_that_is_signed_anew_has_another_signature_and_the_same_content() -> None:
    raw = json.dumps({"at": 1.0, **with_signature(signer(OLD), message(), ["q"])})
    fresh = signed_anew(signer(OURS, OLD), raw, "1", "new tag")
    assert json.loads(fresh)["properties"].pop("delivery_tag") == "new tag"
    assert checked(signer(), fresh, queue="q").id != checked(signer(OLD), raw, queue="q").id
    without = [json.loads(text) for text in (raw, fresh)]
    for each in without:
        del each["headers"][SIGNATURE_HEADER], each["properties"]["delivery_tag"]
    assert without[0] == without[1]
    with pytest.raises(SignatureRefused):
        signed_anew(signer(), json.dumps(message()), "1", "t")
    assert signed_anew(signer(requires=False), json.dumps(message()), "1", "t") == json.dumps(message())


@given(st.dictionaries(st.text(max_size=4), VALUES, min_size=1, max_size=3))
def test_a_call_has_its_spec_and_its_place(spec: dict[str, Any]) -> None:
    whole = json.dumps(spec)
    text = signed_call(signer(), "d1", whole)
    for by in (signer(), None):
        read = stored_call(by, "d1", text)
        assert read.refused is None
        assert same(read.spec, json.loads(whole))
    for refused in (("d2", text), ("d1", whole), ("d1", json.dumps({**json.loads(text), "other": 1}))):
        assert stored_call(signer(), *refused).refused is not None
    assert stored_call(signer(requires=False), "d1", whole) == StoredCall(spec=json.loads(whole))


def settings(path: Path, mode: str = "require") -> Settings:
    env = {"GPUFLOW_SIGNING": mode, "GPUFLOW_SIGNING_KEY_FILE": str(path)}
    return Settings.load(env=env, cwd=path.parent)


def test_a_key_file_holds_one_key_a_line_and_its_keys_are_shown_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# the new one\n{'n' * 32}\n\n  {'o' * 64}\n")
    path.chmod(0o640)
    new, old = read_keys(path)
    assert (new.secret, old.secret) == (b"n" * 32, b"o" * 64)
    by = signer_of(settings(path))
    assert by is not None
    assert by.public() == {"mode": "require", "key": new.id, "accepts": sorted([new.id, old.id])}
    assert not [text for text in (repr(by), repr(new), str(by.public())) if "nnnn" in text or "oooo" in text]


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        ("x" * 31, 0o600, "holds 31 bytes; a key has at least 32"),
        ("", 0o600, "holds 0 bytes"),
        ("# nothing\n", 0o600, "holds 0 bytes"),
        ("x" * 32 + "\nshort", 0o600, "holds 5 bytes"),
        ("\n".join(letter * 32 for letter in "abcdefghijklmnopq"), 0o600, "keep at most 16"),
        ("x" * 32, 0o644, "has mode 0644: others can read or change it"),
        ("x" * 32, 0o620, "has mode 0620"),
    ],
)
def test_a_bad_key_file_is_refused_with_its_cause(tmp_path: Path, content: str, mode: int, why: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(InvalidSettings, match=why):
        read_keys(path)


def test_a_key_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("x" * 32)
    path.chmod(0o600)
    if path.stat().st_uid == 0:
        os.chown(path, 12_345, -1)
    monkeypatch.setattr("os.geteuid", lambda: 54_321)
    with pytest.raises(InvalidSettings, match="belongs to another user"):
        read_keys(path)


def test_settings_that_sign_need_a_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="GPUFLOW_SIGNING is sign, and GPUFLOW_SIGNING_KEY_FILE names no key"):
        Settings.load(env={"GPUFLOW_SIGNING": "sign"}, cwd=tmp_path)
    with pytest.raises(InvalidSettings, match="cannot be read: No such file"):
        signer_of(settings(tmp_path / "none"))
    assert signer_of(settings(tmp_path / "none", "off")) is None
