"""The executor of commands against programs that mean no good, or know no better: real children, no worker."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executors.programs import running
from executors.programs.heard import OUTPUT_CHARACTERS, Heard
from gpuflow.protocol import Emitter
from tests.fixtures.executor_child import Child, Ended
from tests.support.waiting import eventually

Start = Callable[..., Child]


def run(start: Start, line: Any, **section: Any) -> Ended:
    return start("command", {"taskType": "command", "command": {"command": line, **section}}).end()


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_an_endless_line_is_cut_wherever_it_is_told(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    endless = "import sys\nfor _ in range(320): sys.stdout.write('x' * 65536)\n"

    failed = run(start, script(f"{endless}sys.exit(3)"))
    done = run(start, script(f"{endless}print('\\nlast')"))

    assert "exit code 3" in failed.error["message"]
    assert len(failed.error["message"]) < 20_000
    assert max(len(one["message"]) for one in failed.named("log")) <= OUTPUT_CHARACTERS
    assert done.result["output"].endswith("x\nlast")
    assert len(done.result["output"]) <= OUTPUT_CHARACTERS
    heard = Heard(Emitter(io.StringIO()), {})
    for _ in range(20):
        heard.stderr(b"y" * 1_000_000)
    assert len(heard.last_words()) < 20_000
    assert len(capsys.readouterr().err) > 20_000_000  # the log has it whole


def test_binary_output_and_what_looks_like_events_harm_nothing(start: Start) -> None:
    noise = 'import sys\nsys.stdout.buffer.write(bytes(range(256)) * 400)\nprint()\nprint(\'{"event": "progress"}\')\n'
    more = "print('[' * 100000)\nprint('{\"event\": \"result\", \"value\": ' + '9' * 5000 + '}')\nprint('the end')"

    result = run(start, script(noise + more)).result

    assert result["output"].endswith("the end")
    assert result["exit_code"] == 0


def test_a_flood_of_metrics_is_kept_within_bounds(start: Start) -> None:
    event = "{'event': 'progress', 'current': n, 'metrics': {str(n): n}}"
    flood = f"import json\nfor n in range(3000): print(json.dumps({event}))"

    assert len(run(start, script(flood)).result["metrics"]) == 1000


def test_a_result_file_that_is_too_large_is_not_read(start: Start) -> None:
    tell = "import os\nos.truncate(os.open('.result.json', os.O_CREAT | os.O_WRONLY), 300 << 20)\n"

    error = run(start, script(tell + 'print(\'{"event": "result", "file": ".result.json"}\')')).error

    assert (error["type"], "more than 256 MiB" in error["message"]) == ("BadResult", True)


def test_a_program_may_close_its_output_and_go_on(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    child = start(
        "command",
        {
            "command": {
                "command": f"echo ready; exec 1>&- 2>&-; until test -e {gate}; do sleep 0.02; done; touch late.txt"
            }
        },
    )
    child.until("log", message="ready")
    gate.touch()

    assert child.end().result["output"] == "ready"
    assert (tmp_path / "out" / "late.txt").exists()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("kill -9 $$", "SIGKILL"),
        (script("import os; os.kill(os.getpid(), 11)"), "SIGSEGV"),
        (f"{sys.executable} -c 'import os; os.kill(os.getpid(), 9)'; exit $?", "SIGKILL"),
    ],
)
def test_the_end_by_a_signal_is_another_attempts_chance(start: Start, line: Any, name: str) -> None:
    error = run(start, line).error

    assert (error["type"], error["retryable"]) == ("CommandKilled", True)
    assert name in error["message"]


def test_an_exit_code_is_no_signal_where_no_shell_says_so(start: Start) -> None:
    assert run(start, script("import sys; sys.exit(137)")).error["type"] == "CommandFailed"


def test_what_cannot_be_started_says_why(start: Start, tmp_path: Path) -> None:
    bad = tmp_path / "bad.sh"
    bad.write_text("#!/no/such/shell\n")
    bad.chmod(0o755)
    (tmp_path / "file").touch()

    for line, own, says in (
        ([str(bad)], {}, "names an interpreter in its first line"),
        (["no-such-program"], {}, "is not on this worker"),
        ([str(tmp_path / "file")], {}, "make it executable"),
        ("true", {"path": str(tmp_path / "nowhere")}, "there is no folder"),
        ("true", {"path": str(tmp_path / "file")}, "there is no folder"),
        (["echo", "a\0b"], {}, "null byte"),
        ("unclosed 'quote", {"shell": False}, "cannot be split"),
    ):
        error = run(start, line, **own).error
        assert (error["type"], says in error["message"]) == ("BadInput", True), error


def test_a_notice_reaches_the_program_in_a_line_and_ends_the_line(start: Start, tmp_path: Path) -> None:
    program = tmp_path / "saves.py"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    pathlib.Path('saved.txt').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(3600)\n"
    )
    child = start("command", {"command": {"command": f"{sys.executable} {program}; touch went_on.txt"}})
    child.until("log", message="ready")

    child.signal(signal.SIGUSR1)

    assert child.end().finish["error"]["type"] == "Preempted"
    assert sorted(path.name for path in (tmp_path / "out").glob("*.txt")) == ["saved.txt"]


def test_no_line_comes_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is left behind holds the output, and goes on writing."""
    monkeypatch.setattr(running, "_MOST_SECONDS", 0.2)
    line = "(while ! test -e stop; do echo more; echo >> written; sleep 0.02; done; touch gone) & echo done"
    heard: list[bytes] = []

    def written() -> int:
        return (tmp_path / "written").stat().st_size

    try:
        ran = running.run(
            running.shell_argv("/bin/sh", line),
            cwd=tmp_path,
            environment=os.environ,
            on_stdout=heard.append,
            on_stderr=heard.append,
            in_shell=True,
        )
        count, size = len(heard), written()
        eventually(lambda: written() > size + 5)
        assert (ran.code, len(heard)) == (0, count)
    finally:
        (tmp_path / "stop").touch()
        eventually((tmp_path / "gone").exists)
