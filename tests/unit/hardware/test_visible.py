"""CUDA_VISIBLE_DEVICES and --gpus, by table."""

import pytest

from gpuflow.fleet.hardware_nvml import Gpu
from gpuflow.fleet.hardware_visible import UnknownDeviceError, pick, restrict


def gpu(index, uuid, parent=None):
    return Gpu(index=index, uuid=uuid, name="NVIDIA L4", total_mib=23034, free_mib=23034, mig_parent_uuid=parent)


A, B, C = gpu(0, "GPU-aaaa-1111"), gpu(1, "GPU-aabb-2222"), gpu(3, "GPU-cccc-3333")
M0, M1 = gpu(2, "MIG-dddd-0", "GPU-dddd-4444"), gpu(2, "MIG-dddd-1", "GPU-dddd-4444")
ALL = (A, B, M0, M1, C)


@pytest.mark.parametrize(
    ("visible", "kept", "problem"),
    [
        (None, ALL, None),
        ("", (), None),
        ("  ", (), None),
        ("-1", (), None),
        ("0,-1,1", (A,), None),
        ("0", (A,), None),
        ("3,0", (C, A), None),
        (" 0 , 1 ", (A, B), None),
        ("2", (M0, M1), None),
        ("GPU-dddd", (M0, M1), None),
        ("MIG-dddd-1", (M1,), None),
        ("GPU-aaaa-1111", (A,), None),
        ("GPU-aaaa", (A,), None),
        ("GPU-cc,0", (C, A), None),
        ("0,9,1", (A,), "'9' is not the index"),
        ("0,,1", (A,), "''"),
        ("NoDevFiles", (), "'NoDevFiles' is neither"),
        ("GPU-aa", (), "several"),
        ("GPU-", (), "neither"),
        ("1,GPU-ffff,0", (B,), "'GPU-ffff' is not the UUID"),
        ("0,1,0", (A, B), "named twice"),
        ("0.5", (), "neither"),
    ],
)
def test_as_cuda_reads_it(visible, kept, problem):
    found = restrict(ALL, visible)
    assert found.gpus == kept
    if problem is None:
        assert found.problems == ()
    else:
        assert len(found.problems) == 1
        assert problem in found.problems[0]


def test_a_lost_gpu_does_not_end_the_list():
    assert restrict((A, C), "0,1,3", lost_indices=(1,)).gpus == (A, C)
    assert restrict((A, C), "GPU-aaaa,GPU-aabb-2222,GPU-cccc", lost_indices=(1,)).gpus == (A, C)
    assert restrict((A, C), "0,7,3", lost_indices=(1,)).gpus == (A,)


def test_pick_keeps_the_order_of_the_machine():
    assert pick(ALL, "3,GPU-aaaa") == (A, C)
    assert pick(ALL, "2") == (M0, M1)
    with pytest.raises(UnknownDeviceError) as caught:
        pick(ALL, "0,9")
    assert caught.value.entry == "9"
