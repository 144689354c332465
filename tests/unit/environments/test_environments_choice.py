"""In which environment a task runs: the choice, by table, and what a worker offers and lacks by it."""

from __future__ import annotations

import pytest

from executors.registry import EXECUTORS, find
from gpuflow.environments import ChosenEnvironment, State, choose, offers_of, snapshot
from gpuflow.routing.families import TASK_OF_TYPE
from gpuflow.routing.offers import Lack, Offers
from gpuflow.settings import Settings

SERVED = frozenset({"inference", "embedding", "sft"})


def default(*lacks: str) -> State:
    return State(
        name="default",
        engine="transformers",
        serves=SERVED,
        ready=SERVED - set(lacks),
        works=True,
        lack=Lack(why="lacks packages", mend="`create default`"),
    )


def vllm(*, works: bool) -> State:
    serves = frozenset({"inference", "embedding"})
    lack = Lack(why="(cpu) is not built", mend="`create vllm`")
    return State(
        name="vllm", engine="vllm", serves=serves, ready=serves if works else frozenset(), works=works, lack=lack
    )


def own(name: str, *serves: str, engine: str = "") -> State:
    return State(name=name, engine=engine, serves=frozenset(serves), ready=frozenset(serves), works=True, own=True)


BOTH = (default(), vllm(works=True))
NO_VLLM = (default(), vllm(works=False))
BARE = (default("inference", "embedding", "sft"), vllm(works=False))
OWN = (*BOTH, own("aside", "acme.translate", "inference", engine="vllm"))


@pytest.mark.parametrize(
    ("states", "task_type", "engine", "environment", "chosen"),
    [
        (BOTH, "inference", None, None, ("vllm", "vllm")),
        (BOTH, "inference", "auto", None, ("vllm", "vllm")),
        (BOTH, "inference", "vllm", None, ("vllm", "vllm")),
        (BOTH, "inference", "transformers", None, ("default", "transformers")),
        (BOTH, "inference", None, "default", ("default", "transformers")),
        (NO_VLLM, "inference", None, None, ("default", "transformers")),
        (NO_VLLM, "embedding", "auto", None, ("default", "transformers")),
        ((default("inference"), vllm(works=True)), "inference", None, None, ("vllm", "vllm")),
        (BOTH, "sft", None, None, ("default", "")),
        (BARE, "acme.translate", None, None, ("default", "")),
        (BARE, "dpo", None, None, ("default", "")),  # that nothing runs it, the child says
        (OWN, "acme.translate", None, None, ("aside", "")),
        (OWN, "acme.translate", None, "default", "environment default does not serve acme.translate"),
        (OWN, "inference", None, None, ("vllm", "vllm")),  # a user's own is used where it is named
        (OWN, "inference", None, "aside", ("aside", "vllm")),
        (OWN, "sft", None, "aside", ("aside", "")),
        (BOTH, "acme.other", None, "vllm", ("vllm", "")),
        (NO_VLLM, "inference", "vllm", None, "environment vllm (cpu) is not built; `create vllm`"),
        (NO_VLLM, "inference", None, "vllm", "environment vllm (cpu) is not built; `create vllm`"),
        (
            BARE,
            "inference",
            None,
            None,
            "environment vllm (cpu) is not built, environment default lacks packages; "
            "`create vllm` or `create default`",
        ),
        (BARE, "sft", None, None, "environment default lacks packages; `create default`"),
        (BOTH, "sft", None, "vllm", "environment vllm does not serve sft"),
        (BOTH, "sft", None, "fast", "there is no environment fast; fast.yaml in GPUFLOW_ENV_DIR would define it"),
        ((default(),), "inference", "vllm", None, "no environment runs inference by engine vllm"),
    ],
)
def test_the_choice(
    states: tuple[State, ...],
    task_type: str,
    engine: str | None,
    environment: str | None,
    chosen: tuple[str, str] | str,
) -> None:
    for order in (states, states[::-1]):
        answer = choose(order, task_type, engine=engine, environment=environment)

        if isinstance(chosen, tuple):
            assert answer == ChosenEnvironment(environment=chosen[0], engine=chosen[1])
        elif order is states:
            assert isinstance(answer, Lack)
            assert answer.why + (f"; {answer.mend}" if answer.mend else "") == chosen


def test_what_is_offered_and_what_is_lacking_with_its_mend() -> None:
    offers = offers_of(NO_VLLM, {"inference": None, "sft": None, "acme.a": None, "acme.b": "vllm"})

    assert offers.names == {
        "inference", "inference:transformers", "inference@default", "sft", "sft@default", "acme.a", "acme.a@default",
        "acme.b@default",
    }  # fmt: skip
    assert set(offers.lacking) == {
        "inference:vllm",
        "inference@vllm",
        "sft@vllm",
        "acme.a@vllm",
        "acme.b",
        "acme.b@vllm",
    }
    assert offers.lacking["inference:vllm"] == Lack(why="environment vllm (cpu) is not built", mend="`create vllm`")
    assert Offers.from_dict(offers.to_dict()) == offers


def test_each_executor_of_ours_is_for_an_environment_that_serves_its_task_types() -> None:
    states = {state.name: state for state in snapshot(Settings(), gpus=False).states}

    for task_type in EXECUTORS:
        assert task_type in states[find(task_type).environment].serves
    assert {task_type for state in states.values() for task_type in state.serves} <= set(TASK_OF_TYPE)
