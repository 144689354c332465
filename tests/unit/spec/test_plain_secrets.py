"""Secrets in plain text: refused in gpuflow/v1, a warning elsewhere, and nothing that only sounds like one."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import parse
from gpuflow.spec.checking import canonical

BASE = {
    "taskType": "inference",
    "model": {"source": {"type": "huggingface", "identifier": "org/name"}},
    "data": {"type": "list", "items": ["a"]},
}
VALUE = "s3cr3t-value"

SECRET: dict[str, tuple[dict[str, Any], str]] = {
    "env token": ({"env": {"HUB_TOKEN": VALUE}}, "env.HUB_TOKEN"),
    "env key": ({"env": {"WANDB_API_KEY": VALUE}}, "env.WANDB_API_KEY"),
    "env password": ({"env": {"PGPASSWORD_PASSWORD": VALUE}}, "env.PGPASSWORD_PASSWORD"),
    "env url": ({"env": {"DB": f"postgres://me:{VALUE}@host/db"}}, "env.DB"),
    "env web token": ({"env": {"REPO": f"https://{VALUE}@host/x.git"}}, "env.REPO"),
    "notify header": (
        {"notify": [{"on": ["failed"], "url": "https://h", "headers": {"Authorization": f"Bearer {VALUE}"}}]},
        "notify[0].headers.Authorization",
    ),
    "own header": (
        {"notify": [{"on": ["failed"], "url": "https://h", "headers": {"X-Auth-Token": VALUE}}]},
        "notify[0].headers.X-Auth-Token",
    ),
    "destination header": (
        {
            "output": {
                "destination": {"type": "http", "url": "https://h", "headers": {"Authorization": f"Bearer {VALUE}"}}
            }
        },
        "output.destination.headers.Authorization",
    ),
    "checkpoint url": (
        {"checkpoint": {"load": {"type": "http", "url": f"https://me:{VALUE}@h/x.tar.gz"}}},
        "checkpoint.load.url",
    ),
}


def template(part: dict[str, Any], version: str = "gpuflow/v1") -> dict[str, Any]:
    return {"apiVersion": version, "kind": "InferenceTask", "metadata": {"name": "n"}, "spec": {**BASE, **part}}


@pytest.mark.parametrize(("part", "path"), SECRET.values(), ids=SECRET)
def test_a_secret_in_plain_text_is_refused_with_the_mend(part: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidTemplate) as refused:
        parse(template(part))

    (mistake,) = refused.value.mistakes
    assert mistake.path == f"spec.{path}"
    assert "stays readable in Redis; " in mistake.message
    assert VALUE not in str(refused.value)


@pytest.mark.parametrize("version", ["flowmesh/v1", "mloc/v1"])
@pytest.mark.parametrize(("part", "path"), SECRET.values(), ids=SECRET)
def test_templates_of_others_are_taken_with_a_warning(part: dict[str, Any], path: str, version: str) -> None:
    found = parse(template(part, version))

    (warning,) = found.warnings
    assert warning.path == f"spec.{path}"
    assert VALUE not in warning.message


@pytest.mark.parametrize(
    "part",
    [
        {"env": {"HUB_TOKEN": "${env:OTHER}"}, "secrets": ["OTHER"]},
        {"env": {"TLS_KEY": "/etc"}},
        {"env": {"SORT_KEY": "name", "USE_AUTH": "1", "KEYBOARD": VALUE, "TOKENIZERS_PARALLELISM": "false"}},
        {"env": {"REPO": "ssh://git@host/x.git", "BLOB": "abfss://container@account.dfs.core.windows.net/x"}},
        {"notify": [{"on": ["failed"], "url": "https://h", "headers": {"Authorization": "Bearer ${env:T}"}}]},
        {"notify": [{"on": ["failed"], "url": "https://h", "headers": {"X-Request-Source": VALUE}}]},
        {"checkpoint": {"load": {"type": "http", "url": "https://h/x.tar.gz?X-Amz-Signature=0123456789"}}},
        {"data": {"type": "list", "items": ["my https://me:password@host and api_key: abcdefgh"]}},
    ],
)
def test_what_only_sounds_like_a_secret_is_taken(part: dict[str, Any]) -> None:
    assert parse(template(part)).warnings == ()


def test_at_dispatch_nothing_is_refused_any_more() -> None:
    part, _ = SECRET["env token"]
    assert canonical({**BASE, **part})["env"] == {"HUB_TOKEN": VALUE}
