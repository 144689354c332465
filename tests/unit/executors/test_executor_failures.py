"""Failures and what they say about another attempt."""

from __future__ import annotations

import errno
import urllib.error

import pytest

from executors.base import ExecutorError, plain
from executors.failures import MAX_MESSAGE, classify
from executors.registry import EXECUTORS, find
from gpuflow.errors import GPUFlowError


def _named(name: str, *bases: type[Exception]) -> type[Exception]:
    return type(name, bases or (Exception,), {})


class _HTTPError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.response = type("Response", (), {"status_code": status})()


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


CASES = [
    (ExecutorError("Mine", "m", retryable=True), "Mine", True),
    (MemoryError(), "OutOfMemory", True),
    (_named("OutOfMemoryError", RuntimeError)("CUDA out of memory. Tried to allocate 2 GiB"), "OutOfMemory", True),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "OutOfMemory", True),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "OutOfMemory", True),
    (OSError(errno.ENOSPC, "No space left on device"), "DiskFull", True),
    (_named("SafetensorError")("Error while serializing: No space left on device (os error 28)"), "DiskFull", True),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "DiskFull", True),
    (GPUFlowError("no preset 'x' in models"), "BadInput", False),
    (ModuleNotFoundError("No module named 'torch'"), "MissingDependency", False),
    (_HTTPError(401), "NotAuthorized", False),
    (_HTTPError(403), "NotAuthorized", False),
    (_HTTPError(404), "NotFound", False),
    (_HTTPError(429), "Network", True),
    (_HTTPError(503), "Network", True),
    (_HTTPError(400), "_HTTPError", False),
    (
        _caused(OSError("You are trying to access a gated repo."), _named("GatedRepoError")("403")),
        "NotAuthorized",
        False,
    ),
    (_caused(OSError("not a local folder"), _named("RepositoryNotFoundError")("401")), "NotFound", False),
    (
        OSError("x/y is not a local folder and is not a valid model identifier listed on 'https://hub'"),
        "NotFound",
        False,
    ),
    (_caused(OSError("couldn't connect"), _named("LocalEntryNotFoundError")("offline")), "Network", True),
    (
        _caused(OSError("couldn't connect"), _caused(_named("LocalEntryNotFoundError")("x"), _HTTPError(404))),
        "NotFound",
        False,
    ),
    (
        _caused(OSError("couldn't connect"), _caused(_named("LocalEntryNotFoundError")("x"), _HTTPError(503))),
        "Network",
        True,
    ),
    (_caused(_named("ConnectError")("x"), _named("RemoteEntryNotFoundError", _HTTPError)(404)), "Network", True),
    (_caused(RuntimeError("could not save"), OSError(errno.ENOSPC, "full")), "DiskFull", True),
    (ConnectionResetError("reset by peer"), "Network", True),
    (TimeoutError("timed out"), "Network", True),
    (urllib.error.URLError("name not known"), "Network", True),
    (urllib.error.HTTPError("http://h", 404, "gone", {}, None), "NotFound", False),  # type: ignore[arg-type]
    (_named("ConnectTimeout")("slow"), "Network", True),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "DeviceFault", True),
    (RuntimeError("CUDA error: device-side assert triggered"), "DeviceFault", True),
    (_named("AcceleratorError", RuntimeError)("CUDA error: an illegal memory access"), "DeviceFault", True),
    (RuntimeError("CUDA error: out of memory"), "OutOfMemory", True),
    (_caused(ValueError("bad"), ImportError("an optional one")), "ValueError", False),
    (FileNotFoundError(errno.ENOENT, "No such file"), "FileNotFoundError", False),
    (KeyError("rows"), "KeyError", False),
]


@pytest.mark.parametrize(("error", "kind", "retryable"), CASES, ids=[f"{n}-{case[1]}" for n, case in enumerate(CASES)])
def test_classify(error, kind, retryable):
    record = classify(error)

    assert (record["type"], record["retryable"]) == (kind, retryable)
    assert record["message"]


def test_the_message_is_that_of_the_error_itself():
    record = classify(_caused(OSError("cannot save the model"), OSError(errno.ENOSPC, "full")))

    assert record["message"] == "cannot save the model"


def test_a_long_message_is_cut():
    assert len(classify(ValueError("x" * 10_000))["message"]) == MAX_MESSAGE


def test_a_long_message_is_cut_between_words_so_that_no_half_token_is_left():
    message = classify(ValueError("x" * (MAX_MESSAGE - 20) + " hf_" + "a" * 50))["message"]

    assert message == "x" * (MAX_MESSAGE - 20) + " ..."


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_of_the_hub_says_how_to_mend_it(status):
    record = classify(_HTTPError(status))

    assert not record["retryable"]
    assert record["message"].startswith(f"HTTP {status}; name the token in the task (`secrets: [HF_TOKEN]`)")
    assert "GPUFLOW_SECRETS_DIR" in record["message"] and len(record["message"]) <= MAX_MESSAGE


def test_offline_is_not_tried_again(monkeypatch):
    error = _caused(OSError("cannot load it"), _named("LocalEntryNotFoundError")("not in the cache"))
    assert classify(error)["type"] == "Network"

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    record = classify(error)
    assert (record["type"], record["retryable"]) == ("Offline", False)
    assert "gpuflow models pull" in record["message"] and record["message"].endswith("cannot load it")


def test_a_cycle_of_causes_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    assert classify(first)["type"] == "ValueError"


def test_every_registered_place_has_the_task_type():
    trainers = {"sft", "lora_sft", "dpo", "reward", "grpo", "ppo"}
    for task_type in ("echo", "inference", *trainers):
        assert task_type in find(task_type).task_types
    assert set(EXECUTORS) == {"echo", "inference", "embedding", "rag", "command", "container", *trainers}


def test_an_unknown_task_type_names_the_known():
    with pytest.raises(ExecutorError, match=r"'dance'.*echo, inference"):
        find("dance")


def test_plain_is_strict_json():
    value = {"a": float("nan"), 1: [float("inf"), "\ud800", "é", (1, 2.5)]}

    assert plain(value) == {"a": None, "1": [None, "?", "é", [1, 2.5]]}
