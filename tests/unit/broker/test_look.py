"""What a consumer remembers between its pops."""

from __future__ import annotations

import json

from gpuflow.broker.gate import MessageFilter, SelectedQueue
from gpuflow.broker.look import RESCAN_SECONDS, Look


def chose(look: Look, *queues: str) -> None:
    look.chosen = [SelectedQueue(queue=queue) for queue in queues]


def test_queues_that_gave_nothing_are_passed_over_for_a_while() -> None:
    look = Look(page=["a", "b", "c"])
    assert look.begin(0.0)
    chose(look, "a", "b")
    look.in_vain(0.0)
    assert look.barren == {"a", "b"}

    assert look.begin(0.1)
    assert (look.barren, look.chosen, look.queues) == ({"a", "b"}, [], [])
    chose(look, "c")
    look.in_vain(0.2)
    assert look.barren == {"a", "b", "c"}
    assert look.begin(RESCAN_SECONDS)
    assert look.barren == set(), "the first of them counts"


def test_a_queue_that_others_have_emptied_is_not_passed_over() -> None:
    look = Look(page=["a", "b"])
    look.begin(0.0)
    chose(look, "a", "b")
    look.page = ["b"]  # as the pop has seen it, which took nothing

    look.in_vain(0.0)

    assert look.barren == {"b"}


def test_what_warm_sessions_have_no_place_for_is_passed_over_for_them_alone() -> None:
    look = Look(page=["a", "b"])
    look.begin(0.0)
    look.chosen = [SelectedQueue(queue="a"), SelectedQueue(queue="b", warm_only=True)]

    look.in_vain(0.0)

    assert (look.barren, look.full) == ({"a"}, {"b"})
    assert look.begin(RESCAN_SECONDS)
    assert (look.barren, look.full) == (set(), set())


def test_a_doorbell_for_one_of_them_is_heard() -> None:
    look = Look(page=["a"])
    look.begin(0.0)
    chose(look, "a")
    look.in_vain(0.0)
    look.again_at = 1.0
    assert not look.begin(0.5)

    look.woken((b"bell", b"16 a"))

    assert look.begin(0.5)
    assert (look.barren, look.woken_for) == (set(), (16, "a"))
    look.found("a")
    assert look.woken_for is None


def test_what_the_doorbell_tells_is_looked_at_last_and_once() -> None:
    look = Look(page=["a", "b"])
    look.woken((b"bell", b"3 new"))
    assert look.names_to_choose() == ["a", "b", "new"]
    look.woken((b"bell", b"3 a"))
    assert look.names_to_choose() == ["a", "b"]
    for nothing in (None, (b"bell", b""), (b"bell", b"x y"), (b"bell", b"5 ")):
        fresh = Look()
        fresh.woken(nothing)
        assert fresh.woken_for is None


def test_what_the_gate_refuses_is_not_asked_for_again_at_once() -> None:
    look = Look(page=["a", "b"])
    look.names_to_choose()
    assert look.refused(["b"])
    assert not look.refused(["b", "new"]), "the last pop has told of it"
    chose(look, "a")
    assert not look.refused(["b"])


def test_how_to_look_is_told_in_the_order_of_the_lists() -> None:
    look = Look(queues=["mine", "gpu"], plain=["mine"], chosen=[SelectedQueue(queue="gpu", most_seconds=2.5)])

    told = json.loads(look.to_json(["@c"], MessageFilter(models=("m",), patience_seconds=1.5), 100))

    assert (told["limits"], told["groups"], told["models"], told["patience"]) == ([-1, 2.5], ["@c"], ["m"], 1.5)
    assert "types" not in told
    assert json.loads(look.to_json([], MessageFilter(types=()), 0))["types"] == []
