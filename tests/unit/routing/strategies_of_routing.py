"""Hypothesis strategies shared by the tests of routing."""

from dataclasses import replace

from hypothesis import strategies as st
from test_accelerators import gpu_requirements

LABEL_TEXT = st.text(max_size=12)


COMPUTE = st.sampled_from(["6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])


@st.composite
def requirements(draw):
    """Any requirement: GPUs whole or shared, CPU, memory, disk, compute capability, labels of any characters."""
    labels = draw(st.dictionaries(LABEL_TEXT.filter(bool), LABEL_TEXT, max_size=3))
    gpu = draw(gpu_requirements(minimum=0))
    may_share = gpu.gpu_count == 1 and not gpu.gpu_count_max and gpu.vram_gb_min and not gpu.gpu_share
    return replace(
        gpu,
        cpu=draw(st.none() | st.integers(1, 256) | st.integers(1, 9999).map(lambda milli: milli / 1000)),
        memory_mib=draw(st.none() | st.integers(1, 2_000_000) | st.integers(1, 900).map(lambda gib: gib * 1024)),
        disk_gib=draw(st.none() | st.integers(1, 20_000) | st.integers(1, 9999).map(lambda mib: mib / 1024)),
        compute_capability_min=draw(st.none() | COMPUTE) if gpu.gpu_count else None,
        gpu_shared=draw(st.booleans()) if may_share else False,
        labels=tuple(labels.items()),
    )
