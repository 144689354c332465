"""The peer of warm_inference.py: vLLM's engine driven directly, in its own environment, without gpuflow's worker.

Reads one JSON object with the engine's arguments, then one with prompts and sampling for each round, and answers each
round with one line: seconds, tokens, and the seconds to the first token of each prompt.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


async def ask(engine: Any, prompt: str, sampling: dict[str, Any], name: str) -> tuple[int, float]:
    """Return the output tokens of a prompt, and the seconds to the first of them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    started, first, tokens = time.perf_counter(), 0.0, 0
    params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(prompt, params, name):
        first = first or time.perf_counter() - started
        tokens += sum(len(one.token_ids) for one in output.outputs)
    return tokens, first


async def run(engine: Any, work: dict[str, Any], name: str) -> dict[str, Any]:
    """Answer one round, so many prompts at once as there are callers."""
    gate = asyncio.Semaphore(work["callers"])
    tokenizer = engine.get_tokenizer()

    async def one(number: int, content: str) -> tuple[int, float]:
        async with gate:
            chat = [{"role": "user", "content": content}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            return await ask(engine, prompt, work["sampling"], f"{name}-{number}")

    started = time.perf_counter()
    answers = await asyncio.gather(*(one(number, content) for number, content in enumerate(work["prompts"])))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": sum(count for count, _ in answers), "first": [first for _, first in answers]}


async def serve(told: Any, out: Any) -> None:
    """Load the model, then answer rounds until the end of the input."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**json.loads(told.readline())))
    print(json.dumps({"ready": True}), file=out, flush=True)
    rounds = 0
    while line := await asyncio.to_thread(told.readline):
        rounds += 1
        print(json.dumps(await run(engine, json.loads(line), str(rounds))), file=out, flush=True)


def main() -> None:
    """Serve; what libraries print goes to the log."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name, value in (
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ):
        os.environ.setdefault(name, value)
    asyncio.run(serve(sys.stdin, out))


if __name__ == "__main__":
    main()
