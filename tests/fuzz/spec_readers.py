"""Readers of templates and of what stands in them: YAML, JSON, references, the keys of merged calls, short texts."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from gpuflow import secrets, terminal
from gpuflow.artifacts.repr_digest import parse_repr_digest
from gpuflow.artifacts.store import check_name, file_url_path, open_store, shown_url
from gpuflow.errors import ArtifactError, GPUFlowError, InvalidTemplate
from gpuflow.gateway.downloads import asked_span
from gpuflow.gateway.problems import Problem
from gpuflow.merge.keys import merge_key, plain_key
from gpuflow.protocol import is_user_type, whole_text
from gpuflow.routing.accelerators import parse_accelerators
from gpuflow.routing.queue_names import queue_name
from gpuflow.routing.queue_parsing import requirement_of
from gpuflow.routing.resources import requirement_from_resources
from gpuflow.routing.session_names import session_name
from gpuflow.settings import Settings
from gpuflow.spec import canonical, parse, shard, shard_count
from gpuflow.spec import units as spec_units
from gpuflow.spec.artifact_reference import read_reference
from gpuflow.spec.env_names import problem_of
from gpuflow.spec.models_task import TaskSpec
from gpuflow.spec.pip_requirements import read_requirement
from gpuflow.spec.reading import read_text
from gpuflow.spec.references import (
    Reference,
    UnresolvedReference,
    escape,
    escape_malformed,
    find_references,
    parse_reference,
    pick,
    resolve,
    resolve_env,
)
from gpuflow.spec.template import Template
from tests.fuzz.mutation import Mutator, as_json, as_yaml, fields_of
from tests.fuzz.reader import Reader

_SETTINGS = Settings(worker_token="token-of-the-fuzzing", gateway_url="http://127.0.0.1:9")
ROOT = Path(__file__).resolve().parents[2]
_EXTRA = (
    b"apiVersion: gpuflow/v1\nspec:\n  taskType: echo\n  echo: {message: hi}\n",
    b"taskType: inference\nmodel: {source: {identifier: tiny-chat}}\ndata: {type: list, items: [a, b]}\n"
    b"inference: {temperature: 0, max_tokens: 8}\nresources: {accelerators: 'A100:1'}\n",
    b"base: &b {a: 1, c: [1, 2]}\nx: {<<: *b, d: *b}\ny: [*b, *b]\n",
)
_WORDS = (
    b"apiVersion: ", b"gpuflow/v1", b"flowmesh/v1", b"spec:", b"stages:", b"graph:", b"nodes:", b"dependsOn: ",
    b"taskType: ", b"parallel: ", b"matrix: ", b"${a.result.items[0]}", b"resources:", b"<<: *a", b"&a [", b"*a, ",
    b"- name: x\n", b"  ", b"\n  ", b"!!python/object:x", b"!<tag:", b"%YAML 1.1\n", b"? [a]\n: b\n", b"a: &x\n",
    b'"\\x', b'"\\N', b"'''", b"1_0", b".inf", b"0o17", b"+.e1", b"12:30:45", b"2001-01-01",
)  # fmt: skip


@cache
def templates() -> tuple[bytes, ...]:
    """Return the templates that ship, those of tests, and some small ones."""
    places = (*sorted(ROOT.glob("configs/pipelines/*.yaml")), *sorted(ROOT.glob("tests/data/templates/*.yaml")))
    return (*(path.read_bytes() for path in places), *_EXTRA)


@cache
def trees() -> tuple[Any, ...]:
    """Return the same as data."""
    return tuple(read_text(text.decode(), "a template of the corpus").data for text in templates())


@cache
def keys() -> tuple[str, ...]:
    names = {info.alias or name for name, info in TaskSpec.model_fields.items()}
    return (*sorted(names), *fields_of(trees()))


class YamlTemplate(Reader):
    """`gpuflow submit FILE` and everything else that reads a template from a file."""

    name = "template, YAML"
    declared = (InvalidTemplate,)
    suffix = ".yaml"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / f"template{self.suffix}"

    def made_of(self) -> Mutator:
        return Mutator(templates(), words=_WORDS, keys=keys())

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return super().make(rng)
        return as_yaml(self.mutator.tree(rng, rng.choice(trees())))

    def read(self, data: bytes) -> None:
        self.path.write_bytes(data)
        template = parse(self.path)
        again = Template.from_dict(json.loads(json.dumps(template.to_dict())))
        assert again.to_dict() == template.to_dict(), "a template changes on its way through Redis"


class JsonTemplate(YamlTemplate):
    """The same in JSON."""

    name = "template, JSON"
    suffix = ".json"

    def made_of(self) -> Mutator:
        return Mutator([as_json(tree) for tree in trees()], words=_WORDS, keys=keys())

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return self.mutator.content(rng)
        return as_json(self.mutator.tree(rng, rng.choice(trees())))


class References(Reader):
    """`${...}` in a value, resolved with the results of other stages and the environment of a child."""

    name = "references"
    declared = (UnresolvedReference,)

    _SEEDS: tuple[Any, ...] = (
        {"value": "${a.result.items[0].output}", "result": {"items": [{"output": "x"}]}, "env": {"HOME": "/h"}},
        {"value": {"p": ["${a.items}", "x ${env:HOME} y $${env:A} ${a.n}"]}, "result": {"items": [], "n": 1.5}},
        {"value": ["$${x}", "$$${a.b}", "${a.b.c.d[3][4]}"], "result": {"b": {"c": {"d": "${env:TOKEN}"}}}, "env": {}},
        {"value": float("nan"), "result": {}, "env": {}},
    )

    def made_of(self) -> Mutator:
        words = (b"${", b"}", b"${a.", b"[0]", b".items", b"${env:", b"$${", b"$$$", b"result", b"[999999999]", b"{")
        return Mutator([as_json(seed) for seed in self._SEEDS], words=words, keys=("value", "result", "env", "items"))

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.4:
            return super().make(rng)
        return as_json(self.mutator.tree(rng, rng.choice(self._SEEDS)))

    def read(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            given = {"value": text, "result": {"text": text}}
        given = given if isinstance(given, dict) else {"value": given}
        value, result, env = given.get("value"), given.get("result"), given.get("env")
        environ = {str(name): str(item) for name, item in env.items()} if isinstance(env, dict) else {}
        find_references(value)
        back = resolve_env(resolve(escape(value), _nothing), {})
        assert repr(back) == repr(value), "what is escaped comes back as it was"  # as text: NaN is equal to nothing
        escape_malformed(value)
        done = resolve(value, lambda reference: pick(result, reference))
        resolve_env(done, environ)


def _nothing(reference: Reference) -> Any:
    raise AssertionError(f"{reference} is live in what was escaped")


class MergeKeys(Reader):
    """What is done with the spec of a call before it is sent: canonical form, requirement, session, key."""

    name = "merge keys"
    declared = (GPUFlowError,)

    def made_of(self) -> Mutator:
        self.specs = _specs()
        return Mutator([as_json(spec) for spec in self.specs], words=_WORDS, keys=fields_of(self.specs))

    def make(self, rng: random.Random) -> bytes:
        if rng.randrange(10) == 0:
            return super().make(rng)
        return as_json(self.mutator.tree(rng, rng.choice(self.specs), rng.choice((1, 1, 1, 2))))

    def read(self, data: bytes) -> None:
        try:
            given = json.loads(data)
        except (ValueError, RecursionError):
            plain_key("task", data.decode("utf-8", "replace"), queue="cpu", version="1")
            return
        if not isinstance(given, dict):
            return
        spec = canonical(given)
        for requirement in requirement_from_resources(spec.get("resources") or {}, gpu_available=True):
            queue_name(requirement)
        if shard_count(spec) <= 64:
            shard(spec)
        session_name(spec, ["gpu"])
        list(secrets.secrets_in_spec(spec))
        secrets.public_spec(spec)
        turned = json.loads(json.dumps(dict(reversed(spec.items()))))
        for merge in ("auto", "always"):
            first, second = (
                merge_key({**one, "merge": merge}, owner="o", asks=[["gpu", "{}"]], version="1")
                for one in (spec, turned)
            )
            assert (first is None) == (second is None), "whether calls merge depends on the order of fields"
            if first is not None and second is not None:
                assert (first.call, first.batch) == (second.call, second.batch), "the key depends on the order"


@cache
def _specs() -> tuple[dict[str, Any], ...]:
    """Return the specs of all stages of the corpus whose calls may be merged."""
    found = [dict(stage.spec) for tree in trees() if "base" not in tree for stage in parse(tree).stages]
    return tuple(spec for spec in found if spec.get("taskType") in ("inference", "embedding", "rag", "echo"))


def _pip(text: str) -> None:
    read_requirement(text)


def _address(text: str) -> None:
    if not text.startswith("s3:"):
        open_store(text, settings=_SETTINGS)


def _accelerators(text: str) -> None:
    for requirement in parse_accelerators(text):
        name = queue_name(requirement)
        requirement_of(name)


#: Readers of one short text, and what each may raise.
_TEXTS: tuple[tuple[Any, tuple[type[Exception], ...]], ...] = (
    (spec_units.duration_seconds, (ValueError,)),
    (spec_units.memory_mib, (ValueError,)),
    (spec_units.cpu_count, (ValueError,)),
    (parse_reference, (ValueError,)),
    (_pip, (ValueError,)),
    (_accelerators, (GPUFlowError,)),
    (requirement_of, (GPUFlowError,)),
    (lambda text: requirement_from_resources({"memory": text, "cpu": text}, gpu_available=False), (GPUFlowError,)),
    (lambda text: read_reference({"$artifact": {"url": text, "sha256": "0" * 64, "bytes": 3}}), (ValueError,)),
    (lambda text: read_reference({"$artifact": {"url": "s3://b/k", "sha256": text, "bytes": 3}}), (ValueError,)),
    (parse_repr_digest, ()),
    (lambda text: asked_span({"range": text, "if-range": '"x"'}, 1000, '"x"'), (Problem,)),
    (check_name, (ArtifactError,)),
    (lambda text: _address(text), (ArtifactError,)),
    (file_url_path, (ArtifactError,)),
    (shown_url, ()),
    (problem_of, ()),
    (is_user_type, ()),
    (secrets.mask_shapes, ()),
    (lambda text: list(secrets.url_secrets(text)), ()),
    (lambda text: secrets.Redactor([text[:20], "hunter2-secret"]).text(text), ()),
    (terminal.log_value, ()),
    (terminal.log_lines, ()),
    (terminal.one_line, ()),
    (lambda text: whole_text(text).encode(), ()),
)


class Texts(Reader):
    """Readers of one text: amounts, requirements of pip, GPUs, ranges, digests, URLs, and what makes text safe."""

    name = "short texts"

    def made_of(self) -> Mutator:
        corpus = (
            b"1h30m", b"8GiB", b"500m", b"0.5", b"a.result.items[0].output", b"env:HOME", b"torch==2.13.0",
            b"tool @ https://host/tool-1.0-py3-none-any.whl#sha256=" + b"0" * 64, b"./wheels/tool-1.0.tar.gz[x]",
            b"vllm[flashinfer]>=0.9 ; python_version >= '3.11'", b"tool @ git+https://host/t.git@" + b"0" * 40,
            b"A100:1", b"H100-80G:2+", b"gpu-a100-80g-x4.team=nlp", b"a100|h100:0.5", b"cpu-8.mem-4g", b"40GB+:2",
            b"bytes=0-99", b"bytes=-5", b"sha-256=:" + b"A" * 43 + b"=:", b"http://user:pw@host:80/p?token=x#f",
            b"task-1/responses.json", b"Authorization: Bearer abcdef", b"sk-abcdefghijklmnop", b"\x1b[31mred\x1b[0m",
            b"s3://bucket/key", b"file:///tmp/x", b"acme.translate", b"LD_PRELOAD",
        )  # fmt: skip
        words = (b"[", b"]", b"::", b"@", b"://", b"GiB", b"GB", b"ms", b"e", b".", b"%5B", b";", b"==", b"~=", b"*")
        return Mutator(corpus, words=words)

    def read(self, data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape" if len(data) % 7 == 0 else "replace")
        for use, declared in _TEXTS:
            try:
                use(text)
            except declared:
                continue


__all__ = ["JsonTemplate", "MergeKeys", "References", "Texts", "YamlTemplate"]
