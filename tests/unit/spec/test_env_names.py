"""Variables that no task may set, in every form in which a template can ask for one, and those that it may."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import parse
from gpuflow.spec.checking import canonical
from gpuflow.spec.env_names import first_problem, problem_of
from gpuflow.spec.references import pick

REFUSED = [
    *(
        "LD_PRELOAD",
        "LD_AUDIT",
        "LD_LIBRARY_PATH",
        "ld_preload",
        "DYLD_INSERT_LIBRARIES",
        "PYTHONPATH",
        "PYTHONSTARTUP",
    ),
    *("PYTHONHOME", "PATH", "HOME", "BASH_ENV", "ENV", "GPUFLOW_EXECUTORS", "GPUFLOW_CACHE_DIR", "CELERY_BROKER_URL"),
    *(
        "REDIS_URL",
        "REDIS_PASSWORD",
        "HF_ENDPOINT",
        "HTTPS_PROXY",
        "https_proxy",
        "no_proxy",
        "PIP_INDEX_URL",
        "UV_INDEX",
    ),
    *("GIT_SSH_COMMAND", "NODE_OPTIONS", "PERL5OPT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "VLLM_PLUGINS"),
    *("CUDA_INJECTION64_PATH", "TORCH_EXTENSIONS_DIR", "CC", "NUMBA_CACHE_DIR", "LOCAL_KERNELS"),
    *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_HEADERS"),
    *("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "VLLM_ALLOW_INSECURE_SERIALIZATION"),
    # a library that is loaded, a module that is imported, a factory of handlers that is called
    *("OPENSSL_CONF", "OPENSSL_MODULES", "MPLBACKEND", "MATPLOTLIBRC", "VLLM_LOGGING_CONFIG_PATH"),
    *("TRITON_HOME", "TRITON_OVERRIDE_DIR", "FLASHINFER_WORKSPACE_BASE", "VLLM_CACHE_ROOT", "UCX_MODULE_DIR"),
    *(
        "OMP_TOOL_LIBRARIES",
        "CUDA_HOME",
        "CFLAGS",
        "NVCC_PREPEND_FLAGS",
        "C_INCLUDE_PATH",
        "GLIBC_TUNABLES",
        "OMPI_MCA_mca_component_path",
        "RAY_ADDRESS",
    ),
    # files that are written where they say
    *("TORCH_LOGS_OUT", "TORCH_TRACE", "TORCHELASTIC_ERROR_FILE", "NCCL_DEBUG_FILE", "CUBLAS_LOGDEST_DBG", "WANDB_DIR"),
    *("TENSORBOARD_LOGGING_DIR", "HUGGINGFACE_HUB_CACHE", "DOCKER_HOST"),
]
TAKEN = [
    *("MODE", "WANDB_PROJECT", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "NCCL_DEBUG"),
    *("VLLM_LOGGING_LEVEL", "KEY", "TRACEPARENT", "TORCH_LOGS", "WANDB_MODE"),
    *("MODEL_DIR", "DATA_FILE", "MLFLOW_TRACKING_URI", "VLLM_USE_V1", "DS_NAME"),
]
ECHO = {"taskType": "echo", "resources": {"accelerators": "cpu"}}


def template(spec: dict[str, Any], version: str = "gpuflow/v1") -> dict[str, Any]:
    return {"apiVersion": version, "kind": "Task", "metadata": {"name": "n"}, "spec": spec}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("version", ["gpuflow/v1", "flowmesh/v1", "mloc/v1"])
@pytest.mark.parametrize("value", ["/", "/no/such/path"])
def test_a_variable_that_changes_how_programs_start_is_refused(name: str, version: str, value: str) -> None:
    with pytest.raises(InvalidTemplate, match=name) as refused:
        parse(template({**ECHO, "env": {name: value}}, version))
    assert [mistake.path.rpartition(".")[0] for mistake in refused.value.mistakes] == ["spec.env"]


@pytest.mark.parametrize(
    "spec",
    [
        {**ECHO, "stages": [{"name": "a", "spec": {"env": {"PYTHONPATH": "/x"}}}]},
        {**ECHO, "env": {"PYTHONPATH": "/x"}, "stages": [{"name": "a", "spec": {}}]},
        {**ECHO, "graph": {"nodes": [{"name": "a", "spec": {**ECHO, "env": {"PYTHONPATH": "${env:HERE}"}}}]}},
        {**ECHO, "stages": [{"name": "a", "spec": {}, "matrix": {"env.PYTHONPATH": ["/x"]}}]},
        {**ECHO, "stages": [{"name": "a", "spec": {}, "matrix": {"env": [{"PYTHONPATH": "/x"}]}}]},
        {**ECHO, "env": {"MODE": "1"}, "stages": [{"name": "a", "spec": {"env": {"PYTHONPATH": "/x"}}}]},
        {**ECHO, "env": {"MODE": "1"}, "stages": [{"name": "a", "spec": {}, "matrix": {"env.pythonPath": ["/x"]}}]},
        {**ECHO, "env": {"PYTHONPATH": None}, "stages": [{"name": "a", "spec": {"env": {"PYTHONPATH": "/x"}}}]},
    ],
    ids=[
        *("stage", "base", "graph", "matrix of a name", "matrix of env", "stage over base", "matrix over base"),
        "base and stage",
    ],
)
def test_in_every_form(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidTemplate, match=r"(?i)PYTHONPATH cannot be set by a task"):
        parse(template(spec))


@pytest.mark.parametrize(
    "stage",
    [
        {"spec": {"env": "${a.result.output}"}},
        {"spec": {}, "matrix": {"env": ["${a.result.output}"]}},
    ],
    ids=["env", "a value of a matrix"],
)
def test_what_a_stage_gave_is_judged_when_it_is_there(stage: dict[str, Any]) -> None:
    """The names may come from a stage's result: of them nothing is known when the template is read."""
    first = {"name": "a", "spec": {"echo": {"output": 1}}}
    made = {"output": {"LD_PRELOAD": "/x"}}
    parsed = parse(template({**ECHO, "stages": [first, {"name": "b", "dependsOn": ["a"], **stage}]}))

    with pytest.raises(InvalidTemplate, match="LD_PRELOAD cannot be set by a task"):
        parsed.stages[1].tasks(lambda reference: pick(made, reference))


@pytest.mark.parametrize("name", ["A=B", "A\0B", ""])
def test_what_is_no_name_is_refused_by_the_worker_too(name: str) -> None:
    assert "is no name of an environment variable" in (first_problem([name]) or "")


@pytest.mark.parametrize("name", ["${a.result.output}", "PYTHON${a.result.output}", "${env:NAME}", "A B", ""])
def test_a_name_is_not_put_together(name: str) -> None:
    first = {"name": "a", "spec": {"echo": {"output": 1}}}
    with pytest.raises(InvalidTemplate, match="is no name of an environment variable"):
        parse(template({**ECHO, "stages": [first, {"name": "b", "spec": {"env": {name: "x"}}}]}))


def test_at_dispatch_too() -> None:
    with pytest.raises(InvalidTemplate, match="LD_PRELOAD"):
        canonical({**ECHO, "env": {"LD_PRELOAD": "/x"}})


def test_others_are_taken() -> None:
    assert first_problem(TAKEN) is None
    assert parse(template({**ECHO, "env": dict.fromkeys(TAKEN, "1")})).warnings == ()
    assert problem_of("PYTHONPATH") == first_problem(["MODE", "PYTHONPATH"])
