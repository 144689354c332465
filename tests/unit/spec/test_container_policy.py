"""Which images and paths a worker allows, and what a preset may say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.errors import GPUFlowError
from gpuflow.spec.container_policy import ContainerAsk, ContainerPolicy, read_image, refusal, split_mount
from gpuflow.spec.container_presets import container_preset, preset_files, preset_images, read_preset
from gpuflow.spec.presets import list_presets

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("pattern", "image", "allowed"),
    [
        ("*", "anything/at:all", True),
        ("ubuntu", "ubuntu", True),
        ("ubuntu", "ubuntu:24.04", True),
        ("ubuntu", "docker.io/library/ubuntu@" + DIGEST, True),
        ("ubuntu", "index.docker.io/ubuntu", True),
        ("ubuntu:24.*", "ubuntu:24.04", True),
        ("ubuntu:24.*", "ubuntu", False),
        ("ubuntu:24.*", "ubuntu:24.04@" + DIGEST, False),  # the digest says what runs
        ("ubuntu@" + DIGEST, "ubuntu:24.04@" + DIGEST, True),
        ("ubuntu@" + DIGEST, "ubuntu", False),
        ("ubuntu*", "ubuntu.evil.io/x", False),
        ("ubuntu*", "ubuntu-evil/x", False),
        ("acme/*", "acme/tool:1", True),
        ("acme/*", "acme/deep/tool", False),
        ("acme/*", "evil.io/acme/tool", False),
        ("acme/**", "acme/deep/tool", True),
        ("acme/**", "acme-evil/tool", False),
        ("ghcr.io/acme/*", "ghcr.io/acme/tool:1", True),
        ("ghcr.io/acme/*", "acme/tool", False),
        ("ghcr.io/acme/*", "ghcr.io.evil.io/acme/tool", False),
        ("box:5000/acme/*", "box:5000/acme/tool:2", True),
        ("localhost/*", "localhost/tool", True),
    ],
)
def test_patterns_of_images(pattern: str, image: str, allowed: bool) -> None:
    why = refusal(ContainerAsk(image=image), ContainerPolicy(images=(pattern,)))

    assert (why is None) is allowed
    assert why is None or "GPUFLOW_CONTAINER_IMAGES" in why


def test_the_image_of_a_preset_is_allowed_as_it_is() -> None:
    policy = ContainerPolicy(preset_images=("acme/tool:1",))

    assert refusal(ContainerAsk(image="docker.io/acme/tool:1"), policy) is None
    for other in ("acme/tool", "acme/tool:2", "acme/tool:1@" + DIGEST):
        assert refusal(ContainerAsk(image=other), policy) is not None


@pytest.mark.parametrize("text", ["", "A", "a b", "a:", "a@sha256:12", "../a", "a//b", "${env:X}", "http://a/b", "-a"])
def test_what_is_no_image(text: str) -> None:
    with pytest.raises(ValueError, match="is no image reference"):
        read_image(text)


@given(st.text(max_size=40))
def test_nothing_makes_it_raise_anything_else(text: str) -> None:
    for function in (read_image, split_mount):
        try:
            function(text)
        except ValueError:
            continue
    refusal(ContainerAsk(image=text), ContainerPolicy(images=(text, "*")))


def test_paths_of_the_host_lie_below_a_root() -> None:
    policy = ContainerPolicy(images=("*",), mount_roots=("/srv/data",))

    assert refusal(ContainerAsk(image="a", host_paths=("/srv/data", "/srv/data/x")), policy) is None
    for path in ("/srv/data2", "/srv", "/etc/passwd"):
        why = refusal(ContainerAsk(image="a", host_paths=("/srv/data", path)), policy)
        assert why is not None
        assert f"{path} is in no folder of GPUFLOW_CONTAINER_MOUNTS of this worker (/srv/data)" in why


def test_mounts_of_templates_are_read_only() -> None:
    assert split_mount("/a/b:/c") == split_mount("/a/b:/c:ro") == ("/a/b", "/c")
    for text, problem in (
        ("/a:/b:rw", "read-only"), ("/a:/b:z", "is no mount"), ("a:/b", "is no mount"), ("/a", "is no mount"),
        ("/a:/", "is no place"), ("/a:/b/../c", "is no place"), ("/a/${env:X}:/b", "is no mount"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=problem):
            split_mount(text)


def test_every_shipped_preset_can_be_read() -> None:
    files = preset_files(None)

    assert list(files) == list_presets("containers")
    for path in files.values():
        preset = read_preset(path)
        assert preset.description
        assert preset.mounts == []
        assert preset.process is None or (path.parent / (preset.process.folder or ".")).is_dir()


def test_an_operators_presets_hide_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "loading-worker.yaml").write_text("docker_image: acme/mine:1\nenv_vars: {MODEL_NAME: a, N: 1}\n")
    (tmp_path / "broken.yaml").write_text("image: a b\n")

    preset, path = container_preset("loading-worker", tmp_path)

    assert (preset.image, preset.env, path.parent) == ("acme/mine:1", {"MODEL_NAME": "a", "N": "1"}, tmp_path)
    assert preset_images(tmp_path) == ("loading-worker:latest", "acme/mine:1")
    with pytest.raises(GPUFlowError, match="did you mean loading-worker"):
        container_preset("loading-work", tmp_path)
    for name in ("../x", "/etc/passwd", ""):
        with pytest.raises(GPUFlowError, match="GPUFLOW_CONTAINER_PRESETS"):
            container_preset(name, tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("image: a b", "image: 'a b' is no image reference"),
        ("command: ls", "image: Field required"),
        ("image: a\nimge: b", "imge: Extra inputs"),
        ("image: a\nenv: {TASK_ID: x}", "TASK_ID is set by gpuflow"),
        ("image: a\nmounts: [{source: a, target: /b}]", "must be an absolute path"),
        ("image: a\nprocess: {folder: x}", "process has no command"),
        ("image: a\nmemory: 3", "is not an amount of memory"),
        ("image: a\nidle_timeout: 5m", "idle_timeout is of sessions only; add `mode: session`"),
        ("image: a\nmode: session\nmax_lifetime: soon", "max_lifetime"),
        ("image: a\ncommand: x\nmode: session\nprocess: {}", "process has no folder"),
        ("- image", "preset: Input should be"),
    ],
)
def test_what_is_wrong_with_a_preset_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)

    with pytest.raises(GPUFlowError) as caught:
        read_preset(path)

    assert str(path) in str(caught.value)
    assert problem in str(caught.value)
