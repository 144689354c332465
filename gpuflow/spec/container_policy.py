"""Decides whether a worker runs what a container task asks for: its image, the paths of the host it names. Pure.

The standard library alone. The worker resolves links before it asks (`gpuflow.worker.containers.local`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

#: The grammar of image references: [host[:port]/]path[:tag][@digest].
_NAME: Final = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE: Final = re.compile(
    rf"(?P<path>(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{{1,5}})?/)?{_NAME}(?:/{_NAME})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_DEFAULT_HOST: Final = "docker.io"


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image reference, complete: `ubuntu` is docker.io/library/ubuntu. A pattern has the same parts, with globs."""

    name: str
    tag: str | None
    digest: str | None


@dataclass(frozen=True, kw_only=True)
class ContainerAsk:
    """What a task asks for. `host_paths` are those that the template names, absolute and with links resolved."""

    image: str
    host_paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ContainerPolicy:
    """What a worker allows: the images of its presets, patterns of further ones, and folders to mount from."""

    preset_images: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    mount_roots: tuple[str, ...] = ()


def refusal(ask: ContainerAsk, policy: ContainerPolicy) -> str | None:
    """Return why a worker does not run this, with the setting that allows it; None where it does."""
    try:
        image = read_image(ask.image)
    except ValueError as error:
        return f"container.image: {error}"
    if not _is_allowed(image, policy):
        return (
            f"container.image: {ask.image!r} is neither the image of a preset nor in GPUFLOW_CONTAINER_IMAGES of this "
            "worker; add it to that setting, or name a preset (`gpuflow presets containers`)"
        )
    for path in ask.host_paths:
        if not any(PurePosixPath(path).is_relative_to(root) for root in policy.mount_roots):
            roots = ", ".join(policy.mount_roots) or "none"
            return (
                f"container: {path} is in no folder of GPUFLOW_CONTAINER_MOUNTS of this worker ({roots}), from which "
                "templates may mount; add its folder to that setting, or mount it by a preset"
            )
    return None


def read_image(text: str) -> Image:
    """Return the parts of an image reference. Raises ValueError."""
    found = _IMAGE.fullmatch(text)
    if found is None or len(text) > 500:
        raise ValueError(f"{text[:100]!r} is no image reference; write it as name:tag or host/name@sha256:...")
    return Image(name=_full_name(found["path"]), tag=found["tag"], digest=found["digest"])


def split_mount(text: str) -> tuple[str, str]:
    """Return host path and path in the container of a mount, `/host/path:/path[:ro]`. Raises ValueError."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if mode == "rw":
        raise ValueError(f"{text[:200]!r}: mounts of a template are read-only; write to OUTPUT_DIR")
    if mode not in ("", "ro") or not source.startswith("/") or not target.startswith("/") or "${" in text:
        raise ValueError(f"{text[:200]!r} is no mount; write /path/on/the/worker:/path/in/the/container")
    if ".." in PurePosixPath(target).parts or target.strip("/") == "":
        raise ValueError(f"{text[:200]!r}: {target} is no place for a mount; give an absolute path below / without ..")
    return source, target


def _is_allowed(image: Image, policy: ContainerPolicy) -> bool:
    if any(_same(image, read_image(text)) for text in policy.preset_images):
        return True
    return any(text == "*" or _matches(image, _read_pattern(text)) for text in policy.images)


def _same(image: Image, other: Image) -> bool:
    if image.name != other.name or image.digest != other.digest:
        return False
    return image.digest is not None or (image.tag or "latest") == (other.tag or "latest")


def _read_pattern(text: str) -> Image:
    """Return the parts of a pattern; `*` stands for anything but `/`, a last `/**` for all below."""
    rest, _, digest = text.partition("@")
    head, slash, last = rest.rpartition("/")
    name, _, tag = last.partition(":")
    return Image(name=_full_name(f"{head}{slash}{name}"), tag=tag or None, digest=digest or None)


def _matches(image: Image, pattern: Image) -> bool:
    """Compare; a pattern without tag and digest takes all of them, one with a tag takes no digest."""
    if not _glob(pattern.name, image.name):
        return False
    if pattern.digest is not None:
        return image.digest == pattern.digest
    if pattern.tag is not None:
        return image.digest is None and _glob(pattern.tag, image.tag or "latest")
    return True


def _glob(pattern: str, text: str) -> bool:
    deep = pattern.endswith("/**")
    parts = [re.escape(part) for part in (pattern[:-3] if deep else pattern).split("*")]
    return re.fullmatch("[^/]*".join(parts) + ("/.+" if deep else ""), text) is not None


def _full_name(path: str) -> str:
    first, slash, rest = path.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost" or first != first.lower()):
        host, name = first.lower(), rest
        if host == "index.docker.io":
            host = _DEFAULT_HOST
    else:
        host, name = _DEFAULT_HOST, path
    if host == _DEFAULT_HOST and "/" not in name:
        name = f"library/{name}"
    return f"{host}/{name}"
