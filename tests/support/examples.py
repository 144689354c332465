"""Names what runs each example. A file in neither table, or not in docs/reference/examples.md, fails a test."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PIPELINES: Final = ROOT / "configs" / "pipelines"

#: Pipelines without a model -> words that `gpuflow run` prints of them. tests/integration/test_examples.py runs them.
PRINTED: Final[dict[str, tuple[str, ...]]] = {
    "callback": ('{"output": "done"',),
    "command": ("count: succeeded", "sum=6", "the sum is 6.0"),
    "condition": ("publish: succeeded", "repair: skipped: its condition does not hold", '"the score was 0.9"'),
    "destinations": ('{"output": "delivered"',),
    "echo": ('{"output": "hello"',),
    "graph": ("left: succeeded", "right: succeeded", '{"output": [2, 3]'),
    "labels": ('{"output": "ran on a worker with the label"',),
    "matrix": (
        "and 3 more",
        '{"outputs": [{"rate": 0.1, "rank": 8}, ',
        '{"output": [{"rate": 0.1, "rank": 16}, {"rate": 0.01, "rank": 16}]',
    ),
    "merge": ("first: succeeded", "second: succeeded", "third: succeeded", '{"output": "computed once"'),
    "replicas": ("and 2 more", "output  six"),
    "retries": ('{"output": "the third attempt did it"', '"attempt": 3'),
    "schedule": ('{"output": "3 sites have reported"',),
    "secrets": ("the token is ***, of 16 characters",),
    "vram": ('{"output": "placed"',),
}
#: Other examples -> the test that runs them.
RUN_BY: Final[dict[str, str]] = {
    "configs/pipelines/container.yaml": "tests/integration/test_containers.py",
    "configs/pipelines/container-session.yaml": "tests/integration/test_container_sessions.py",
    "configs/pipelines/embedding.yaml": "tests/integration/test_shipped_pipelines.py",
    "configs/pipelines/function.yaml": "tests/integration/test_function_example.py",
    "configs/pipelines/inference.yaml": "tests/integration/test_shipped_pipelines.py",
    "configs/pipelines/quickstart.yaml": "tests/e2e/test_quickstart.py",
    "configs/pipelines/rag.yaml": "tests/integration/test_shipped_pipelines.py",
    "configs/pipelines/shards.yaml": "tests/integration/test_shards.py",
    "configs/pipelines/train-dpo.yaml": "tests/integration/test_shipped_pipelines.py",
    "configs/pipelines/train-grpo.yaml": "tests/integration/test_shipped_pipelines.py",
    "configs/pipelines/train-lora.yaml": "tests/integration/test_shipped_pipelines.py",
    "configs/pipelines/train-ppo.yaml": "tests/integration/test_shipped_pipelines.py",
    "configs/pipelines/train-sft.yaml": "tests/integration/test_shipped_pipelines.py",
    "examples/executor/request.json": "tests/integration/test_examples.py",
    "examples/from-celery/README.md": "tests/integration/test_from_celery.py",
    "examples/functions/README.md": "tests/integration/test_function_example.py",
    "examples/loading-worker/worker.py": "tests/integration/test_containers.py",
    "examples/python/notebook.py": "tests/integration/test_examples.py",
    "examples/python/service.py": "tests/integration/test_examples.py",
    "examples/python/test_pipelines.py": "tests/integration/test_examples.py",
    "examples/receiver.py": "tests/integration/test_examples.py",
    "examples/run_all.py": "tests/integration/test_examples.py",
}


def example_files() -> list[str]:
    """Return every example, as a path of the repository: all pipelines, and the files of examples/ that are run."""
    files = [*PIPELINES.glob("*.yaml"), *(ROOT / "examples").glob("*.py"), *(ROOT / "examples" / "python").glob("*.py")]
    files += [ROOT / "examples" / "executor" / "request.json", ROOT / "examples" / "loading-worker" / "worker.py"]
    files += [ROOT / "examples" / name / "README.md" for name in ("from-celery", "functions")]
    return sorted(path.relative_to(ROOT).as_posix() for path in files)
