"""Reading templates as the whole library judges them: the one checker behind validate, explain, submit, run and HTTP.

`gpuflow.spec` knows the vocabulary, `gpuflow.routing` what the accelerators of a task mean; both speak in one report.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpuflow import spec
from gpuflow.errors import GPUFlowError
from gpuflow.routing.resources import requirement_from_resources
from gpuflow.spec import Template
from gpuflow.spec.reading import MAX_BYTES
from gpuflow.spec.report import Check, Path


def _resources(given: Any) -> Iterator[tuple[Path, str]]:
    """Yield why no requirement can be made of `resources`."""
    try:
        requirement_from_resources(given, gpu_available=False)
    except GPUFlowError as error:
        message = str(error)
        yield ("accelerators",) if message.startswith("accelerators") else (), message


CHECKS: Final[Mapping[str, Check]] = {"resources": _resources}


def parse(
    source: str | os.PathLike[str] | Mapping[str, Any] | Template,
    *,
    max_bytes: int = MAX_BYTES,
    more: Mapping[str, Check] | None = None,
) -> Template:
    """Return the checked template, as `gpuflow.spec.parse`, with what it asks of machines. Raises InvalidTemplate.

    `more` are further checks of sections, as `artifacts.uploads.upload_checks` of whoever may send local files.
    """
    return spec.parse(source, max_bytes=max_bytes, checks={**CHECKS, **(more or {})})


def parse_text(
    text: str, name: str = "template", *, max_bytes: int = MAX_BYTES, more: Mapping[str, Check] | None = None
) -> Template:
    """Return the checked template of YAML or JSON text; `name` stands in reports. Raises InvalidTemplate."""
    return spec.parse_text(text, name, max_bytes=max_bytes, checks={**CHECKS, **(more or {})})
