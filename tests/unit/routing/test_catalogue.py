"""From what NVML reports to short names and the memory on the box."""

import pytest
import yaml

from gpuflow.routing.catalogue import identify
from gpuflow.routing.names import name_matches, normalise_name
from gpuflow.spec.presets import configs_root


@pytest.mark.parametrize(
    ("nvml_name", "total_mib", "short", "vram_gb"),
    [
        ("NVIDIA A100-SXM4-40GB", 40960, "a100", 40),
        ("NVIDIA A100-PCIE-40GB", 40536, "a100", 40),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100", 80),
        ("NVIDIA A100 80GB PCIe", 81920, "a100", 80),
        ("A100-SXM4-40GB", 40537, "a100", 40),
        ("NVIDIA H100 80GB HBM3", 81559, "h100", 80),
        ("NVIDIA H100 PCIe", 81559, "h100", 80),
        ("NVIDIA H100 NVL", 95830, "h100", 94),
        ("NVIDIA H200", 143771, "h200", 141),
        ("NVIDIA B200", 183359, "b200", 180),
        ("NVIDIA GH200 480GB", 97871, "gh200", 96),
        ("NVIDIA L4", 23034, "l4", 24),
        ("NVIDIA L40", 46068, "l40", 48),
        ("NVIDIA L40S", 46068, "l40s", 48),
        ("Tesla T4", 15360, "t4", 16),
        ("Tesla T4", 15109, "t4", 16),
        ("Tesla V100-SXM2-16GB", 16160, "v100", 16),
        ("Tesla V100-SXM2-32GB", 32510, "v100", 32),
        ("Tesla V100S-PCIE-32GB", 32510, "v100s", 32),
        ("Tesla P100-PCIE-16GB", 16280, "p100", 16),
        ("NVIDIA A10", 23028, "a10", 24),
        ("NVIDIA A10G", 23028, "a10g", 24),
        ("NVIDIA A30", 24576, "a30", 24),
        ("NVIDIA A40", 46068, "a40", 48),
        ("NVIDIA RTX A6000", 49140, "a6000", 48),
        ("RTX A5000", 24256, "a5000", 24),
        ("Quadro RTX 6000", 24220, "rtx6000", 24),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx6000ada", 48),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtxpro6000", 96),
        ("NVIDIA GeForce RTX 2080 Ti", 11264, "rtx2080ti", 11),
        ("NVIDIA GeForce RTX 3060", 12288, "rtx3060", 12),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx3080", 10),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx4060ti", 16),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "rtx4070tisuper", 16),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090", 24),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "rtx4090", 16),
        ("NVIDIA GeForce RTX 5090", 32607, "rtx5090", 32),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40192, "mig3g40gb", 40),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, "mig1g5gb", 5),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", 40448, "mig3g40gb", 40),
        ("NVIDIA Z900 Hyper", 97000, "z900hyper", 96),
        ("NVIDIA Z900", 50 * 1024, "z900", 50),
        ("", 8192, "unknown", 8),
    ],
)
def test_real_names(nvml_name, total_mib, short, vram_gb):
    kind = identify(nvml_name, total_mib)
    assert (kind.names[0], kind.vram_gb) == (short, vram_gb)


@pytest.mark.parametrize(
    ("glob", "nvml_name", "expected"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("a100*", "NVIDIA A100-SXM4-80GB", True),
        ("a100-sxm4", "NVIDIA A100-SXM4-80GB", True),
        ("a100-sxm4", "NVIDIA A100 80GB PCIe", False),
        ("a10", "NVIDIA A100-SXM4-80GB", False),
        ("h100nvl", "NVIDIA H100 NVL", True),
        ("h100", "NVIDIA H100 NVL", True),
        ("v100", "Tesla V100S-PCIE-32GB", True),
        ("rtx40*", "NVIDIA GeForce RTX 4090", True),
        ("rtx-a6000", "NVIDIA RTX A6000", True),
        ("any", "Tesla T4", True),
        ("a100*", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", False),
        ("mig*", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", True),
        ("mig-a100", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", True),
        ("MIG-3g.40gb", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", True),
        ("z900hyper", "NVIDIA Z900 Hyper", True),
    ],
)
def test_which_asks_name_a_gpu(glob, nvml_name, expected):
    globs = tuple(filter(None, [normalise_name(glob)]))
    assert name_matches(globs, identify(nvml_name, 40960).names) is expected


def test_every_entry_is_in_its_one_spelling_and_stands_once():
    entries = yaml.safe_load((configs_root() / "gpus" / "catalogue.yaml").read_text())["gpus"]
    names = [entry["name"] for entry in entries]
    assert len(set(names)) == len(names)
    assert [name for name in names if normalise_name(name) != name] == []
    assert {other for entry in entries for other in entry.get("also", ())} <= set(names)
