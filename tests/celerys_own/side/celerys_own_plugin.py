"""pytest's plugin of Celery's own integration tests: their app, and their worker as a process of its own.

CELERYS_OWN_WAY says which: `stock`, or `gpuflow`. Celery's fixtures are left as they are: what they call to make an app
and to start a worker in a thread is replaced. Each outcome is a line of JSON in CELERYS_OWN_OUTCOMES.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import celery.contrib.testing.app
import celery.contrib.testing.worker
import pytest
from celery.utils.nodenames import anon_nodename
from celerys_own_control import follow

_WAY: Final = os.environ["CELERYS_OWN_WAY"]
_FOLDER: Final = Path(os.environ["CELERYS_OWN_FOLDER"])
_KNOWN: Final = frozenset(os.environ["CELERYS_OWN_KNOWN"].splitlines())
_KNOWN_SECONDS: Final = 10
_LEAST_SECONDS: Final = 30
_START_SECONDS: Final = 120
_STOP_SECONDS: Final = 30
#: What of the tests' settings is the app's own on gpuflow.
_APPS_OWN: Final = frozenset({"broker_url", "result_backend", "accept_content", "broker_heartbeat", "timezone"})

_timeouts: dict[Path, int] = {}
_waits: dict[str, Any] = {}


def _app(name: str | None = None, config: Any = None, set_as_current: bool = False, **_: Any) -> Any:
    """Return an app of ours, with what a test asks for, as Celery's TestApp does."""
    from gpuflow import GPUFlow

    made = GPUFlow(name or "celery.tests", set_as_current=set_as_current)
    made.conf.update({key: value for key, value in (config or {}).items() if key not in _APPS_OWN})
    return made


@contextmanager
def _worker(app: Any, **_: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker process as long as the tests run."""
    command = [sys.executable, "-m", "celery", *shlex.split(os.environ["CELERYS_OWN_WORKER"]), "-n", anon_nodename()]
    with (_FOLDER / f"{_WAY}-worker.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=_FOLDER, stdout=log, stderr=log)
    try:
        give_up_at = time.monotonic() + _START_SECONDS
        while not app.control.ping(timeout=1):
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"the worker has not started; see {_FOLDER}/{_WAY}-worker.log")
        follow(app)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if _WAY == "gpuflow":
    import celerys_own_children  # noqa: F401  (what is sent says that it is to run in a child)

    celery.contrib.testing.app.TestApp = _app
celery.contrib.testing.worker.start_worker = _worker


def pytest_runtest_logreport(report: Any) -> None:
    """Write down how a phase of a test ended, where that says anything."""
    if report.when == "call" or not report.passed:
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or str(report.longrepr or "")
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        line = {"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 2), "error": crash[:2000]}
        with (_FOLDER / f"{_WAY}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Name the marks of the plug-ins that are not installed."""
    config.addinivalue_line("markers", "flaky: Celery repeats such a test; here it counts at once")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give the waits of a test so many times their time: a child takes longer to start than a call.

    One that is known to fail waits in vain, and not for long.
    """
    module = item.getparent(pytest.Module)
    if module is None or not hasattr(module.obj, "TIMEOUT"):
        return
    own = _timeouts.setdefault(item.path, module.obj.TIMEOUT)
    is_known = _WAY == "gpuflow" and item.nodeid.removeprefix("t/integration/") in _KNOWN
    seconds = min(own, _KNOWN_SECONDS) if is_known else own * int(os.environ["CELERYS_OWN_PATIENCE"])
    module.obj.TIMEOUT = seconds
    for name in ("await_redis_count", "await_redis_echo", "await_redis_list_message_length"):
        function = _waits.get(name) or getattr(module.obj, name, None)
        if function is not None:
            _waits[name] = function
            function.__defaults__ = (*function.__defaults__[:-1], seconds)  # the last is that time
            setattr(module.obj, name, partial(_waiting, function))


def _waiting(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Wait for some time even where a test takes what came with others for done."""
    if kwargs.get("timeout") == 0:
        kwargs["timeout"] = _LEAST_SECONDS
    return function(*args, **kwargs)
