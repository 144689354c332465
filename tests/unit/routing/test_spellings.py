"""One ask, spelled as SkyPilot, dstack, FlowMesh, Kubernetes and nvidia-smi do: one queue, by the template's way in."""

import pytest
import yaml

from gpuflow.errors import InvalidTemplate
from gpuflow.routing.resources import requirement_from_resources
from gpuflow.spec import parse

TWO_A100_80 = [
    "accelerators: A100-80GB:2",  # SkyPilot
    "accelerators: a100-80gb:2",
    "accelerators: {A100-80GB: 2}",
    'accelerators: {A100-80GB: "2"}',
    "accelerators: [{A100-80GB: 2}]",
    "accelerators: [A100-80GB:2]",
    "gpu: A100:80GB:2",  # dstack
    "gpu: 80GB:A100:2",
    "gpu: 2:A100:80GB",
    "gpu: nvidia:A100:80GB:2",
    "gpu: A100:80GB+:2",
    "gpu: {name: A100, memory: 80GB, count: 2}",
    "gpu: {name: [A100], memory: 80GB.., count: 2}",
    "accelerators: A100:80GB:2",
    "accelerators: 80GB+:A100:2",
    "accelerators: A100-80G:2",
    "accelerators: A100_80GB:2",
    "accelerators: A100 80GB:2",
    "accelerators: A100-80GiB:2",
    "accelerators: A100-80Gi:2",
    "accelerators: A100:2..2:80GB",
    "accelerators: A100:80GB..:2",
    "accelerators: A100:81920MB:2",
    "accelerators: nvidia-a100-80gb:2",
    "accelerators: NVIDIA A100 80GB PCIe:2",  # nvidia-smi
    "accelerators: NVIDIA A100-SXM4-80GB:2",
    "accelerators: NVIDIA-A100-SXM4-80GB:2",  # the label of the Kubernetes device plugin
    "accelerators: NVIDIA-A100-80GB-PCIe:2",
    "hardware: {gpu: {type: nvidia-a100-80gb, count: 2}}",  # FlowMesh
    "hardware: {gpu: {type: nvidia-a100-80gb, count: '2'}}",
    "hardware: {gpu: {type: NVIDIA A100 80GB PCIe, count: 2}}",
    "hardware: {gpu: {type: NVIDIA-A100-SXM4-80GB, count: 2}}",
    "hardware: {gpu: {type: a100, memory: 80GB, count: 2}}",
    "hardware: {gpu: {type: [a100], memory: 80Gi, count: 2}}",
    "hardware: {gpu: {type: A100, memory: 80GiB, count: 2}}",
    "hardware: {gpu: {type: a100-80gb, memory: 80GB+, count: 2}}",
    "hardware: {gpu: {type: a100, memory: 80GB.., count: 2}}",
    "hardware: {gpu: {type: A100, memory: 80GB, count: 2, shared: false}}",
    "hardware: {gpu: {type: A100, memory: 80GB, count: 2, fraction: 1}}",
    "{accelerators: A100-80GB:2, hardware: {gpu: {type: a100, memory: 80GB, count: 2}}}",
    "{accelerators: A100-80GB:2, gpu: A100-80GB:2}",
    "hardware: {gpu: {type: A100_80GB, count: 2..2}}",
]
OTHERS = [
    ("gpu-46g", "hardware: {gpu: {type: any, count: 1, memory: 46Gi}}"),  # FlowMesh
    ("gpu-46g", "accelerators: any:46GB"),
    ("gpu-46g", "accelerators: 46GB"),
    ("gpu-46g", "gpu: 46GB.."),
    ("gpu-x2", "accelerators: 2"),
    ("gpu-x2", "gpu: 2"),
    ("gpu-x2", "gpu: any:2"),
    ("gpu-24g-max80g-x1to4", "gpu: 24GB..80GB:1..4"),
    ("gpu-24g-max80g-x1to4", "gpu: {memory: 24GB..80GB, count: 1..4}"),
    ("gpu-a10g_l4", "accelerators: L4|A10G"),
    ("gpu-a10g_l4", "hardware: {gpu: {type: [l4, a10g]}}"),
    ("gpu-l4-share50", "accelerators: {L4: 0.5}"),
    ("gpu-l4-share50", "accelerators: L4:0.5"),
    ("gpu-l4-share50", "hardware: {gpu: {type: l4, fraction: 0.5}}"),
    ("gpu-l4-share50", "{accelerators: L4, hardware: {gpu: {gpu_memory_fraction: 0.5}}}"),
    ("gpu-shared8g", "hardware: {gpu: {shared: true, memory: 8GB}}"),
    ("gpu-shared8g", "{accelerators: 8GB, hardware: {gpu: {shared: true}}}"),
    ("gpu-cc80", "hardware: {gpu: {compute_capability: 8.0}}"),
    ("gpu-cc80", 'hardware: {gpu: {compute_capability: ">=8.0"}}'),
    ("gpu-cc80", 'hardware: {gpu: {compute_capability: "8.0+"}}'),
    ("cpu-disk100g", "hardware: {disk: 100Gi}"),
    ("gpu-t4", "accelerators: Tesla T4"),
    ("gpu-a6000", "accelerators: NVIDIA RTX A6000"),
    ("gpu-rtx4090", "accelerators: NVIDIA GeForce RTX 4090"),
]


def queues_of(text):
    """Return the queues of `resources` as a template gives them, and as a decorator does."""
    resources = yaml.safe_load(text)
    template = parse({"apiVersion": "gpuflow/v1", "spec": {"taskType": "echo", "resources": resources}})
    through_template = requirement_from_resources(template.stages[0].spec["resources"], gpu_available=True)
    direct = requirement_from_resources(resources, gpu_available=True)
    assert through_template == direct
    return [ask.queue_name() for ask in direct]


@pytest.mark.parametrize("text", TWO_A100_80)
def test_every_spelling_of_one_ask_lands_in_one_queue(text):
    assert queues_of(text) == ["gpu-a100-80g-x2"]


@pytest.mark.parametrize(("queue", "text"), OTHERS)
def test_further_spellings(queue, text):
    assert queues_of(text) == [queue]


def test_alternatives_keep_their_order():
    assert queues_of("accelerators: [{H100: 1}, {A100-80GB: 2, L4: 4}, 40GB+, cpu]") == [
        "gpu-h100",
        "gpu-a100-80g-x2",
        "gpu-l4-x4",
        "gpu-40g",
        "cpu",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "accelerators: []",
        "accelerators: {}",
        "accelerators: [[A100]]",
        "accelerators: true",
        "accelerators: {A100: null}",
        "accelerators: {A100: [1]}",
        "accelerators: A100$",
        "gpu: {A100: 2}",
        "hardware: {gpu: {count: 1..}}",
        "hardware: {gpu: {memory: big}}",
        "hardware: {gpu: {memory: ..}}",
        "hardware: {gpu: {compute_capability: new}}",
        "hardware: {gpu: {fraction: 0}}",
        "hardware: {gpu: {fraction: 0.5, count: 2}}",
        "hardware: {gpu: {fraction: 0.5, shared: false}}",
        "hardware: {gpu: {fraction: 0.5, gpu_memory_fraction: 0.4}}",
        "hardware: {gpu: {shared: true, memory: 8GB, fraction: 0.5}}",
        "hardware: {disk: 100}",
        "{accelerators: A100, gpu: H100}",
    ],
)
def test_a_template_refuses_what_has_no_meaning(text):
    with pytest.raises(InvalidTemplate):
        parse({"apiVersion": "gpuflow/v1", "spec": {"taskType": "echo", "resources": yaml.safe_load(text)}})
