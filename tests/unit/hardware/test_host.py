"""CPUs and memory inside control groups, from made-up /proc and /sys trees."""

import psutil
import pytest

from gpuflow.fleet import hardware_host

MIB = 1024 * 1024


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a function that writes files below a root; the machine has 8 CPUs and 64 GiB."""
    memory = psutil.virtual_memory()
    machine = memory._replace(total=65536 * MIB, available=60000 * MIB)
    monkeypatch.setattr(hardware_host.psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(hardware_host.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return hardware_host.read(tmp_path)

    return write


def facts(host):
    return host.cpu_count, host.memory_total_mib, host.memory_available_mib


def test_the_machine_counts_without_control_groups(tree):
    assert facts(tree()) == (8, 65536, 60000)


def test_version_2(tree):
    group = "sys/fs/cgroup/system/job"
    host = tree(
        **{
            "proc/self/cgroup": "0::/system/job\n",
            f"{group}/cpu.max": "250000 100000\n",
            f"{group}/memory.max": f"{8192 * MIB}\n",
            f"{group}/memory.current": f"{3000 * MIB}\n",
            f"{group}/memory.stat": f"anon 5\ninactive_file {1000 * MIB}\n",
        }
    )
    assert facts(host) == (2, 8192, 8192 - 2000)


def test_the_tightest_of_all_parents_counts(tree):
    host = tree(
        **{
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/a/memory.max": f"{4096 * MIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{5000 * MIB}\n",
        }
    )
    assert facts(host) == (1, 4096, 0)


def test_inside_a_container_the_root_is_the_group(tree):
    host = tree(
        **{
            "proc/self/cgroup": "0::/../../host/path\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/memory.max": f"{16384 * MIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        }
    )
    assert facts(host) == (4, 16384, 16384)


def test_version_1(tree):
    host = tree(
        **{
            "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2048 * MIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{48 * MIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 0\n",
        }
    )
    assert facts(host) == (3, 2048, 2000)


def test_no_limit_in_version_1(tree):
    host = tree(
        **{
            "proc/self/cgroup": "5:cpu:/\n4:memory:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        }
    )
    assert facts(host) == (8, 65536, 60000)


GPU = {"vendor": "0x10de\n", "class": "0x030200\n"}


@pytest.mark.parametrize(
    ("device", "files", "environment", "found"),
    [
        ({}, ["dev/nvidia0"], {"container": "podman"}, True),
        (GPU, [], {}, True),
        ({**GPU, "class": "0x030000\n"}, [], {}, True),
        ({**GPU, "class": "0x040300\n"}, [], {}, False),  # its sound
        ({**GPU, "vendor": "0x1002\n"}, [], {}, False),
        ({"vendor": "0x10de\n"}, [], {}, False),
        (GPU, [".dockerenv"], {}, False),
        (GPU, ["run/.containerenv"], {}, False),
        (GPU, [], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({}, [], {}, False),
    ],
)
def test_a_device_without_a_driver_is_found_on_the_bus_but_not_from_a_container(
    tmp_path, device, files, environment, found
):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name, text in device.items():
        (tmp_path / "sys/bus/pci/devices/0000:01:00.0" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/bus/pci/devices/0000:01:00.0" / name).write_text(text)

    assert hardware_host.has_nvidia_device(tmp_path, environment) is found
