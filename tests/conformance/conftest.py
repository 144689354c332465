"""The runs of the executors, and the table executor x case at the end of the session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.providers import PROVIDERS, Provider
from tests.conformance.runs import Runs
from tests.fixtures.tiny_model import make_tiny_model
from tests.support.ec2 import ec2, ec2_server  # noqa: F401  (fixtures)

#: (case, executor) -> what came of it.
_table: dict[tuple[str, str], str] = {}
_WORDS = {"passed": "ok", "failed": "FAIL", "skipped": "-"}


@pytest.fixture(scope="session")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Provider], Runs]:
    """Return the runs of an executor; the tiny model is made for those that need it alone."""
    made: dict[str, Runs] = {}
    models: list[Path] = []

    def of(provider: Provider) -> Runs:
        if provider.needs_ml and not models:
            models.append(make_tiny_model(tmp_path_factory.mktemp("tiny")))
        if provider.task_type not in made:
            folder = tmp_path_factory.mktemp(provider.task_type)
            made[provider.task_type] = Runs(provider, folder, models[0] if provider.needs_ml else folder)
        return made[provider.task_type]

    return of


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Note what came of each case."""
    report = yield
    place = getattr(item, "callspec", None)
    if place is not None and {"case", "provider"} <= set(place.params) and (report.when == "call" or report.failed):
        _table[place.params["case"].__name__, place.params["provider"].task_type] = _WORDS[report.outcome]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    if not _table:
        return
    executors = [one.task_type for one in PROVIDERS if any(name == one.task_type for _, name in _table)]
    terminalreporter.section("conformance of the executors")
    terminalreporter.line(" ".join([" " * 20, *(name.ljust(14) for name in executors)]).rstrip())
    for case in dict.fromkeys(case for case, _ in _table):
        cells = [_table.get((case, name), "").ljust(14) for name in executors]
        terminalreporter.line(" ".join([case.ljust(20), *cells]).rstrip())
