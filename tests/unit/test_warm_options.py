"""What a task that stays warm may say of itself, and how it is called where nothing keeps it warm."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow import BatchedCall, InvalidTemplate, batch
from gpuflow.celery_app import GPUFlow
from gpuflow.functions.batching import answers
from gpuflow.settings import Settings


@pytest.fixture
def app() -> GPUFlow:
    made = GPUFlow("team", settings=Settings(redis_url="redis://127.0.0.1:1/0"), set_as_current=False)
    made.finalize()
    return made


def nothing(text: str = "") -> str:
    return text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_warm": "soon"}, "keep_warm 'soon' is not a duration"),
        ({"keep_warm": "0s"}, "keeps nothing"),
        ({"keep_warm": "1m", "merge": True}, "merge exclude each other"),
        ({"keep_warm": "1m", "child": False}, "child=False exclude each other"),
        ({"batch": batch(4)}, "beside keep_warm"),
        ({"keep_warm": "1m", "batch": 4}, "gpuflow.batch"),
        ({"keep_warm": "1m", "batch": batch(4), "bind": True}, "bind and pydantic"),
    ],
)
def test_what_cannot_be_had_together_is_refused_where_it_is_written(
    app: GPUFlow, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidTemplate, match=words):
        app.task(name="refused", shared=False, lazy=False, **options)(nothing)


@pytest.mark.parametrize("given", [{"max_size": 0}, {"max_size": 5000}, {"max_size": 2, "max_wait": "2m"}])
def test_a_batch_has_bounds(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidTemplate, match="batch: max_"):
        batch(**given)


def test_a_function_of_a_batch_is_called_with_one_call_where_nothing_gathers(app: GPUFlow) -> None:
    @app.task(name="doubled", shared=False, keep_warm="1m", batch=batch(4, "1ms"))
    def doubled(calls: list[BatchedCall]) -> list[Any]:
        return [ValueError("odd") if call.args[0] % 2 else 2 * call.args[0] for call in calls]

    assert doubled(4) == 8
    assert doubled.apply((6,)).get() == 12
    with pytest.raises(ValueError, match="odd"):
        doubled(3)
    assert doubled.loading_places == 4 and doubled.in_child


def test_a_function_that_returns_too_little_is_said_to() -> None:
    with pytest.raises(ValueError, match="embed returned 1 results for a batch of 2 calls"):
        answers(lambda calls: [1], [BatchedCall("a"), BatchedCall("b")], "embed")


def test_the_methods_of_a_class_are_tasks_of_one_object_that_is_loaded_once(app: GPUFlow) -> None:
    loads = []

    @app.task(keep_warm="1m", resources="24GB", lazy=False, shared=False)
    class Model:
        def load(self) -> None:
            loads.append(self)

        def embed(self, text: str) -> str:
            return self._shown(text)

        def count(self, *texts: str) -> int:
            return len(texts)

        def _shown(self, text: str) -> str:
            return f"<{text}>"

    made: Any = Model  # what the decorator makes of it
    assert sorted(made.tasks) == ["count", "embed"]
    assert made.embed("a") == "<a>" and made.count("a", "b") == 2
    assert len(loads) == 1
    assert made.embed.warm_name == made.count.warm_name == made.embed.name.removesuffix(".embed")
    with pytest.raises(TypeError, match="positional"):
        made.embed.apply_async(("a", "b"))


@pytest.mark.parametrize(("options", "words"), [({}, "keep_warm='10m'"), ({"keep_warm": "1m", "bind": True}, "bind")])
def test_a_class_says_for_how_long_it_stays_loaded(app: GPUFlow, options: dict[str, Any], words: str) -> None:
    class Model:
        def embed(self) -> None: ...

    with pytest.raises(InvalidTemplate, match=words):
        app.task(lazy=False, shared=False, **options)(Model)


def test_a_class_without_methods_is_no_task(app: GPUFlow) -> None:
    class Empty:
        def load(self) -> None: ...

    with pytest.raises(InvalidTemplate, match="no public method"):
        app.task(lazy=False, shared=False, keep_warm="1m")(Empty)
