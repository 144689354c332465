"""Redaction, masked views, and where a worker finds a task's secrets."""

from __future__ import annotations

import base64
import json
import logging
import re
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors import failures
from executors.data import hub
from gpuflow.errors import NotAllowed
from gpuflow.logs import dress, get_logger
from gpuflow.secrets import (
    Redactor,
    is_secret_variable,
    known,
    mask_shapes,
    public_spec,
    secrets_in_environment,
    secrets_in_spec,
    url_secrets,
)
from gpuflow.settings import Settings
from gpuflow.worker.child_environment import FORBIDDEN, NO_HUB_LOGIN, OFFLINE, child_environment
from gpuflow.worker.secret_sources import MissingSecret, redactor_of, scrub, secret_values

VALUE = 'p+q/"r\\s & ünï=27'
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=6, max_size=40)


@pytest.mark.parametrize(
    "written",
    [
        VALUE,
        urllib.parse.quote(VALUE),
        urllib.parse.quote(VALUE, safe=""),
        urllib.parse.quote_plus(VALUE),
        re.sub("%..", lambda code: code[0].lower(), urllib.parse.quote(VALUE, safe="")),
        base64.b64encode(VALUE.encode()).decode(),
        base64.urlsafe_b64encode(VALUE.encode()).decode(),
        base64.b64encode(f"user:{VALUE}".encode()).decode(),
        base64.b64encode(f"us:{VALUE}!".encode()).decode(),
        VALUE.encode().hex(),
        json.dumps(VALUE),
        json.dumps(VALUE, ensure_ascii=False),
        json.dumps(json.dumps({"a": VALUE})),
        json.dumps(VALUE).replace("/", "\\/"),
        repr(VALUE),
    ],
)
def test_every_spelling_is_hidden(written: str) -> None:
    hidden = Redactor([VALUE]).text(f"<{written}>")

    assert "***" in hidden
    assert len(hidden) <= len("<***>") + 16, "no more of it is left than what stood beside it"
    assert not [piece for piece in (VALUE, written) if piece in hidden]


@given(secret=TEXTS, before=st.binary(max_size=5), after=st.binary(max_size=5))
def test_base64_is_hidden_at_any_alignment(secret: str, before: bytes, after: bytes) -> None:
    text = base64.b64encode(before + secret.encode() + after).decode()

    assert "***" in Redactor([secret]).values(text)


@given(
    secret=TEXTS,
    data=st.recursive(st.none() | st.booleans() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)),
)
def test_data_without_the_secret_stays_as_it_is(secret: str, data: object) -> None:
    redactor = Redactor([secret])
    if "***" not in json.dumps(redactor.data(data, shapes=False)):
        assert redactor.data(data, shapes=False) == data


def test_data_is_searched_in_keys_lists_and_numbers() -> None:
    redactor = Redactor(["12345678", "abcdef"])

    assert redactor.data({"abcdef": [12345678, True, None, 1.5, {"x": "-abcdef-"}]}) == {
        "***": ["***", True, None, 1.5, {"x": "-***-"}]
    }


def test_a_secret_of_several_lines_is_hidden_line_by_line() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nab\n-----END KEY-----"

    assert Redactor([key]).line(b"\xff MIIEvQIBADANBgkq ab") == b"\xff *** ab"


def test_too_short_values_are_left_alone() -> None:
    assert Redactor(["abc"], ["abcde"]).text("abc abcde") == "abc abcde"
    assert Redactor(["abcd"], ["abcdef"]).text("abcd abcdef") == "*** ***"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("GET https://ana:pw1@host/x?y=1", "GET https://***@host/x?y=1"),
        ("redis://:p%40ss@h:1/0, ssh://tok@h", "redis://***@h:1/0, ssh://***@h"),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("{'authorization': 'Basic dTpw', 'a': 1}", "{'authorization': '***', 'a': 1}"),
        ('{\\"Authorization\\": \\"token xyz\\"}', '{\\"Authorization\\": \\"***\\"}'),
        ("X-Api-Key=s3cr3t next", "X-Api-Key=*** next"),
        ("sent bearer abcdefg1 to it", "sent bearer *** to it"),
        ("bearer certificates are fine", "bearer certificates are fine"),
        ("https://s3/b/k?X-Amz-Signature=ab12&partNumber=1", "https://s3/b/k?X-Amz-Signature=***&partNumber=1"),
        ("hf_" + "a1" * 15, "***"),
        ("mail ana@host, 3://x, a: b", "mail ana@host, 3://x, a: b"),
        ("https://host/a@b", "https://host/a@b"),
    ],
)
def test_shapes_that_are_always_secret(text: str, hidden: str) -> None:
    assert mask_shapes(text) == hidden


@pytest.mark.parametrize(
    ("name", "secret"),
    [("HF_TOKEN", True), ("WANDB_API_KEY", True), ("DB_PASSWORD", True), ("aws_secret_access_key", True), ("KEY", True)]
    + [(name, False) for name in ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PWD", "HF_HOME", "MONKEY", "KEYBOARD")],
)
def test_names_of_secret_variables(name: str, secret: bool) -> None:
    assert is_secret_variable(name) is secret


def test_secrets_of_urls_and_of_an_environment() -> None:
    assert set(url_secrets("a https://u:p%40w@h b git://tok:x-oauth-basic@h c ftp://only@h http://h")) == {
        "p%40w", "p@w", "tok", "only",
    }  # fmt: skip
    environment = {"HF_TOKEN": "abc", "TLS_KEY": "/", "HTTP_PROXY": "http://me:word@proxy:1", "HOME": "/root"}
    assert set(secrets_in_environment(environment)) == {"abc", "word"}


SPEC = {
    "taskType": "echo",
    "echo": {"message": "plain", "token": "mine"},
    "data": {"items": [{"password": "a sample"}], "url": "https://me:dataword@h/x"},
    "training": {"hub_token": "hubword", "eos_token": "</s>", "learning_rate": 0.1},
    "qdrant": {"url": "http://q", "api_key": "${env:QDRANT}", "apiKey": "camelword"},
    "env": {"DB_PASSWORD": "dbword", "MODE": "fast", "URL": "https://envword@h"},
    "output": {"destination": {"type": "http", "headers": {"Authorization": "Bearer outword", "Accept": "*/*"}}},
    "notify": [{"on": ["failed"], "url": "https://hooks/T1/hookword", "headers": {"X-Mine": "headword"}}],
}


def test_secrets_of_a_spec_are_found_by_name_and_place() -> None:
    found = {value for value in secrets_in_spec(SPEC) if value}

    assert found == {
        "dataword", "hubword", "camelword", "dbword", "envword", "Bearer outword", "outword", "headword"
    }  # fmt: skip


def test_the_public_view_of_a_spec_has_no_secret() -> None:
    shown = json.dumps(public_spec(SPEC))

    words = ["dataword", "hubword", "camelword", "dbword", "envword", "outword", "headword", "hookword"]
    assert [word for word in words if word in shown] == []
    for kept in ("plain", "a sample", "fast", "${env:QDRANT}", "https://hooks/***", "*/*", "0.1", "</s>"):
        assert kept in shown, kept
    assert public_spec(None) is None


# -- where they come from -----------------------------------------------------------------------------------------


def find(folder: Path | None, name: str = "HF_TOKEN", **environ: str) -> str:
    return secret_values([name], environ=environ, folder=folder, worker="w1", allowed=["HF_*"])[name]


def test_the_environment_wins_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "HF_TOKEN"
    file.write_text("from file\n")
    file.chmod(0o600)

    assert find(tmp_path) == "from file"
    assert find(tmp_path, HF_TOKEN="") == "from file"
    assert find(tmp_path, HF_TOKEN="from worker") == "from worker"
    assert find(tmp_path, HF_TOKEN="from worker", GPUFLOW_SECRET_HF_TOKEN="meant") == "meant"


def test_a_variable_that_nobody_meant_for_tasks_is_not_given(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(NotAllowed, match=r"w1: .*AWS_SECRET_ACCESS_KEY is a variable of this.*=AWS_SEC") as refused:
            find(folder, "AWS_SECRET_ACCESS_KEY", AWS_SECRET_ACCESS_KEY="x" * 8)
        assert refused.value.setting == "GPUFLOW_ALLOW_SECRETS"
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text("for tasks")
    (tmp_path / "AWS_SECRET_ACCESS_KEY").chmod(0o600)

    assert find(tmp_path, "AWS_SECRET_ACCESS_KEY", AWS_SECRET_ACCESS_KEY="x" * 8) == "for tasks"
    assert find(None, "AWS_KEY", GPUFLOW_SECRET_AWS_KEY="meant") == "meant"


def test_a_missing_secret_names_worker_cause_and_mend(tmp_path: Path) -> None:
    with pytest.raises(MissingSecret, match=r"worker w1 has no secret HF_TOKEN.*GPUFLOW_SECRETS_DIR is not set; start"):
        find(None)
    with pytest.raises(
        MissingSecret, match=r"w1 .*HF_TOKEN cannot be read \(there is none\); write .*GPUFLOW_SECRET_HF_TOKEN set"
    ):
        find(tmp_path)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "HF_TOKEN").write_text("x" * 8)
    (tmp_path / "HF_TOKEN").chmod(mode)

    with pytest.raises(MissingSecret, match=rf"others can read or change .*mode {mode:o}\); run `chmod 600`"):
        find(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n", b"a\0b", b"\xff\xfe", b"x" * 65_537])
def test_a_file_that_holds_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "HF_TOKEN").write_bytes(content)
    (tmp_path / "HF_TOKEN").chmod(0o600)

    with pytest.raises(MissingSecret, match="must hold UTF-8 text"):
        find(tmp_path)


def test_a_folder_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "HF_TOKEN").mkdir()

    with pytest.raises(MissingSecret, match="HF_TOKEN"):
        find(tmp_path)


@pytest.mark.parametrize("name", ["REDIS_URL", "GPUFLOW_WORKER_TOKEN", "GPUFLOW_SECRET_A", "CELERY_BROKER_URL"])
def test_what_is_the_workers_alone_is_no_secret_of_a_task(name: str) -> None:
    with pytest.raises(MissingSecret, match=f"gives {name} to no task"):
        find(None, name, **{name: "x"})


def test_a_child_gets_the_allowlist_its_env_and_its_secrets() -> None:
    worker = {
        "PATH": "/bin", "HF_HOME": "/hf", "https_proxy": "p", "REDIS_URL": "r", "GPUFLOW_WORKER_TOKEN": "t",
        "GPUFLOW_ADMIN_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "a", "CELERY_X": "c", "MINE_1": "m", "OTHER": "o",
        "HF_HUB_OFFLINE": "0",
    }  # fmt: skip

    made = child_environment(
        worker,
        pass_env=("MINE_*", "GPUFLOW_*", "*URL", "CELERY_*"),
        requested={"A": "1", "B": "x ${env:A}", "REDIS_URL": "no", "S": "plain"},
        secrets={"S": "secret"},
        offline=True,
        given={"TASK_ID": "t1"},
    )

    inherited = {"PATH": "/bin", "HF_HOME": "/hf", "https_proxy": "p", "MINE_1": "m"}
    assert made == {**inherited, "A": "1", "S": "secret", "TASK_ID": "t1", **OFFLINE, **NO_HUB_LOGIN}
    assert {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"} <= set(OFFLINE)
    assert "REDIS_URL" in FORBIDDEN


def test_a_child_inherits_no_credentials_that_nobody_named() -> None:
    worker = {
        "HF_TOKEN": "t", "WANDB_API_KEY": "k", "MLFLOW_TRACKING_TOKEN": "t", "MLFLOW_TRACKING_PASSWORD": "p",
        "PIP_INDEX_URL": "https://u:p@pypi.internal/simple", "HTTPS_PROXY": "http://u:p@proxy:3128",
        "PIP_EXTRA_INDEX_URL": "https://t@a/x https://b/y", "no_proxy": "a,b", "WANDB_MODE": "offline",
        "GPUFLOW_SECRET_A": "s",
    }  # fmt: skip
    plain = {
        "PIP_INDEX_URL": "https://pypi.internal/simple", "HTTPS_PROXY": "http://proxy:3128",
        "PIP_EXTRA_INDEX_URL": "https://a/x https://b/y", "no_proxy": "a,b", "WANDB_MODE": "offline",
    }  # fmt: skip

    assert child_environment(worker, given={}) == {**plain, **NO_HUB_LOGIN}
    assert child_environment(worker, given={}, secrets={"HF_TOKEN": "t"}) == {**plain, "HF_TOKEN": "t"}
    passed = ("HF_TOKEN", "PIP_*", "GPUFLOW_*")
    whole = {name: worker[name] for name in ("HF_TOKEN", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")}
    assert child_environment(worker, given={}, pass_env=passed) == {**plain, **whole}


def test_the_redactor_of_a_task_knows_spec_environment_and_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_ONLY_PASSWORD", "machineword")
    settings = Settings.load({"REDIS_URL": "redis://:brokerword@h", "GPUFLOW_WORKER_TOKEN": "tokenword"})
    redactor = redactor_of([SPEC], {"S": "sssw"}, {"HTTPS_PROXY": "http://u:proxyword@p"}, settings)

    words = "sssw proxyword machineword brokerword tokenword dbword outword"
    assert redactor.values(words) == " ".join(["***"] * 7)


def test_files_that_a_child_left_are_scrubbed(tmp_path: Path) -> None:
    (tmp_path / "responses.json").write_text(json.dumps({"a": "12345678", "b": 12345678, "c": "x"}))
    (tmp_path / "notes.txt").write_bytes(b"\xff 12345678\n")
    (tmp_path / "notes.txt").chmod(0o640)
    (tmp_path / "weights.bin").write_bytes(b"12345678")
    (tmp_path / "final_model").mkdir()
    (tmp_path / "final_model" / "vocab.json").write_text('{"12345678": 1}')
    (tmp_path / "link.txt").symlink_to(tmp_path / "weights.bin")

    scrub(tmp_path, Redactor(["12345678"]))

    assert json.loads((tmp_path / "responses.json").read_text()) == {"a": "***", "b": "***", "c": "x"}
    assert (tmp_path / "notes.txt").read_bytes() == b"\xff ***\n"
    assert (tmp_path / "notes.txt").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "weights.bin").read_bytes() == b"12345678"
    assert (tmp_path / "final_model" / "vocab.json").read_text() == '{"12345678": 1}'
    assert len(list(tmp_path.iterdir())) == 5


def test_the_names_of_folders_above_the_attempt_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "final_model" / "task-1" / "attempt-1"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "notes.txt").write_text("12345678")
    (folder / "checkpoints" / "vocab.json").write_text('{"12345678": 1}')

    scrub(folder, Redactor(["12345678"]))

    assert (folder / "notes.txt").read_text() == "***"
    assert (folder / "checkpoints" / "vocab.json").read_text() == '{"12345678": 1}', "those of the attempt do"


# -- the worker's own log -------------------------------------------------------------------------------------------


def test_log_lines_and_tracebacks_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("gpuflow.test_secrets")
    handler = logging.StreamHandler(stream := __import__("io").StringIO())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    redactor = Redactor(["canaryword"])
    known.add(redactor)
    try:
        dress("text", logger.name)
        dress("text", logger.name)
        get_logger("gpuflow.test_secrets").info("seen", cause="canaryword", url="http://a:b@h", why=["canaryword"])
        try:
            raise ValueError("canaryword")
        except ValueError:
            logger.exception("failed with %s", "canaryword")
    finally:
        known.remove(redactor)
        logger.removeHandler(handler)

    written = stream.getvalue()
    assert "canaryword" not in written and "a:b" not in written
    assert written.count("***") >= 5 and "Traceback" in written
    assert known.text("canaryword") == "canaryword"


@pytest.mark.parametrize(
    ("asked", "usable"),
    [
        ({}, False),
        ({"secrets": {"HF_TOKEN": "t"}}, True),
        ({"secrets": {"OTHER": "t"}}, False),
        ({"pass_env": ("HF_*",)}, True),
        ({"pass_env": ("WANDB_*",)}, False),
        ({"hub_login": True}, True),
        ({"requested": {"HF_TOKEN": "t"}}, True),
        ({"requested": {"HF_TOKEN": " "}}, False),  # for the library it is none
        ({"requested": {"HF_TOKEN": "${env:MINE}"}, "secrets": {"MINE": "t"}}, True),
        ({"requested": {"E": "", "HF_TOKEN": "${env:E}${env:E}"}}, False),
        ({"requested": {"HF_TOKEN": "${env:NOWHERE}"}}, False),
        ({"requested": {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "0"}}, False),
    ],
)
def test_the_login_of_the_workers_user_is_for_tasks_that_name_a_token(asked: dict[str, Any], usable: bool) -> None:
    made = child_environment({"HF_HUB_DISABLE_IMPLICIT_TOKEN": "0"}, given={}, **asked)
    hidden = Redactor((), secrets_in_environment(made))

    assert (made.get("HF_HUB_DISABLE_IMPLICIT_TOKEN") != "1") is usable
    assert hidden.text("1 of 10") == "1 of 10"


def test_the_advice_on_a_token_names_what_a_worker_gives_to_tasks() -> None:
    for text in (failures._MENDS["NotAuthorized"], hub._GIVE_ACCESS):
        assert "(GPUFLOW_SECRET_HF_TOKEN in its environment, or a file HF_TOKEN in its GPUFLOW_SECRETS_DIR)" in text
