"""The engine of a session on vLLM: AsyncLLM, which mixes the prompts of all requests from step to step by itself.

The engine proper is another process (vLLM's engine core). When that dies, every open request fails with EngineDied, and
so does the session. Imported only where vLLM is.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from executors.base import ExecutorError, bad_input
from executors.modeling.libraries import prepare_libraries
from executors.modeling.location import Location
from executors.sessions.adapters import Adapter, adapters_of, rank
from executors.sessions.core_log import not_started, overheard
from executors.sessions.engine import EngineDied, Loaded, SessionEngine
from executors.sessions.lines import Open
from executors.sessions.memory import total_mib
from executors.sessions.sides import Sides
from executors.sessions.transformers_loading import locate_base, revision_of
from executors.sessions.vllm_arguments import engine_arguments, lora_arguments, memory_arguments
from gpuflow.importing import loading
from gpuflow.protocol import Emitter, Request

#: What a CPU keeps for the KV cache where nobody says, in GiB.
_CPU_CACHE_GIB = "1"


class VllmEngine(SessionEngine):
    """One AsyncLLM."""

    name = "vllm"

    def __init__(self, task_type: str) -> None:
        self._task_type = task_type
        self._llm: Any = None
        self._open = 0
        self._max_requests = 1
        self._adapters: dict[str, int] = {}
        self._naming = threading.Lock()
        self._sides: Sides | None = None

    def load(self, opening: Open, emitter: Emitter) -> Loaded:
        """Start vLLM's engine with the model of the opening."""
        prepare_libraries()
        # Threads run already: a forked engine core could inherit a lock that nobody releases.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        emitter.status("loading", "starting vLLM")
        with loading():
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

        if current_platform.is_cpu():
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
            # By default every engine of the machine would bind itself to the same cores.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        location = locate_base(opening, emitter)
        arguments = self._arguments(opening, location, AsyncEngineArgs.__dataclass_fields__)
        emitter.status("loading", "loading the model")
        try:
            with overheard() as heard:
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (TypeError, ValueError) as error:
            raise bad_input(f"vLLM refuses the model or an argument of model.vllm: {error}") from error
        except RuntimeError as error:
            raise not_started(error, heard.error()) from error
        self._work = self._make_work(opening, location)
        if current_platform.is_cpu() and arguments.get("enable_lora"):
            self._sides = Sides()
        config = self._llm.vllm_config
        self._max_requests = int(config.scheduler_config.max_num_seqs)
        return Loaded(
            model=location.name,
            revision=revision_of(config.model_config.hf_config, location),
            max_requests=self._max_requests,
        )

    def _arguments(self, opening: Open, location: Location, known: Mapping[str, Any]) -> dict[str, Any]:
        from executors.modeling.precision import inference_options

        arguments = engine_arguments((opening.spec.get("model") or {}).get("vllm"), opening.gpus, known)
        asked = Request(
            task_id="session",
            task_type=opening.task_type,
            spec=opening.spec,
            output_dir="",
            checkpoint_path=opening.checkpoint_path,
        )
        adapted = bool(opening.spec.get("adapted") or adapters_of(asked))
        arguments |= lora_arguments(arguments, adapted=adapted)
        arguments |= memory_arguments(arguments, opening.share_mib, _total_mib(opening))
        options = dict(location.options)
        if options.pop("gguf_file", None):
            raise bad_input("vLLM does not read model.source.gguf_file; use engine: transformers")
        subfolder = options.pop("subfolder", None)
        if subfolder and not os.path.isdir(location.place):  # noqa: PTH112  (a hub id is no path)
            raise bad_input("vLLM reads no subfolder of a model of the hub; use engine: transformers")
        suggested = inference_options(location).get("dtype")
        own = {
            "model": f"{location.place}/{subfolder}" if subfolder else location.place,
            "served_model_name": location.name,
            **options,
            **({"dtype": suggested} if suggested else {}),
        }
        return {**own, **self._of_task(opening, location), **arguments}

    def _of_task(self, opening: Open, location: Location) -> dict[str, Any]:
        if opening.task_type != "embedding":
            return {}
        from executors.sessions.vllm_vectors import pooling_arguments

        return pooling_arguments(location)

    def _make_work(self, opening: Open, location: Location) -> Any:
        if opening.task_type == "embedding":
            from executors.sessions.vllm_vectors import Vectors

            return Vectors(self._llm, location, self)
        from executors.sessions.vllm_answers import Answers

        return Answers(self._llm, location, self)

    @property
    def running(self) -> int:
        """Requests that vLLM has; of more than it works on at once, it keeps the rest waiting."""
        return min(self._open, self._max_requests)

    @property
    def max_requests(self) -> int:
        """Prompts that the engine works on at once."""
        return self._max_requests

    def check(self) -> None:
        """Raise EngineDied if vLLM's engine core is gone."""
        if self._llm is not None and self._llm.errored:
            raise EngineDied("vLLM's engine process has ended; the log has why")

    def close(self) -> None:
        """Stop vLLM's processes."""
        if self._llm is not None:
            self._llm.shutdown(timeout=2)

    async def run(self, request: Request, emitter: Emitter) -> dict[str, Any]:
        """Answer a request; its prompts go into vLLM's running batch."""
        self.check()
        self._open += 1
        try:
            asked = await asyncio.to_thread(self._work.read, request, emitter)
            async with nullcontext() if self._sides is None else self._sides.on(asked.lora is not None):
                result: dict[str, Any] = await self._work.run(asked)
        except Exception as error:
            raise self._known(error) from error
        finally:
            self._open -= 1
        return result

    def _known(self, error: Exception) -> Exception:
        """Return the failure in our own words where vLLM's are not of a kind that `failures` knows."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if isinstance(error, ExecutorError):
            return error
        if isinstance(error, EngineDeadError) or self._llm.errored:
            return EngineDied("vLLM's engine process has ended; the log has why")
        cause = error.__cause__ if isinstance(error, EngineGenerateError) else error
        if isinstance(cause, VLLMClientError | ValueError):
            return bad_input(str(cause))
        if isinstance(error, EngineGenerateError):
            return ExecutorError("EngineError", f"vLLM failed on this request: {cause}", retryable=True)
        return error

    def lora_request(self, adapters: tuple[Adapter, ...]) -> Any:
        """Return vLLM's request for an adapter, its number the same as long as its files are. Raises BadInput."""
        if not adapters:
            return None
        if len(adapters) > 1 or adapters[0].weight != 1:
            raise bad_input(
                "vLLM takes one adapter per request, with weight 1; merge them first, or use engine: transformers"
            )
        config = self._llm.vllm_config.lora_config
        if config is None:
            raise bad_input("this session was opened without adapters; set model.vllm.enable_lora: true")
        (adapter,) = adapters
        if rank(adapter) > config.max_lora_rank:
            raise bad_input(
                f"the adapter has rank {rank(adapter)}, but vLLM was loaded with room for {config.max_lora_rank}; set "
                "model.vllm.max_lora_rank (at most 512), or use engine: transformers"
            )
        from vllm.lora.request import LoRARequest

        with self._naming:  # requests are read in several threads
            number = self._adapters.setdefault(adapter.digest, len(self._adapters) + 1)
        return LoRARequest(lora_name=adapter.digest, lora_int_id=number, lora_path=str(adapter.path))


def _total_mib(opening: Open) -> int | None:
    """The memory of each GPU of the opening, in MiB; asked for only where a share of it is all that may be used."""
    if opening.share_mib is None or not opening.gpus:
        return None
    from vllm.platforms import current_platform

    return total_mib(opening.gpus) or int(current_platform.get_device_total_memory()) >> 20
