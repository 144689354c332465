"""The task type `command`: any script or program, with its events, progress, metrics and files.

The program runs in its own folder, or in a folder of the worker; what it writes to OUTPUT_DIR is its result's files.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from executors import task_access
from executors.base import Executor, bad_input
from executors.cache import cache_root
from executors.programs.heard import PROGRAM, Heard, check
from executors.programs.running import run, shell_argv
from executors.programs.venvs import Wanted, python_for
from gpuflow.protocol import Emitter, Request
from gpuflow.spec.patterns import metric_pattern

#: Folder of an attempt in which a program that was brought runs; it is no result.
WORK_FOLDER: Final = "work"


class Command(Executor):
    """Runs `spec.command` and gives back its exit code, its metrics, and what it said."""

    task_types: ClassVar[tuple[str, ...]] = ("command",)

    def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Run the program to its end. Raises ExecutorError for one that cannot be run, or that fails."""
        section: Mapping[str, Any] = request.spec["command"]
        patterns = {name: metric_pattern(text) for name, text in (section.get("metrics") or {}).items()}
        output_dir = Path(request.output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        heard = Heard(emitter, patterns)
        environment = _environment(request, section, emitter)
        with _folder(section, output_dir) as folder:
            emitter.status("working")
            argv, in_shell = _argv(section)
            ran = run(
                argv,
                cwd=folder,
                environment=environment,
                on_stdout=heard.stdout,
                on_stderr=heard.stderr,
                in_shell=in_shell,
            )
        check(ran, heard, PROGRAM)
        heard.close()
        # responses.json is written from it when it has been rid of secrets, which a program may have printed.
        return {**heard.value(output_dir), "exit_code": ran.code, "metrics": heard.metrics, "output": heard.output()}


@contextlib.contextmanager
def _folder(section: Mapping[str, Any], output_dir: Path) -> Iterator[Path]:
    """Give the folder in which the program runs: a copy of what came, one of the worker, or OUTPUT_DIR."""
    if section.get("brought"):
        brought, work = Path(str(section["brought"])), output_dir / WORK_FOLDER
        try:
            if brought.is_dir():
                shutil.copytree(brought, work, symlinks=True)
            else:
                work.mkdir()
                shutil.copy(brought, work / brought.name)
                (work / brought.name).chmod(0o755)
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return
    folder = Path(str(section["path"])).expanduser() if section.get("path") else output_dir
    if section.get("path") and folder.is_absolute():
        folder = task_access.folder(folder, "command.path")
    if not folder.is_absolute():
        raise bad_input(f"command.path is {str(folder)!r}; give an absolute path of the worker")
    if not folder.is_dir():
        raise bad_input(
            f"command.path: there is no folder {folder} on this worker; correct it, or put the folder there"
        )
    yield folder


def _environment(request: Request, section: Mapping[str, Any], emitter: Emitter) -> dict[str, str]:
    """Return the environment of the program; its `python` is that of its requirements, else the one of this child."""
    environment = dict(os.environ)
    python = Path(sys.executable)
    if section.get("requirements"):
        root = cache_root(request.cache_dir)
        wanted = Wanted(
            requirements=section["requirements"],
            python=section.get("python"),
            project=Path(str(section["brought"])) if section.get("brought") else None,
            env=frozenset(request.spec.get("env") or {}),
            secrets=frozenset(request.spec.get("secrets") or ()),
        )
        python = python_for(wanted, root, emitter)
        environment["VIRTUAL_ENV"] = str(python.parents[1])
        environment.pop("PYTHONPATH", None)
    environment["OUTPUT_DIR"] = request.output_dir
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return environment


def _argv(section: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the arguments, and whether they are a shell's."""
    command, shell = section["command"], section.get("shell")
    if isinstance(command, str) and shell is not False:
        return shell_argv(shell if isinstance(shell, str) else "/bin/sh", command), True
    if isinstance(command, str):
        try:
            argv = shlex.split(command)
        except ValueError as error:
            raise bad_input(f"command.command cannot be split into words: {error}; give a list of arguments") from error
    else:
        argv = [str(part) for part in command]
    if not argv:
        raise bad_input("command.command is empty; give a program")
    if shell:
        return shell_argv(shell if isinstance(shell, str) else "/bin/sh", shlex.join(argv)), True
    return argv, False
