"""The peer of warm_inference.py: an engine driven directly, in its own environment, without gpuflow's worker.

Reads one JSON object with the name of the engine, the model and the engine's arguments, then one with prompts and
sampling for each round, and answers each round with one line: seconds, tokens, and the seconds to the first token of
each prompt.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


class Vllm:
    """AsyncLLM, one generation for each prompt, so many at once as there are callers."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments, model=model, disable_log_stats=True)  # type: ignore[arg-type]
        )
        self._rounds = 0

    async def _ask(self, prompt: str, sampling: dict[str, Any], name: str) -> tuple[int, float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        started, first, tokens = time.perf_counter(), 0.0, 0
        params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
        async for output in self._engine.generate(prompt, params, name):
            first = first or time.perf_counter() - started
            tokens += sum(len(one.token_ids) for one in output.outputs)
        return tokens, first

    async def answer(self, work: dict[str, Any]) -> list[tuple[int, float]]:
        """Return tokens and seconds to the first of them for each prompt."""
        gate = asyncio.Semaphore(work["callers"])
        tokenizer = self._engine.get_tokenizer()
        self._rounds += 1

        async def one(number: int, content: str) -> tuple[int, float]:
            async with gate:
                return await self._ask(chat(tokenizer, content), work["sampling"], f"{self._rounds}-{number}")

        return await asyncio.gather(*(one(number, content) for number, content in enumerate(work["prompts"])))


class Transformers:
    """`generate`, so many prompts in a batch as there are callers."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(model, **arguments).eval()

    async def answer(self, work: dict[str, Any]) -> list[tuple[int, float]]:
        """Return tokens and seconds to the first of them for each prompt."""
        texts = [chat(self._tokenizer, content) for content in work["prompts"]]
        size = work["callers"]
        batches = [texts[start : start + size] for start in range(0, len(texts), size)]
        return [one for batch in batches for one in self._batch(batch, work["sampling"]["max_tokens"])]

    def _batch(self, texts: list[str], tokens: int) -> list[tuple[int, float]]:
        import torch

        started, seen = time.perf_counter(), []

        def watch(ids: Any, scores: Any, **_: Any) -> Any:
            seen.append(time.perf_counter() - started)
            return torch.zeros(len(texts), dtype=torch.bool)

        encoded = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            made = self._model.generate(
                **encoded,
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                stopping_criteria=[watch],
                pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id,
            )
        new = made.shape[1] - encoded["input_ids"].shape[1]
        return [(new, seen[0])] * len(texts)


def chat(tokenizer: Any, content: str) -> str:
    """Return the prompt of a user's message."""
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return text


async def serve(told: Any, out: Any) -> None:
    """Load the model, then answer rounds until the end of the input."""
    opening = json.loads(told.readline())
    make: type[Vllm | Transformers] = {"vllm": Vllm, "transformers": Transformers}[opening["engine"]]
    engine = make(opening["model"], opening["arguments"])
    print(json.dumps({"ready": True}), file=out, flush=True)
    while line := await asyncio.to_thread(told.readline):
        started = time.perf_counter()
        answers = await engine.answer(json.loads(line))
        found = {
            "seconds": time.perf_counter() - started,
            "tokens": sum(count for count, _ in answers),
            "first": [first for _, first in answers],
        }
        print(json.dumps(found), file=out, flush=True)


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
