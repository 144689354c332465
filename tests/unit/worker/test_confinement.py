"""What a child may not do, by the settings: what a sandbox shows, and which setting an error names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuflow.artifacts.task_access import task_roots
from gpuflow.errors import GPUFlowError
from gpuflow.policy.child import child_policy
from gpuflow.policy.hosts import Hosts
from gpuflow.protocol import Request
from gpuflow.settings import Settings
from gpuflow.worker import confinement
from gpuflow.worker.shim import ending


def settings(tmp_path: Path, **env: str) -> Settings:
    (tmp_path / "results").mkdir(exist_ok=True)
    return Settings.load(env={"RESULTS_DIR": str(tmp_path / "results"), **env}, cwd=tmp_path)


def request(tmp_path: Path, **spec: Any) -> Request:
    out = tmp_path / "results" / "t1" / "attempt-1"
    return Request(task_id="t1", task_type=spec.get("taskType", "echo"), spec=spec, output_dir=str(out), attempt=1)


def shown(words: tuple[str, ...]) -> dict[str, str]:
    """Return what a sandbox shows, and how."""
    return {words[at + 1]: word for at, word in enumerate(words) if word.endswith(("bind", "bind-try"))}


def of(tmp_path: Path, asked: Request, **env: str) -> confinement.Confinement:
    return confinement.of_attempt(settings(tmp_path, **env), asked, {}, Path("/opt/env/bin/python"))


def test_nothing_by_default(tmp_path: Path) -> None:
    assert of(tmp_path, request(tmp_path)) == confinement.UNCONFINED


def test_a_sandbox_shows_what_the_task_names_of_other_results_and_no_more(tmp_path: Path) -> None:
    results = tmp_path / "results"
    asked = request(
        tmp_path,
        adapter=str(results / "t2" / "attempt-3" / "final_lora"),
        deep=[{"a": f"{results}/t3/attempt-1/../../t4/attempt-1/x"}],
        none=[str(results), str(results / "t9"), f"{results}/../secret", "/etc/shadow", "a\0b", "/" * 5000],
    )
    found = shown(of(tmp_path, asked, GPUFLOW_ISOLATE="bubblewrap", GPUFLOW_ISOLATE_FOLDERS="/d,/s:rw").sandbox)

    below = {path: how for path, how in found.items() if path.startswith(str(results))}
    assert below == {
        str(results / "t1"): "--ro-bind-try",
        str(results / "t1" / "attempt-1"): "--bind-try",
        str(results / "t2" / "attempt-3"): "--ro-bind-try",
        str(results / "t4" / "attempt-1"): "--ro-bind-try",
    }
    assert (found["/d"], found["/s"]) == ("--ro-bind-try", "--bind-try")
    assert not {"/", "/etc", "/root", "/home", "/run", "/etc/shadow"} & found.keys()


def test_a_sandbox_shows_no_results_that_the_policy_does_not_grant(tmp_path: Path) -> None:
    results = tmp_path / "results"
    asked = request(
        tmp_path,
        env={"P": f"{results}/victim/attempt-1", "Q": f"{results}/t2/../victim/attempt-2"},
        checkpoint={"load": {"path": f"{results}/t2/attempt-1/final"}},
    )
    policy = child_policy(task_roots(settings(tmp_path), ["t1", "t2"]), Hosts())
    found = shown(of(tmp_path, replace(asked, policy=policy), GPUFLOW_ISOLATE="bubblewrap").sandbox)

    below = {path for path in found if path.startswith(str(results))}
    assert below == {f"{results}/t1", f"{results}/t1/attempt-1", f"{results}/t2/attempt-1"}


def test_too_many_inputs_for_a_sandbox(tmp_path: Path) -> None:
    asked = request(tmp_path, items=[f"{tmp_path}/results/t{number}/attempt-1" for number in range(500)])
    with pytest.raises(GPUFlowError, match="500 attempts"):
        of(tmp_path, asked, GPUFLOW_ISOLATE="bubblewrap")


def test_a_container_is_a_sandbox_already(tmp_path: Path) -> None:
    asked = request(tmp_path, taskType="container")
    assert of(tmp_path, asked, GPUFLOW_ISOLATE="bubblewrap", GPUFLOW_CHILD_MAX_MEMORY="1GiB") == (
        confinement.Confinement(limits={"RLIMIT_DATA": 1 << 30})
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("MemoryError: ", "GPUFLOW_CHILD_MAX_MEMORY"),
        ("torch.OutOfMemoryError: CUDA out of memory", ""),
        ("OSError: [Errno 27] File too large", "GPUFLOW_CHILD_MAX_FILE_BYTES"),
        ("can't start new thread", "GPUFLOW_CHILD_MAX_PROCESSES"),
        ("ValueError", ""),
    ],
)
def test_the_setting_that_an_error_names(tmp_path: Path, text: str, named: str) -> None:
    limits = {f"GPUFLOW_CHILD_MAX_{one}": "4096" for one in ("MEMORY", "FILE_BYTES", "PROCESSES")}
    error = {"type": "ChildDied", "message": "it died"}
    told = confinement.explained(error, settings(tmp_path, **limits), text)["message"]
    assert told == (f"it died; {named} of this worker is 4096" if named else "it died")
    assert confinement.explained(error, settings(tmp_path), text) == error


@pytest.mark.parametrize(
    ("status", "sandboxed", "exit_code", "signal"),
    [(137 << 8, True, None, 9), (143 << 8, True, 143, None), (137 << 8, False, 137, None), (9, True, None, 9)],
)
def test_how_a_sandboxed_child_ended(status: int, sandboxed: bool, exit_code: int | None, signal: int | None) -> None:
    assert ending(status, sandboxed=sandboxed) == {"exit": exit_code, "signal": signal}


def test_a_sandbox_shows_the_roots_and_hides_what_is_gpuflows_below_them(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    env = {
        "GPUFLOW_ISOLATE": "bubblewrap",
        "GPUFLOW_STATE_DIR": str(state),
        "GPUFLOW_READ_ROOTS": "/data,/both",
        "GPUFLOW_WRITE_ROOTS": f"{tmp_path},/both,/data/out",
    }
    words = of(tmp_path, request(tmp_path), **env).sandbox

    found = shown(words)
    assert (found["/data"], found["/data/out"]) == ("--ro-bind-try", "--bind-try")
    assert (found["/both"], found[str(tmp_path)]) == ("--bind-try", "--bind-try")
    root = words.index(str(tmp_path))
    for hidden in (state, tmp_path / "results"):
        assert words.index(str(hidden)) > root and words[words.index(str(hidden)) - 1] == "--tmpfs"
    assert words.index("/opt/env") > root  # a root that may be written makes no interpreter writable
    assert words.index("/data/out") > words.index("/data")
