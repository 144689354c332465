"""From what NVML reports to short names and the memory on the box."""

import pytest
import yaml

from gpuflow.routing.catalogue import identify
from gpuflow.routing.gpu_names import name_matches, normalise_name
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
        ("NVIDIA B200", 182642, "b200", 180),
        ("NVIDIA B300 SXM6 AC", 275040, "b300", 270),
        ("NVIDIA GB200", 189471, "gb200", 186),
        ("NVIDIA GH200 144G HBM3e", 146831, "gh200", 144),
        ("NVIDIA H200 NVL", 143771, "h200", 141),
        ("NVIDIA H100 80GB HBM3e", 81559, "h100", 80),
        ("NVIDIA H20", 97871, "h20", 96),
        ("NVIDIA A100-SXM-64GB", 65247, "a100", 64),
        ("NVIDIA A100-PG509-200", 40536, "a100", 40),
        ("NVIDIA A800-SXM4-80GB", 81920, "a800", 80),
        ("NVIDIA A16", 15356, "a16", 16),
        ("NVIDIA A2", 15356, "a2", 16),
        ("NVIDIA L40G", 24576, "l40g", 24),
        ("NVIDIA T4G", 15360, "t4g", 16),
        ("Tesla K80", 11441, "k80", 12),
        ("Tesla M60", 8129, "m60", 8),
        ("NVIDIA RTX A4000", 16376, "a4000", 16),
        ("NVIDIA RTX A4000 Laptop GPU", 8192, "a4000", 8),
        ("NVIDIA RTX A5000 Laptop GPU", 16384, "a5000", 16),
        ("NVIDIA RTX A2000 12GB", 12282, "a2000", 12),
        ("NVIDIA RTX A2000 8GB Laptop GPU", 8192, "a2000", 8),
        ("NVIDIA RTX 5000 Ada Generation Laptop GPU", 16376, "rtx5000ada", 16),
        ("NVIDIA RTX 4000 SFF Ada Generation", 20475, "rtx4000sffada", 20),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtxpro6000", 96),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "rtxpro6000", 96),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", 24463, "rtx5090", 24),
        ("NVIDIA GeForce RTX 5080", 16303, "rtx5080", 16),
        ("NVIDIA GeForce RTX 5070 Ti", 16303, "rtx5070ti", 16),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", 12227, "rtx5070ti", 12),
        ("NVIDIA GeForce RTX 5070", 12227, "rtx5070", 12),
        ("NVIDIA GeForce RTX 5060 Ti", 16311, "rtx5060ti", 16),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", 12282, "rtx4080", 12),
        ("NVIDIA GeForce RTX 4080 SUPER", 16376, "rtx4080super", 16),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 8188, "rtx4070", 8),
        ("NVIDIA GeForce RTX 4090 D", 24564, "rtx4090d", 24),
        ("NVIDIA GeForce RTX 3090 Ti", 24564, "rtx3090ti", 24),
        ("NVIDIA GeForce RTX 3090", 24576, "rtx3090", 24),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16384, "rtx3080ti", 16),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 6144, "rtx3060", 6),
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", 6144, "rtx3050", 6),
        ("NVIDIA A100-SXM4-40GB MIG 7g.40gb", 40192, "mig7g40gb", 40),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", 9728, "mig1g10gb", 10),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 80896, "mig7g80gb", 80),
        ("NVIDIA A30 MIG 1g.6gb", 5952, "mig1g6gb", 6),
        ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", 20096, "mig1g20gb", 20),
        ("NVIDIA H100 NVL MIG 3g.47gb", 47488, "mig3g47gb", 47),
        ("NVIDIA H200 MIG 1g.18gb", 16384, "mig1g18gb", 18),
        ("NVIDIA H200 MIG 7g.141gb", 143155, "mig7g141gb", 141),
        ("NVIDIA B200 MIG 2g.45gb", 45312, "mig2g45gb", 45),
        ("GRID A100D-20C", 20480, "grida100d20c", 20),
        ("NVIDIA Z900 Hyper", 97000, "z900hyper", 96),
        ("NVIDIA Z900", 50 * 1024, "z900", 50),
        ("", 8192, "unknown", 8),
    ],
)
def test_real_names(nvml_name, total_mib, short, vram_gb):
    kind = identify(nvml_name, total_mib)
    assert (kind.names[0], kind.vram_gb) == (short, vram_gb)


@pytest.mark.parametrize(
    ("total_mib", "vram_gb"),
    [
        (23034, 24),
        (15360, 16),
        (46068, 48),
        (40536, 40),
        (81559, 80),
        (7680, 8),
        (11264, 11),
        (130_000, 128),
        (59_000, 64),
    ],
)
def test_a_gpu_that_is_not_listed_has_the_size_on_its_box(total_mib, vram_gb):
    assert identify("NVIDIA X1 Neo", total_mib).vram_gb == vram_gb


@pytest.mark.parametrize("reported", range(33_000, 41_042, 67))
def test_an_a100_with_40_gb_never_has_80(reported):
    assert identify("NVIDIA A100-SXM4-40GB", reported).vram_gb <= 40.1


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
        ("rtx4090", "NVIDIA GeForce RTX 4090 Laptop GPU", True),
        ("rtx4090laptop", "NVIDIA GeForce RTX 4090 Laptop GPU", True),
        ("rtx4090laptop", "NVIDIA GeForce RTX 4090", False),
        ("rtx4070", "NVIDIA GeForce RTX 4070 Ti", False),
        ("h100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", False),
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
