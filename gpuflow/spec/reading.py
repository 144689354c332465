"""From whatever names or holds a template (a path, text, a mapping) to plain data with lines.

Used by `parsing` and `presets`. It knows files and formats, nothing of what a template means. Nothing is read before
its size is known, and no input makes it raise anything but InvalidTemplate.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Final

from gpuflow.spec.json_reader import read_json
from gpuflow.spec.plain import plain_copy
from gpuflow.spec.report import Findings, Mistake, Path, invalid
from gpuflow.spec.yaml_reader import read_yaml

#: Largest template that is read, in bytes.
MAX_BYTES: Final = 10 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Document:
    """Plain data, the name it goes by in reports, and the line of each path (none for a mapping from Python)."""

    data: Any
    name: str
    lines: Mapping[Path, int] = field(default_factory=dict)

    def line_of(self, path: Path) -> int | None:
        """Return the line of a path, or of the nearest thing that encloses it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def read_file(path: FilePath, max_bytes: int = MAX_BYTES, name: str | None = None) -> Document:
    """Read a YAML or JSON file. Raises InvalidTemplate with cause and mend."""
    label = name or str(path)
    try:
        if path.is_dir():
            raise _refusal(label, "is a folder; name a YAML or JSON file in it")
        if not path.is_file():
            raise _refusal(label, "is not a regular file; give the path of a YAML or JSON file")
        size = path.stat().st_size
        if size > max_bytes:
            raise _refusal(label, _too_large(size, max_bytes))
        with path.open("rb") as stream:
            raw = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise _refusal(label, f"cannot be read: {cause}; check its path and rights") from error
    if len(raw) > max_bytes:
        raise _refusal(label, _too_large(len(raw), max_bytes))
    return read_text(_decode(raw, label), label, is_json=path.suffix.lower() == ".json")


def read_text(text: str, name: str, *, is_json: bool | None = None, max_bytes: int = MAX_BYTES) -> Document:
    """Read YAML or JSON text; without `is_json`, text that opens with a brace is tried as JSON first."""
    if len(text) > max_bytes or len(text.encode("utf-8", "surrogatepass")) > max_bytes:
        raise _refusal(name, _too_large(len(text), max_bytes))
    if not text.strip():
        raise _refusal(name, "is empty; a template begins with apiVersion: gpuflow/v1")
    if is_json is None:
        # `{"a": 1}` is read as JSON; a YAML flow mapping, whose keys have no quotes, as YAML.
        is_json = text.lstrip()[:1] == "{" and text.lstrip()[1:].lstrip()[:1] in ('"', "}")
    findings = Findings()
    tree = read_json(text, findings) if is_json else read_yaml(text, findings)
    findings.raise_if_any(name)
    if tree.root is None or tree.root.data is None:
        raise _refusal(name, "is empty; a template begins with apiVersion: gpuflow/v1")
    return Document(data=tree.root.data, name=name, lines=tree.lines)


def read_mapping(value: Mapping[str, Any], name: str = "template") -> Document:
    """Copy a mapping from Python code. Raises InvalidTemplate where it holds what JSON cannot."""
    findings = Findings()
    data = plain_copy(value, findings)
    findings.raise_if_any(name)
    return Document(data=data, name=name)


def missing(name: str, known: list[str], what: str) -> Exception:
    """Return the InvalidTemplate for a name that is neither a file nor a shipped template."""
    path = FilePath(name)
    siblings: list[str] = []
    try:
        siblings = [str(entry) for entry in itertools.islice(path.parent.iterdir(), 1000)]
    except (OSError, ValueError):
        siblings = []
    near = difflib.get_close_matches(name, [*known, *siblings], n=3, cutoff=0.6)
    mend = f"did you mean {' or '.join(near)}?" if near else f"{what}: {', '.join(known) or 'none'}"
    shown = name if len(name) <= 200 and name.isprintable() else f"{name[:60]!r}..."
    return _refusal(shown, f"no such file, and no shipped template of that name; {mend}")


def _decode(raw: bytes, name: str) -> str:
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise _refusal(name, "is UTF-16; save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _refusal(name, f"is not UTF-8: byte 0x{raw[error.start]:02x}; save it as UTF-8", line) from None


def _too_large(size: int, limit: int) -> str:
    return (
        f"has {size / 2**20:.1f} MiB, more than the {limit / 2**20:.1f} MiB of a template; "
        "put the data in a file of its own and name it by data.upload or data.path"
    )


def _refusal(name: str, message: str, line: int | None = None) -> Exception:
    return invalid(name, [Mistake(path="", line=line, message=message)])
