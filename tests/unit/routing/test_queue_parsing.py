"""What a queue asks for, read from its name: the way back of every name that was not cut."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies_of_routing import requirements

from gpuflow.routing.queue_names import MAX_NAME_LENGTH, queue_name
from gpuflow.routing.queue_parsing import requirement_of
from gpuflow.routing.requirement import Requirement


@given(requirements())
def test_a_name_that_was_not_cut_tells_its_requirement(requirement):
    name = queue_name(requirement)
    assume(len(name) < MAX_NAME_LENGTH)

    assert requirement_of(name) == requirement


@given(st.text(alphabet="cpugx0123456789-._=+~%amhrdisk", max_size=30).map(lambda rest: f"gpu-{rest}"))
def test_no_name_is_read_as_another(name):
    found = requirement_of(name)
    assert found is None or queue_name(found) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "celery",
        "gpus",
        "gpu-",
        "gpu-A100",
        "gpu-0g",
        "gpu-x1",
        "gpu-80g-a100",
        "cpu-a100",
        "gpu-.a",
        "gpu..",
        "gpu.a=b.a=c",
    ],
)
def test_what_is_no_name_of_ours_tells_nothing(name):
    assert requirement_of(name) is None


def test_a_hashed_name_tells_nothing():
    long = Requirement(labels=(("note", "y" * 200),))
    assert requirement_of(queue_name(long)) is None
