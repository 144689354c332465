"""Tasks with `pydantic=True`: what is refused where a call is sent, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field, field_validator

from gpuflow import surroundings
from gpuflow.celery_app import GPUFlow
from gpuflow.errors import InvalidTemplate
from gpuflow.settings import Settings


class Point(BaseModel):
    x: int
    label: str = "none"
    hidden: int = Field(default=0, exclude=True)

    @field_validator("label")
    @classmethod
    def _known(cls, value: str) -> str:
        if value == "unknown":
            raise ValueError("no such label")
        if value == "worker's":
            raise RuntimeError("only a worker has the table")
        return value


class Sent(Exception):
    """What was to be published."""


@pytest.fixture
def app(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[GPUFlow]:
    made = GPUFlow("typed", settings=Settings.load(env={"REDIS_URL": "redis://nowhere.invalid:6379/0"}, cwd=tmp_path))

    def send_task(name: str, args: Any = None, kwargs: Any = None, **_: Any) -> None:
        raise Sent(name, args, kwargs)

    monkeypatch.setattr(made, "send_task", send_task)
    yield made
    made.close()


def sent(call: Any) -> tuple[Any, Any]:
    with pytest.raises(Sent) as caught:
        call()
    return list(caught.value.args[1] or ()), dict(caught.value.args[2] or {})


def plot(app: GPUFlow, **options: Any) -> Any:
    @app.task(name="team.plot", pydantic=True, shared=False, **options)
    def plot(point: Point, other: Point | None = None, size: int = 1) -> None: ...

    app.finalize()
    return plot


def test_models_are_sent_as_json(app: GPUFlow) -> None:
    task = plot(app)

    assert sent(lambda: task.delay(Point(x=1), other=Point(x=2), size=3)) == (
        [{"x": 1, "label": "none"}],
        {"other": {"x": 2, "label": "none"}, "size": 3},
    )
    assert sent(lambda: task.apply_async(({"x": 1},), {"other": None})) == ([{"x": 1}], {"other": None})
    assert sent(lambda: task.s(Point(x=4)).apply_async()) == ([{"x": 4, "label": "none"}], {})


def test_what_does_not_validate_is_refused_with_every_field(app: GPUFlow) -> None:
    task = plot(app)

    with pytest.raises(InvalidTemplate, match=r"task team\.plot: ") as raised:
        task.delay({"x": "one", "label": "unknown"}, other={})

    assert [one.path for one in raised.value.mistakes] == ["point.x", "point.label", "other.x"]
    assert "argument point.label: Value error, no such label; argument other.x: Field required" in str(raised.value)
    with pytest.raises(InvalidTemplate, match=r"argument point: Input should be a valid dictionary"):
        task.apply_async((7,))
    with pytest.raises(InvalidTemplate, match=r"task team\.plot: missing a required argument: 'point'"):
        task.delay()


def test_a_model_that_json_would_change_is_refused(app: GPUFlow) -> None:
    with pytest.raises(InvalidTemplate, match="argument point: a Point is not read again as it is from its JSON"):
        plot(app).delay(Point(x=1, hidden=2))


def test_a_validator_that_needs_a_worker_is_the_workers(app: GPUFlow) -> None:
    given = {"x": 1, "label": "worker's"}

    assert sent(lambda: plot(app).delay(given)) == ([given], {})


def test_a_task_may_leave_all_of_it_to_the_worker(app: GPUFlow) -> None:
    assert sent(lambda: plot(app, check_arguments=False).delay({})) == ([{}], {})


def test_bound_and_strict_tasks(app: GPUFlow) -> None:
    @app.task(name="team.bound", bind=True, shared=False, pydantic=True, pydantic_strict=True)
    def bound(self: Any, point: Point) -> None: ...

    app.finalize()
    assert sent(lambda: bound.delay(Point(x=1)))[0] == [{"x": 1, "label": "none"}]
    with pytest.raises(InvalidTemplate, match=r"argument point\.x: Input should be a valid integer"):
        bound.delay({"x": "1"})


def test_other_tasks_are_left_alone(app: GPUFlow) -> None:
    @app.task(name="team.plain", shared=False)
    def plain(point: Point) -> None: ...

    app.finalize()
    assert sent(lambda: plain.delay({"y": 1})) == ([{"y": 1}], {})


def test_what_follows_a_task_is_sent_by_a_worker_as_it_is(app: GPUFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    task = plot(app)
    monkeypatch.setattr(surroundings._Process, "of_thread", lambda: None)

    assert sent(lambda: task.delay({})) == ([{}], {})


def test_called_as_a_function_it_is_celerys(app: GPUFlow) -> None:
    @app.task(name="team.doubled", shared=False, pydantic=True)
    def doubled(point: Point) -> Point:
        return Point(x=2 * point.x)

    app.finalize()
    assert doubled(Point(x=2)) == {"x": 4, "label": "none"}
