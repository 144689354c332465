"""What is shown of results, and the lines of `gpuflow logs`."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.cli.summary import StageSummary, compare_grid, compared_stages, items_grid, stage_lines, text_of
from gpuflow.event_text import message


def inference(name: str, *pairs: tuple[Any, str], task_type: str = "inference") -> StageSummary:
    items = [{"index": n, "input": given, "output": output} for n, (given, output) in enumerate(pairs)]
    return StageSummary(name=name, state="SUCCEEDED", task_type=task_type, result={"items": items})


def test_inference_stages_with_the_same_inputs_stand_side_by_side() -> None:
    before = inference("before", ("hi", "x"), ("who?", "y"))
    tune = StageSummary(name="tune", state="SUCCEEDED", task_type="lora_sft", result={"steps": 3})
    after = inference("after", ("hi", "X"), ("who?", "Y"))
    other = inference("other", ("else", "z"))
    assert compared_stages([before, tune, other, after]) == [before, after]
    grid = compare_grid([before, after])
    assert grid.headers == ("input", "before", "after")
    assert grid.rows == (("hi", "x", "X"), ("who?", "y", "Y"))


def test_the_annotation_says_what_to_compare() -> None:
    one, two, three = inference("one", ("a", "1")), inference("two", ("a", "2")), inference("three", ("b", "3"))
    assert compared_stages([one, two, three], "one, three") == [one, three]
    assert compared_stages([one, two, three], "one,missing") == []


def test_stages_that_do_not_infer_are_not_compared_by_chance() -> None:
    assert (
        compared_stages([inference("a", ("x", "x"), task_type="echo"), inference("b", ("x", "x"), task_type="echo")])
        == []
    )
    assert compared_stages([inference("only", ("x", "y"))]) == []


def test_rows_of_different_length_are_filled() -> None:
    grid = compare_grid([inference("a", ("x", "1"), ("y", "2")), inference("b", ("x", "3"))])
    assert len(grid.rows) == 2
    assert grid.rows[1][:2] == ("y", "2")


def test_losses_and_folders_of_a_training() -> None:
    stage = StageSummary(
        name="tune",
        state="SUCCEEDED",
        task_type="lora_sft",
        seconds=76.2,
        result={
            "steps": 60,
            "train_loss": 1.5,
            "eval_loss_before": 3.33,
            "eval_loss_after": 1.22,
            "final_lora_path": "/r/t/attempt-1/final_lora",
        },
        folders=["/r/t"],
    )
    assert stage_lines(stage) == [
        "tune: succeeded in 1m 16s",
        "  eval loss 3.33 before, 1.22 after",
        "  steps 60, train loss 1.5",
        "  final_lora: /r/t/attempt-1/final_lora",
        "  files: /r/t",
    ]


def test_a_training_says_which_rows_it_used_and_what_looks_wrong() -> None:
    result = {
        "rows": 24, "rows_trained": 16, "rows_evaluated": 4, "rows_dropped": {"max_length": 3, "empty": 1},
        "rows_truncated": 2, "warnings": ["grad_norm is 0 in the last 3 logs: nothing is learned"],
    }  # fmt: skip
    assert stage_lines(StageSummary(name="tune", state="SUCCEEDED", result=result))[1:] == [
        "  trained on 16 of 24 rows (4 to evaluate, 3 left out: max_length, 1 left out: empty, 2 cut)",
        "  warning: grad_norm is 0 in the last 3 logs: nothing is learned",
    ]


def test_a_failed_stage_tells_its_cause() -> None:
    assert stage_lines(StageSummary(name="a", state="FAILED", error="no disk\nleft")) == ["a: failed: no disk left"]


def test_an_output_of_any_shape_is_shown_first_and_that_of_each_task() -> None:
    single = StageSummary(name="a", state="SUCCEEDED", result={"pid": 7, "output": [2, {"x": 3}], "result_dir": "/r"})
    several = StageSummary(name="b", state="SUCCEEDED", result={"results": [{"output": {"x": 1}}, {"output": 2}]})
    assert stage_lines(single)[1] == '  {"output": [2, {"x": 3}], "pid": 7}'
    assert stage_lines(several)[1] == '  {"outputs": [{"x": 1}, 2]}'


def test_odd_results_are_shown_all_the_same() -> None:
    for result in ({}, {"items": "no list"}, {"items": [1, None]}, {"steps": "many", "usage": 3}, {"value": [1]},
                   {"rows": 1, "rows_trained": 1, "rows_dropped": {"x": "y"}, "warnings": [None]}):  # fmt: skip
        stage = StageSummary(name="a", state="SUCCEEDED", result=result)
        assert stage_lines(stage)[0] == "a: succeeded"
        assert stage.items == []


def test_long_tables_are_cut() -> None:
    grid = items_grid(inference("a", *((str(n), "x" * 2000) for n in range(50))))
    assert len(grid.rows) == 20
    assert grid.more == 30
    assert len(grid.rows[0][1]) == 600
    assert items_grid(inference("a", *((str(n), "x") for n in range(50))), None).more == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}], "hi"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "hi"),
        ({"prompt": "say"}, "say"),
        (3, "3"),
        (None, "null"),
        ({"a": [1]}, '{"a": [1]}'),
    ],
)
def test_text_of(value: object, text: str) -> None:
    assert text_of(value) == text


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("state", {"state": "STARTING", "attempt": 2, "worker": "w1"}, "STARTING attempt 2 on w1"),
        ("state", {"state": "FAILED", "error": {"message": "boom"}}, "FAILED: boom"),
        ("stage", {"stage": "a", "state": "FAILED", "error": {"message": "boom"}}, "failed: boom"),
        ("worker", {"status": "loading", "message": "downloading 43%"}, "loading: downloading 43%"),
        ("progress", {"current": 3, "total": 6, "unit": "step", "metrics": {"loss": 1.23456}}, "3/6 step loss=1.235"),
        ("progress", {"current": 3, "metrics": "odd"}, "3 step"),
        ("log", {"message": "hello"}, "hello"),
        ("text", {"content": "hello"}, "hello"),
        ("text_delta", {"delta": "h"}, None),
        ("artifact", {"path": "x"}, "artifact x"),
        ("finish", {"status": "failed", "error": {"message": "m"}}, "finish failed: m"),
        ("connection", {"status": "connected"}, "connected"),
        ("own", {"a": 1}, 'own {"a": 1}'),
        ("own", {}, "own"),
    ],
)
def test_lines_of_logs(name: str, data: dict[str, Any], text: str | None) -> None:
    assert message(name, data) == text


def test_what_is_missing_and_what_was_not_used_is_shown() -> None:
    told = {"items": [], "missing_artifacts": ["plot.png", "logs"], "warnings": ["model.vllm is not used"]}
    lines = stage_lines(StageSummary(name="ask", state="SUCCEEDED", result=told))
    assert "  missing: plot.png, logs (asked for in output.artifacts)" in lines
    assert "  warning: model.vllm is not used" in lines
