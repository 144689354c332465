"""The house itself: light imports, good neighbours in one process, small files, and docs that are complete."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES

from gpuflow.broker.keys import Keys
from gpuflow.cli import SECTIONS
from gpuflow.ledger.states import ALLOWED, TaskState
from gpuflow.pipelines.records import PipelineState, StageState
from gpuflow.protocol import EVENT_FIELDS
from gpuflow.settings.model import env_names
from gpuflow.spec import parse_text
from gpuflow.spec.models_data import Data
from gpuflow.spec.models_task import TaskSpec

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
CODE = [path for folder in ("gpuflow", "tasks", "executors") for path in sorted((ROOT / folder).rglob("*.py"))]
HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "vllm", "numpy")


def loaded_after(statement: str) -> set[str]:
    """Return the top-level modules that a new interpreter has after a statement."""
    program = (
        f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text("utf-8")


def missing(names: Iterable[object], text: str) -> list[str]:
    """Return the names that do not stand in the text as words."""
    return [str(name) for name in names if not re.search(rf"(?<![\w.]){re.escape(str(name))}(?!\w)", text)]


# -- imports ----------------------------------------------------------------------------------------------------


def test_import_gpuflow_loads_next_to_nothing() -> None:
    assert loaded_after("import gpuflow") & {*HEAVY, "celery", "kombu", "redis", "pydantic", "rich", "click"} == set()


@pytest.mark.parametrize(
    "statement",
    [
        "from gpuflow import app, get, submit, submit_pipeline",
        "import gpuflow.cli.run, gpuflow.cli.doctor, gpuflow.cli.presets, gpuflow.cluster",
        "import tasks.supervised, tasks.pipelines, tasks.maintenance, gpuflow.worker.bootsteps",
    ],
)
def test_clients_and_workers_load_no_ml_library(statement: str) -> None:
    assert loaded_after(statement) & set(HEAVY) == set()


def test_a_child_starts_without_celery_redis_and_pydantic() -> None:
    loaded = loaded_after("import executors.__main__, executors.echo, gpuflow.spec.presets")
    assert loaded & {*HEAVY, "celery", "kombu", "redis", "pydantic"} == set()


def test_every_public_name_is_there_and_known_to_type_checkers() -> None:
    import gpuflow

    assert sorted(gpuflow.__all__) == sorted(["__version__", *gpuflow._HOME])
    assert [name for name in gpuflow.__all__ if getattr(gpuflow, name, None) is None] == []


# -- neighbours in one process -----------------------------------------------------------------------------------


def test_importing_gpuflow_changes_nothing_for_other_celery_apps() -> None:
    aliases = dict(TRANSPORT_ALIASES)
    program = """
import json
from celery import Celery
from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES
other = Celery("other", broker="redis://127.0.0.1:1/0", backend="redis://127.0.0.1:1/0", set_as_current=False)
def look():
    connection = other.connection_for_write()
    kind = type(connection.transport)
    return {"aliases": dict(TRANSPORT_ALIASES), "conf": repr(sorted(other.conf.items(), key=str)),
            "transport": f"{kind.__module__}.{kind.__qualname__}", "channel": kind.Channel.__module__,
            "backend": type(other.backend).__module__}
before = look()
import gpuflow.celery_app, gpuflow.client, gpuflow.worker.bootsteps, gpuflow.worker.pool
print(json.dumps([before, look()]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    before, after = json.loads(done.stdout)

    assert before == after
    assert after["aliases"] == aliases
    assert after["transport"] == "kombu.transport.redis.Transport"


def test_two_apps_on_one_url_have_transports_and_pools_of_their_own() -> None:
    from celery import Celery
    from kombu import pools

    from gpuflow.broker.transport import Channel
    from gpuflow.celery_app import GPUFlow
    from gpuflow.settings import Settings

    url = "redis://127.0.0.1:1/0"
    stock = Celery("stock", broker=url, set_as_current=False)
    ours = GPUFlow("ours", settings=Settings.load(env={"REDIS_URL": url}), set_as_current=False)
    connections: list[Connection] = [app.connection_for_write() for app in (stock, ours)]

    channels = [connection.transport.Channel for connection in connections]
    used = [pools.producers[connection] for connection in connections]

    assert channels[0] is not Channel
    assert channels[1] is Channel
    assert used[0] is not used[1]
    assert used[1].connections.connection.transport.Channel is Channel
    assert used[0].connections.connection.transport.Channel is not Channel


# -- files ----------------------------------------------------------------------------------------------------------


def test_files_are_rooms_not_halls() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in CODE
        if (count := len(path.read_text("utf-8").splitlines())) > 600
    }
    assert long == {}


def test_no_file_names_the_machine_it_was_written_on() -> None:
    words = [path for path in (str(ROOT), sys.prefix, str(ROOT.parent)) if path.count("/") > 1]
    suffixes = {".py", ".md", ".toml", ".ini", ".yaml", ".json", ".lua", ".c", ""}
    kept = [
        path
        for folder in (
            "gpuflow",
            "tasks",
            "executors",
            "configs",
            "tests",
            "benchmarks",
            "docs",
            "tools",
            "examples",
            ".ci",
        )
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts
    ]
    kept += [path for path in ROOT.iterdir() if path.is_file() and path.suffix in suffixes]
    found = {
        str(path.relative_to(ROOT)): word
        for path in kept
        for word in words
        if word in path.read_text("utf-8", "replace")
    }
    assert found == {}


# -- docs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_the_docs_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in anchors(there), f"{target}: no such heading"


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        if at.is_dir():
            waiting += at.glob("*.md")
        elif at.suffix == ".md":
            targets = re.findall(r"\]\(([^)#\s]+)", at.read_text("utf-8"))
            waiting += [(at.parent / target).resolve() for target in targets if ":" not in target]
    assert [str(path.relative_to(ROOT)) for path in DOCS if path not in seen] == []


def test_the_templates_of_the_docs_are_valid() -> None:
    blocks = [
        block
        for path in DOCS
        for block in re.findall(r"```yaml\n(.*?)```", path.read_text("utf-8"), flags=re.DOTALL)
        if block.startswith("apiVersion:") and "..." not in block
    ]
    assert len(blocks) >= 2
    for block in blocks:
        assert parse_text(block, "docs").stages


def test_the_house_of_the_docs_has_each_module_in_the_order_of_its_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in contracts[-1]["layers"]]
    shown = (ROOT / "docs" / "architecture.md").read_text()
    table = shown.partition("| module |")[2].partition("Beside the library")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    told = [re.findall(r"`gpuflow/(\w+)", row) for row in rows]
    assert [sorted(names) for names in told] == [sorted(names) for names in layers]


def test_every_setting_is_in_the_docs() -> None:
    text = page("settings.md")
    assert missing([*env_names().values(), *env_names()], text) == []


def test_every_state_and_move_is_in_the_docs() -> None:
    text = page("states.md")
    assert missing([*TaskState, *PipelineState, *StageState], text) == []
    for state, targets in ALLOWED.items():
        (row,) = re.findall(rf"^\| {state} \|.*\|(.*)\|$", text, flags=re.MULTILINE)
        assert set(re.findall(r"[A-Z]{4,}", row)) == {str(target) for target in targets}, state


def test_every_command_is_in_the_docs() -> None:
    assert missing([f"gpuflow {name}" for section in SECTIONS.values() for name in section], page("cli.md")) == []


def test_every_event_is_in_the_docs() -> None:
    assert (
        missing([*EVENT_FIELDS, *{field for fields in EVENT_FIELDS.values() for field in fields}], page("events.md"))
        == []
    )


def test_every_field_of_a_template_is_in_the_docs() -> None:
    assert missing([*TaskSpec.model_fields, *Data.model_fields], page("template.md")) == []


def test_every_key_is_in_the_docs() -> None:
    text = page("redis-keys.md")
    keys = Keys()
    fixed = [getattr(keys, name) for name, value in vars(Keys).items() if isinstance(value, property)]
    made = [
        keys.bell("<owner>"),
        *(getattr(keys, name)("<id>") for name in ("task", "pipeline", "stages", "events", "worker", "heartbeat")),
        keys.queue("<name>"),
        keys.queue_classes("<name>"),
        keys.waiters("<group>"),
        keys.warm("<model>"),
        keys.reserved("<tag>"),
    ]
    assert [key for key in (*fixed, *made) if f"`{key}`" not in text] == []


def test_no_two_test_modules_share_a_name() -> None:
    """One run of all tests (the environment ml) imports each by its name alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
