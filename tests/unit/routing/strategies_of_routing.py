"""Hypothesis strategies shared by the tests of routing."""

from dataclasses import replace

from hypothesis import strategies as st
from test_accelerators import gpu_requirements

LABEL_TEXT = st.text(max_size=12)


@st.composite
def requirements(draw):
    """Any requirement: with or without GPUs, CPU, memory and labels of any characters."""
    labels = draw(st.dictionaries(LABEL_TEXT.filter(bool), LABEL_TEXT, max_size=3))
    return replace(
        draw(gpu_requirements(minimum=0)),
        cpu=draw(st.none() | st.integers(1, 256) | st.integers(1, 9999).map(lambda milli: milli / 1000)),
        memory_mib=draw(st.none() | st.integers(1, 2_000_000) | st.integers(1, 900).map(lambda gib: gib * 1024)),
        labels=tuple(labels.items()),
    )
