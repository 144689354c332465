"""Which variables a task may not set: those that change how programs start, where they find code, or whom they trust.

A template is work, not a shell: with LD_PRELOAD or PYTHONPATH it would run code before the executor does, with
PIP_INDEX_URL or a proxy it would choose whose code and data come in. Refused in every form of a template and, for specs
that come straight from the broker, by the worker. What the operator sets on the worker is not affected.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Final

#: Shell patterns, matched without regard to case.
REFUSED: Final = (
    # the dynamic linker and the C library
    *("LD_*", "DYLD_*", "GCONV_PATH", "LOCPATH", "NLSPATH", "HOSTALIASES", "LOCALDOMAIN", "RES_OPTIONS", "MALLOC_*"),
    *("GLIBC_TUNABLES", "OPENSSL_*", "TZDIR"),
    # shells and where programs are
    *("PATH", "HOME", "SHELL", "ENV", "BASH_*", "SHELLOPTS", "BASHOPTS", "PS4", "IFS", "CDPATH", "TMPDIR", "XDG_*"),
    # interpreters
    *("PYTHON*", "NODE_*", "PERL*", "RUBY*", "JAVA_*", "_JAVA_*", "JDK_JAVA_*", "CLASSPATH", "LUA_*"),
    *("MPLBACKEND", "MPLCONFIGDIR", "MATPLOTLIBRC", "IPYTHONDIR", "JUPYTER_*"),
    # tools that run or fetch code
    *("PIP_*", "UV_*", "CONDA_*", "VIRTUAL_ENV", "GIT_*", "SSH_*", "EDITOR", "PAGER", "BROWSER"),
    # where a program sends its traces, and with which of the operator's tokens
    *("OTEL_*",),
    # compiled code that is loaded from caches and plugins
    *("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "CUDA_INJECTION*_PATH"),
    *("CC", "CXX", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH", "LOCAL_KERNELS", "NUMBA_CACHE_DIR"),
    *("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    *("NVIDIA_*", "NCCL_*_PLUGIN", "NCCL_*_FILE", "VLLM_PLUGINS", "OPENBLAS_*", "OMP_TOOL*", "OCL_ICD_*"),
    *("TRITON_HOME", "TRITON_*_DIR", "TRITON_*_PATH", "FLASHINFER_*", "TVM_*", "DS_BUILD_*", "KERNELS_CACHE"),
    *("VLLM_*_PATH", "VLLM_*_ROOT", "VLLM_*_DIR", "VLLM_*_FOLDER", "VLLM_*_CACHE", "VK_ICD_FILENAMES", "VK_LAYER_PATH"),
    *("OMPI_*", "PMIX_*", "PRTE_*", "UCX_MODULE_DIR", "FI_PROVIDER_PATH", "RAY_ADDRESS", "ACCELERATE_CONFIG_FILE"),
    # compilers that Triton and PyTorch call
    *("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "*_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH"),
    *("GCC_*", "NVCC_*", "CUDACXX", "CUDA_HOME", "CUDA_PATH"),
    # files and folders that libraries write, wherever they are
    *("TORCH_LOGS_OUT", "TORCH_TRACE", "TORCH_COMPILE_DEBUG*", "TORCH_HOME", "TORCHELASTIC_ERROR_FILE"),
    *("TORCH_NCCL_DEBUG_INFO_*", "*_LOGDEST_DBG", "WANDB_DIR", "WANDB_*_DIR", "TENSORBOARD_LOGGING_DIR"),
    # whom downloads reach and trust, and where they are kept
    *("*_PROXY", "SSL_*", "REQUESTS_CA_BUNDLE", "CURL_*", "AWS_ENDPOINT_URL*", "AWS_CONFIG_FILE", "NETRC"),
    *("AWS_SHARED_CREDENTIALS_FILE", "AWS_PROFILE", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_ASSETS_CACHE"),
    *("HF_MODULES_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN_PATH", "HF_DATASETS_TRUST_REMOTE_CODE", "TRANSFORMERS_CACHE"),
    *(
        "HF_XET_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HUGGINGFACE_ASSETS_CACHE",
        "DOCKER_HOST",
        "DOCKER_CONFIG",
        "CONTAINER_HOST",
    ),
    # gpuflow and what it stands on
    *("GPUFLOW_*", "CELERY_*", "C_FORCE_ROOT", "REDIS_*", "FLOWER_*", "WORKER_ID", "WORKER_TAGS"),
)


def problem_of(name: str) -> str | None:
    """Return why a task may not set the variable `name`, with what to do instead; None where it may."""
    if not name or "=" in name or "\0" in name:  # what follows would be part of the value, for docker among others
        return f"{name[:60]!r} is no name of an environment variable; use letters, digits and _"
    if not any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in REFUSED):
        return None
    return (
        f"{name} cannot be set by a task: it changes how programs start, find code or reach servers; "
        "set it in the environment of the worker"
    )


def first_problem(names: Iterable[str]) -> str | None:
    """Return the problem of the first name that has one."""
    return next((problem for problem in map(problem_of, names) if problem), None)
