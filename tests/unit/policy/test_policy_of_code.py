"""What counts as code of a task, in every form: pure, and never a traceback for a spec of whatever form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.policy.code import KINDS, OF_MODELS, SETTING, allowed_kinds, code_in, kinds_of, refusal
from gpuflow.routing.offers import Offers, asked_name, code_asked, not_allowed, parts_of, with_code, without_code
from gpuflow.settings import Settings
from gpuflow.settings.model import CODE_KINDS

ALL = frozenset(KINDS)


def vllm(**fields: Any) -> dict[str, Any]:
    return {"taskType": "inference", "model": {"vllm": fields}}


def transformers(**fields: Any) -> dict[str, Any]:
    return {"taskType": "inference", "model": {"transformers": fields}}


def training(**fields: Any) -> dict[str, Any]:
    return {"taskType": "sft", "training": fields}


def test_the_setting_names_what_the_policy_knows() -> None:
    assert set(CODE_KINDS) == {*KINDS, "all", "none"}
    assert set(OF_MODELS) == set(KINDS) - {"command", "project"}


@pytest.mark.parametrize(
    ("names", "kinds"),
    [((), set()), (("none",), set()), (("all",), ALL), (("command", "plugins"), {"command", "plugins"})],
)
def test_what_the_setting_allows(names: tuple[str, ...], kinds: set[str]) -> None:
    assert allowed_kinds(names) == kinds
    assert Settings.load({"GPUFLOW_ALLOW_CODE": ",".join(names).upper()}).allow_code == names


@pytest.mark.parametrize(
    ("spec", "kind", "path"),
    [
        ({"taskType": "command", "command": {"command": "true"}}, "command", "taskType"),
        ({"taskType": "command"}, "command", "taskType"),
        *(
            ({"taskType": "command", "command": {"command": "true", name: value}}, "project", f"command.{name}")
            for name, value in [
                ("project", "."),
                ("upload", "a.py"),
                ("url", "https://h/a.tar.gz"),
                ("requirements", ["evil"]),
                ("python", "/tmp/python"),
            ]
        ),
        (
            {"taskType": "inference", "model": {"source": {"identifier": "a/b", "trust_remote_code": True}}},
            "remote-code",
            "model.source.trust_remote_code",
        ),
        ({"taskType": "sft", "data": {"url": "a/b", "trust_remote_code": True}}, "remote-code", None),
        ({"taskType": "sft", "data": {"eval_split": {"trust_remote_code": True}}}, "remote-code", None),
        ({"taskType": "ppo", "reward_model": {"trust_remote_code": True}}, "remote-code", None),
        ({"taskType": "ppo", "reward_model": {"trust_remote_code": "${env:YES}"}}, "remote-code", None),
        ({"taskType": "rag", "embedding": {"trust_remote_code": True}}, "remote-code", None),
        ({"taskType": "acme.mine", "parameters": {"loader": {"trust_remote_code": True}}}, "remote-code", None),
        (vllm(trust_remote_code=True), "remote-code", "model.vllm.trust_remote_code"),
        (vllm(trust_remote_code=1), "remote-code", None),
        (vllm(trust_remote_code="false"), "remote-code", None),
        (vllm(trust_remote_code="${env:T}"), "remote-code", None),
        (vllm(**{"trust-remote-code": True}), "remote-code", None),
        (vllm(hf_overrides={"text_config": {"trust_remote_code": True}}), "remote-code", None),
        (vllm(mm_processor_kwargs={"trust_remote_code": True}), "remote-code", None),
        (transformers(trust_remote_code=True), "remote-code", None),
        (transformers(attn_implementation="evil/kernel"), "remote-code", None),
        (transformers(attn_implementation={"text_config": "evil/kernel:f"}), "remote-code", None),
        (transformers(attn_implementation="${env:K}"), "remote-code", None),
        (transformers(use_kernels=True), "remote-code", None),
        (transformers(allow_all_kernels=True), "remote-code", "model.transformers.allow_all_kernels"),
        (training(model_init_kwargs={"allow_all_kernels": True}), "remote-code", None),
        (transformers(kernel_config={"RMSNorm": "evil/norm:N"}), "remote-code", None),
        (transformers(weights_only=False), "pickles", "model.transformers.weights_only"),
        (transformers(weights_only=0), "pickles", None),
        (transformers(weights_only=""), "pickles", None),
        (transformers(weights_only="${env:W}"), "pickles", None),
        (training(trust_remote_code=True), "remote-code", None),
        (training(model_init_kwargs={"trust_remote_code": True}), "remote-code", None),
        (training(model_init_kwargs='{"trust_remote_code": true}'), "remote-code", None),
        (training(model_init_kwargs='{"tru\\u0073t_remote_code": true}'), "remote-code", None),
        (training(model_init_kwargs='{"a": [{"trust_remote_code": true}]}'), "remote-code", None),
        (training(model_init_kwargs="${env:KWARGS}"), "plugins", None),
        (training(model_init_kwargs="[" * 100_000), "plugins", None),
        (training(model_init_kwargs={"weights_only": False}), "pickles", None),
        (training(model_init_kwargs={"attn_implementation": "evil/kernel"}), "remote-code", None),
        (training(vllm_model_impl="evil.Impl"), "plugins", None),
        ({"taskType": "lora_sft", "lora": {"megatron_core": "evil.core"}}, "plugins", "lora.megatron_core"),
        ({"taskType": "lora_sft", "lora": {"auto_mapping": {"parent_library": "evil"}}}, "plugins", None),
        ({"taskType": "inference", "inference": {"logits_processors": ["evil:P"]}}, "plugins", None),
        ({"taskType": "ppo", "generation": {"custom_generate": "evil/repo"}}, "plugins", None),
        (vllm(worker_cls="evil.Worker"), "plugins", "model.vllm.worker_cls"),
        (vllm(worker_cls="${env:W}"), "plugins", None),
        (vllm(worker_extension_cls="evil.Ext"), "plugins", None),
        (vllm(scheduler_cls="evil.Scheduler"), "plugins", None),
        (vllm(logits_processors=["evil:P"]), "plugins", None),
        (vllm(reasoning_parser_plugin="/tmp/evil.py"), "plugins", None),
        (vllm(tool_parser_plugin="/tmp/evil.py"), "plugins", None),
        (vllm(io_processor_plugin="evil"), "plugins", None),
        (vllm(structured_outputs_config={"reasoning_parser_plugin": "/tmp/evil.py"}), "plugins", None),
        (vllm(model_class_overrides={"A": "evil:M"}), "plugins", None),
        (vllm(hf_config_path="evil/config"), "plugins", None),
        (vllm(load_format="tensorizer"), "plugins", None),
        (vllm(load_format="evil"), "plugins", None),
        (vllm(load_format={"evil": 1}), "plugins", None),
        (vllm(tokenizer_mode="custom"), "plugins", None),
        (vllm(model_impl="evil"), "plugins", None),
        (vllm(distributed_executor_backend="evil.Executor"), "plugins", None),
        (vllm(kv_transfer_config={"kv_connector": "X", "kv_connector_module_path": "evil"}), "plugins", None),
        (vllm(kv_transfer_config={"kv_connector_extra_config": {"spec_module_path": "evil"}}), "plugins", None),
        (vllm(ec_transfer_config={"ec_connector_module_path": "evil"}), "plugins", None),
        (vllm(speculative_config={"method": "custom_class", "model": "evil.Proposer"}), "plugins", None),
        (vllm(spec_method="evil.Proposer"), "plugins", None),
        (vllm(compilation_config={"inductor_passes": {"p": "evil.run"}}), "plugins", None),
        (vllm(compilation_config={"backend": "evil.compile"}), "plugins", None),
        (vllm(compilation_config={"cache_dir": "/tmp/compiled"}), "plugins", None),
        (vllm(compilation_config="${env:C}"), "plugins", None),
        (vllm(log_config_file="/tmp/logging.json"), "plugins", None),
        (vllm(logging_config={"handlers": {"h": {"()": "os.system"}}}), "plugins", None),
        (vllm(WORKER_CLS="evil.Worker"), "plugins", None),
    ],
)  # fmt: skip
def test_what_is_code(spec: dict[str, Any], kind: str, path: str | None) -> None:
    found = code_in(spec)
    assert kind in {code.kind for code in found}
    if path is not None:
        assert path in {code.path for code in found}

    refused = refusal(spec, ())
    assert refused is not None and refused.setting == SETTING
    assert f"{SETTING}={','.join(kinds_of(spec))}" in refused.message
    assert refusal(spec, ALL) is None and refusal(spec, kinds_of(spec)) is None
    assert refusal(spec, ALL - {kind}) is not None


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"taskType": "echo", "echo": {"output": {"trust_remote_code": True}}},
        {"taskType": "container", "container": {"preset": "x", "request": {"worker_cls": "a"}}},
        {"taskType": "inference", "data": {"items": [{"trust_remote_code": True}], "trust_remote_code": False}},
        {"taskType": "inference", "model": {"source": {"identifier": "a/b", "trust_remote_code": False}}},
        {"taskType": "inference", "inference": {"system_prompt": '{"worker_cls": "x"}', "temperature": 0.5}},
        {"taskType": "inference", "inference": {"structured_outputs": {"json": {"properties": {"worker_cls": {}}}}}},
        {"taskType": "inference", "inference": {"chat_template": "{% if a %}{% endif %}"}},
        {"taskType": "ppo", "reward_model": {"type": "function", "identifier": "exact_match"}},
        {"taskType": "acme.mine", "parameters": {"load_format": "csv", "method": "a.b", "rows": [0] * 2_000_000}},
        {"taskType": "lora_sft", "lora": {"megatron_core": "megatron.core", "target_modules": ["q_proj"]}},
        vllm(
            worker_cls="auto", worker_extension_cls="", scheduler_cls=None, logits_processors=[], load_format="auto",
            tokenizer_mode="auto", model_impl="auto", distributed_executor_backend="mp", trust_remote_code=False,
            compilation_config={"mode": 3, "cudagraph_mode": "FULL", "backend": "inductor", "pass_config": {"a": True}},
            speculative_config={"method": "ngram", "num_speculative_tokens": 3}, hf_overrides={"rope_theta": 1e6},
        ),
        transformers(attn_implementation="sdpa", use_safetensors=False, weights_only=True, dtype="bfloat16"),
        training(
            model_init_kwargs={"dtype": "bfloat16"}, fsdp_config={"transformer_layer_cls_to_wrap": ["Layer"]},
            gradient_checkpointing_kwargs='{"use_reentrant": false}', optim="adamw_torch", deepspeed="/etc/ds.json",
        ),
    ],
)  # fmt: skip
def test_what_is_no_code(spec: dict[str, Any]) -> None:
    assert code_in(spec) == []
    assert refusal(spec, ()) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
SECTIONS = st.sampled_from(["taskType", "command", "model", "training", "lora", "data", "parameters", "merge_children"])


@given(st.dictionaries(SECTIONS, JSON, max_size=6))
def test_a_spec_of_whatever_form_is_judged(spec: dict[str, Any]) -> None:
    refused = refusal(spec, ())
    assert (refused is None) == (not kinds_of(spec))


def test_a_spec_that_is_nested_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"a": deep}
    assert kinds_of(vllm(hf_overrides=deep)) == ("plugins",)


# -- names that workers offer ---------------------------------------------------------------------------------------


def test_the_name_of_what_is_asked_for_says_its_code() -> None:
    assert asked_name({"taskType": "inference", "engine": "vllm"}) == "inference:vllm"
    both = {**vllm(worker_cls="a.B", trust_remote_code=True), "environment": "fast"}
    assert asked_name(both) == "inference@fast+plugins+remote-code"
    assert asked_name({"taskType": "command", "command": {"command": "x"}}) == "command"
    assert asked_name({"taskType": "command", "command": {"command": "x", "project": "."}}) == "command+project"
    assert parts_of("inference@fast+plugins") == ("inference", None, "fast")
    assert without_code("inference:vllm+plugins") == "inference:vllm"
    assert code_asked("command+project") == ("command", "project")


BASE = Offers(names=frozenset({"echo", "command", "container", "inference", "inference:vllm"}))


def test_a_closed_worker_offers_no_code() -> None:
    found = with_code(BASE, ())
    assert found.names == {"echo", "container", "inference", "inference:vllm"}
    assert "GPUFLOW_ALLOW_CODE=command on a worker would" in found.lacking["command"].why


def test_an_open_worker_offers_every_union() -> None:
    found = with_code(BASE, ["command", "plugins", "remote-code"])
    assert {name for name in found.names if name.startswith("inference")} == {
        base + end
        for base in ("inference", "inference:vllm")
        for end in ("", "+plugins", "+remote-code", "+plugins+remote-code")
    }
    assert {"echo", "container", "command"} <= found.names and "command+project" not in found.names
    assert "command+project" in with_code(BASE, ALL).names
    for spec in (vllm(worker_cls="a.B", trust_remote_code=True, x={"weights_only": False}), transformers()):
        assert asked_name(spec) in with_code(BASE, ALL).names


def test_what_a_worker_lacks_is_said_with_the_setting() -> None:
    assert not_allowed("inference", ()) == ""
    assert not_allowed("command+project", ["plugins"]) == (
        "allows tasks no command and no project; GPUFLOW_ALLOW_CODE=command,plugins,project on a worker would"
    )
    assert not_allowed("inference+plugins", ["plugins"]) == ""
