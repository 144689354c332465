"""The rows of a data set that `parallel` splits over tasks: each is in one shard, and together they are the whole."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from executors.data.shards import take_shard
from executors.data.sources import read_entries
from gpuflow.protocol import Emitter, Request
from gpuflow.spec.sharding import shard

pytestmark = pytest.mark.ml

ROWS = 103


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("set")
    lines = [json.dumps({"question": f"row {number}", "answer": number}) + "\n" for number in range(ROWS)]
    (made / "train-00000.jsonl").write_text("".join(lines[:60]))
    (made / "train-00001.jsonl").write_text("".join(lines[60:]))
    return made


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({"split": "train"}, ROWS),
        ({"split": "train[10%:90%]", "shuffle": True, "seed": 42}, 83),
        ({"split": "train[:10]", "shuffle": True, "seed": 1, "max_items": 5}, 5),
    ],
)
def test_shards_of_a_data_set_tile_it_exactly(
    folder: Path, tmp_path: Path, more: dict[str, Any], rows: int, count: int
) -> None:
    data = {"type": "dataset", "url": str(folder), "column": "question", **more}
    spec = {"taskType": "inference", "data": data, "parallel": {"enabled": True, "max_shards": count}}
    whole = read_entries(data, "", Emitter(io.StringIO()))
    assert len(whole) == rows

    taken: list[Any] = []
    ranges, digests = [], set()
    for part in shard(spec):
        request = Request(task_id="t", task_type="inference", spec=part, output_dir=str(tmp_path))
        cut, mine = take_shard(request, Emitter(io.StringIO()))
        if mine is None:
            assert count == 1
            taken += read_entries(cut.spec["data"], "", Emitter(io.StringIO()))
            continue
        assert mine.total == rows
        assert len(cut.spec["data"]["items"]) == mine.end - mine.start
        ranges.append((mine.start, mine.end))
        digests.add(mine.digest)
        taken += cut.spec["data"]["items"]

    assert taken == whole
    assert [start for start, _ in ranges] + [rows] == [0, *(end for _, end in ranges)] or count == 1
    assert len(digests) == (0 if count == 1 else 1)
