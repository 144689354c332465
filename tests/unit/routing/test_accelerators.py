"""The shorthand for GPUs: what it accepts, what it refuses and where it points."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.errors import GPUFlowError, InvalidTemplate
from gpuflow.routing.accelerators import format_accelerators, parse_accelerators
from gpuflow.routing.requirement import Requirement, is_gpu_name


def ask(**fields):
    return Requirement(**{"gpu_count": 1, **fields})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A100", ask(gpu_names=("a100",))),
        ("A100:1", ask(gpu_names=("a100",))),
        ("A100-80GB:2", ask(gpu_names=("a100",), vram_gb_min=80, gpu_count=2)),
        ("A100:80GB:2", ask(gpu_names=("a100",), vram_gb_min=80, gpu_count=2)),
        ("2:80GB:A100", ask(gpu_names=("a100",), vram_gb_min=80, gpu_count=2)),
        ("nvidia-a100-80gb", ask(gpu_names=("a100",), vram_gb_min=80)),
        ("nvidia:A100:2", ask(gpu_names=("a100",), gpu_count=2)),
        ("NVIDIA A100-SXM4-80GB", ask(gpu_names=("a100",), vram_gb_min=80)),
        ("NVIDIA A100 80GB PCIe", ask(gpu_names=("a100",), vram_gb_min=80)),
        ("NVIDIA H100 NVL", ask(gpu_names=("h100nvl",))),
        ("NVIDIA H100 80GB HBM3", ask(gpu_names=("h100",), vram_gb_min=80)),
        ("A100-SXM4-80GB", ask(gpu_names=("a100sxm4",), vram_gb_min=80)),
        ("A100 PCIe", ask(gpu_names=("a100pcie",))),
        ("L4:0.5", ask(gpu_names=("l4",), gpu_share=0.5)),
        (".25", ask(gpu_share=0.25)),
        (1.0, ask()),
        (0.5, ask(gpu_share=0.5)),
        ("Tesla-T4", ask(gpu_names=("t4",))),
        ("RTX 4090", ask(gpu_names=("rtx4090",))),
        ("RTX4090:2", ask(gpu_names=("rtx4090",), gpu_count=2)),
        ("GeForce RTX 4090", ask(gpu_names=("rtx4090",))),
        ("RTX-A6000", ask(gpu_names=("a6000",))),
        ("H100*:1", ask(gpu_names=("h100*",))),
        ("*4090", ask(gpu_names=("*4090",))),
        ("MIG-3g.40gb", ask(gpu_names=("mig3g40gb",))),
        ("A100|any", ask()),
        ("A100|H100:2", ask(gpu_names=("a100", "h100"), gpu_count=2)),
        ("any", ask()),
        ("any:4", ask(gpu_count=4)),
        ("nvidia", ask()),
        ("40GB", ask(vram_gb_min=40)),
        ("40GB+", ask(vram_gb_min=40)),
        ("40GB+:1", ask(vram_gb_min=40)),
        ("46Gi", ask(vram_gb_min=46)),
        ("24GB..80GB", ask(vram_gb_min=24, vram_gb_max=80)),
        ("24..80GB:2", ask(vram_gb_min=24, vram_gb_max=80, gpu_count=2)),
        ("24GB..", ask(vram_gb_min=24)),
        ("..24GB", ask(vram_gb_max=24)),
        ("A100-40GB+", ask(gpu_names=("a100",), vram_gb_min=40)),
        ("2", ask(gpu_count=2)),
        (2, ask(gpu_count=2)),
        ("1..4", ask(gpu_count_max=4)),
        ("H100:2..2", ask(gpu_names=("h100",), gpu_count=2)),
        (" A100 : 2 ", ask(gpu_names=("a100",), gpu_count=2)),
        ("cpu", Requirement()),
    ],
)
def test_spellings(text, expected):
    assert parse_accelerators(text) == (expected,)


def test_a_list_keeps_the_order_of_preference():
    assert parse_accelerators(["H100:1", "40GB+:1", "cpu"]) == (
        ask(gpu_names=("h100",)),
        ask(vram_gb_min=40),
        Requirement(),
    )


def test_a_mapping_is_name_to_count():
    assert parse_accelerators({"A100": 2, "H100": 1}) == (
        ask(gpu_names=("a100",), gpu_count=2),
        ask(gpu_names=("h100",)),
    )


def test_a_mapping_may_stand_in_a_list():
    assert parse_accelerators([{"A100": 2}, {"H100": 1, "L4": 0.5}, 4]) == (
        ask(gpu_names=("a100",), gpu_count=2),
        ask(gpu_names=("h100",)),
        ask(gpu_names=("l4",), gpu_share=0.5),
        ask(gpu_count=4),
    )


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("A100:H100:2", ["'H100' at column 6", "second name", "'A100' at column 1"]),
        ("A100-80GB:40GB", ["'40GB' at column 11", "second memory", "'80GB' at column 6"]),
        ("A100:2:4", ["'4' at column 8", "second count", "'2' at column 6"]),
        ("A100::2", ["an empty token at column 6"]),
        ("A100:$", ["'$' at column 6", "neither a name"]),
        ("A100, H100", ["A100, H100"]),
        ("A100:0", ["'0' at column 6", "write cpu"]),
        ("4090", ["RTX4090"]),
        ("9" * 9, ["RTX4090"]),
        ("9" * 5000, ["neither a name"]),
        ("A100:80GB..40GB", ["'80GB..40GB' at column 6", "at most 40 GB", "at least 80 GB"]),
        ("4..1", ["'4..1' at column 1", "at most 1 GPUs is below at least 4"]),
        ("A100:0.0", ["'0.0' at column 6", "write cpu"]),
        ("A100:0.5:2", ["'2' at column 10", "second count"]),
        ("A100:1.5", ["'1.5' at column 6"]),
        ("A100+", ["'A100+' at column 1", "A100*"]),
        ("amd", ["only NVIDIA"]),
        ("gpu:cpu", ["'cpu' at column 5"]),
        ("x4", ["is not the name of a GPU"]),
        ("A100|4090", ["'4090' at column 6 is not the name of a GPU"]),
        ("A100|", ["an empty name at column 6 is not the name of a GPU"]),
        ("", ["empty at column 1"]),
        (float("nan"), ["nan"]),
        (float("inf"), ["inf"]),
        ([], ["empty list"]),
        (["A100", "a100:1"], ["'a100:1' repeats 'A100'"]),
        (None, ["None"]),
        (True, ["True"]),
        ([["A100"]], ["['A100']"]),
        ({"A100": None}, ["None"]),
        ("|".join(f"A{number}" for number in range(65)), ["names 65 GPUs", "at most 64"]),
        ([f"A{number}" for number in range(65)], ["accelerators names 65 GPUs", "at most 64"]),
        (["|".join(f"A{one}{number}" for number in range(30)) for one in range(3)], ["names 90 GPUs", "at most 64"]),
    ],
)
def test_mistakes_point_at_the_token(text, fragments):
    with pytest.raises(InvalidTemplate) as caught:
        parse_accelerators(text)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@given(st.one_of(st.text(max_size=30), st.text(alphabet="aA1048gGBi+.:-_*?| ", max_size=24)))
def test_any_text_is_read_or_refused(text):
    refused = ""
    try:
        (requirement,) = parse_accelerators(text)
    except InvalidTemplate as error:
        refused = str(error)
    if refused:
        assert re.search(r"at column \d+", refused)
        return
    assert parse_accelerators(format_accelerators(requirement)) == (requirement,)


NAMES = st.from_regex(r"[a-z][a-z0-9*?]{0,8}", fullmatch=True).filter(is_gpu_name)
GIGABYTES = st.one_of(st.integers(1, 400), st.integers(1, 400 * 1024).map(lambda mib: mib / 1024))


@st.composite
def gpu_requirements(draw, minimum=1):
    count = draw(st.integers(minimum, 16))
    if count == 0:
        return Requirement()
    low, high = draw(st.none() | GIGABYTES), draw(st.none() | GIGABYTES)
    if low is not None and high is not None:
        low, high = min(low, high), max(low, high)
    share = draw(st.none() | st.integers(1, 999).map(lambda part: part / 1000)) if count == 1 else None
    try:
        return Requirement(
            gpu_count=count,
            gpu_count_max=None if share else draw(st.none() | st.integers(count, 32)),
            gpu_share=share,
            gpu_names=tuple(draw(st.lists(NAMES, max_size=3))),
            vram_gb_min=low,
            vram_gb_max=high,
        )
    except GPUFlowError:  # a normalised name may be reserved
        return Requirement(gpu_count=count)


@given(gpu_requirements(minimum=0))
def test_writing_and_reading_gives_the_same(requirement):
    assert parse_accelerators(format_accelerators(requirement)) == (requirement,)
