"""What is written is read back the same; what cannot be read is refused by one kind of error."""

import contextlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_routing import requirements

from gpuflow.errors import InvalidTemplate
from gpuflow.routing.describe import describe
from gpuflow.routing.queue_names import queue_name
from gpuflow.routing.requirement import Requirement
from gpuflow.routing.resources import format_resources, requirement_from_resources

TOKENS = st.text(alphabet="aAlL1048xX0.5gGBiM+.:-_*?|$ ,", max_size=24)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.floats() | st.text(max_size=12) | TOKENS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TOKENS | st.integers(), inner, max_size=3),
    max_leaves=6,
)
GPU_FIELDS = st.sampled_from(
    ["type", "name", "count", "memory", "shared", "fraction", "gpu_memory_fraction", "compute_capability", "other"]
)


@given(requirements())
def test_resources_are_written_and_read(requirement):
    resources = format_resources(requirement)
    assert requirement_from_resources(resources, gpu_available=True) == (requirement,)
    assert requirement_from_resources(json.loads(json.dumps(resources)), gpu_available=False) == (requirement,)


@given(requirements(), requirements())
def test_asks_and_names_are_one_to_one(one, other):
    assert (one == other) == (queue_name(one) == queue_name(other))
    assert (one == other) == (one.to_dict() == other.to_dict())


@given(requirements())
def test_every_ask_is_described_in_one_line(requirement):
    text = describe(requirement.__class__(**{**vars(requirement), "labels": ()}))
    assert re.fullmatch(r"[ -~]+", text)


@given(VALUES)
def test_any_accelerators_are_read_or_refused(value):
    refused = ""
    try:
        found = requirement_from_resources({"accelerators": value}, gpu_available=True)
    except InvalidTemplate as error:
        refused = str(error)
    if refused:
        assert "\n" not in refused
        return
    assert found
    assert all(isinstance(one, Requirement) for one in found)


@given(st.dictionaries(GPU_FIELDS, VALUES, max_size=4), VALUES, st.booleans())
def test_any_long_form_is_read_or_refused(gpu, other, strict):
    for resources in (
        {"hardware": {"gpu": gpu}},
        {"hardware": {"gpu": gpu, "cpu": other, "disk": other}},
        {"gpu": other},
    ):
        with contextlib.suppress(InvalidTemplate):
            assert requirement_from_resources(resources, gpu_available=True, strict=strict)


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("cpu", "no GPU"),
        ("A100-80GB:2", "2 GPUs (a100), 80 GB or more each"),
        ("24GB..80GB:1..4", "1 to 4 GPUs, 24 to 80 GB each"),
        ("L4|A10G", "1 GPU (a10g or l4)"),
        ("..24GB", "1 GPU, 24 GB or less"),
        ("L4:0.5", "50 % of a GPU (l4)"),
        ({"hardware": {"gpu": {"shared": True, "memory": "8GB"}}}, "a share of 8 GB of a GPU"),
        (
            {
                "accelerators": "40GB",
                "hardware": {"cpu": 1, "memory": "64Gi", "disk": "1Ti", "gpu": {"compute_capability": 9}},
                "labels": {"team": "nlp*", "fast": None},
            },
            "1 GPU, 40 GB or more, compute capability 9.0 or more; 1 CPU; 64 GiB of memory; 1024 GiB of free disk; "
            "label fast; label team=nlp*",
        ),
    ],
)
def test_asks_in_words(text, described):
    assert describe(requirement_from_resources(text, gpu_available=True)[0]) == described
