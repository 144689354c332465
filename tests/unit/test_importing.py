"""Loading without collections, and the quick end of a program."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpuflow.importing import load, loading


@pytest.mark.parametrize("enabled", [True, False])
def test_while_modules_load_nothing_is_collected_and_then_all_is_as_before(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with loading():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with pytest.raises(ModuleNotFoundError):
            load("gpuflow.no_such_module")
        assert gc.isenabled() is enabled
        assert load("gpuflow.errors").__name__ == "gpuflow.errors"
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_quick_end_runs_what_is_registered_flushes_output_and_closes_files(tmp_path: Path) -> None:
    program = f"""
        import atexit, sys
        from gpuflow.importing import end_quickly

        end_quickly()
        atexit.register(print, "registered")
        written = open("{tmp_path}/written", "w")
        written.write("not flushed")
        raw = open("{tmp_path}/bytes", "wb")
        raw.write(b"nor these")
        closed = open("{tmp_path}/closed", "w")
        closed.close()

        class Cycle:
            def __init__(self):
                self.me = self

            def __del__(self):
                print("finalised")

        cycle = Cycle()
        del cycle
        print("last")
        sys.exit(7)
    """

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (7, "last\nregistered\n")
    assert (tmp_path / "written").read_text() == "not flushed"
    assert (tmp_path / "bytes").read_bytes() == b"nor these"
