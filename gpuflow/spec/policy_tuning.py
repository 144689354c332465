"""What TRL's PPO cannot do, found in a spec before anything runs. Used by `checking`, and by the executor.

It samples with what is in `FIXED`, whatever it is told, and evaluates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuflow.spec.references import is_pending
from gpuflow.spec.report import Findings, show

#: Field of `generation` -> the values that PPO has anyhow.
FIXED: Final[Mapping[str, Sequence[Any]]] = {
    "do_sample": (True,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "min_new_tokens": (0,),
    "repetition_penalty": (1,), "num_return_sequences": (1,),
}  # fmt: skip


def check_ppo(spec: Mapping[str, Any], findings: Findings) -> None:
    """Note a choice of sampling that PPO has not, and data to evaluate on."""
    generation, data = spec.get("generation"), spec.get("data")
    for name, value in generation.items() if isinstance(generation, Mapping) else ():
        is_number = isinstance(value, bool | int | float)
        if name in FIXED and is_number and not is_pending(value) and value not in FIXED[name]:
            findings.add(("generation", name), f"is {show(value)}; TRL's PPO has no such choice: leave it out")
    if isinstance(data, Mapping) and data.get("eval_split") not in (None, 0, 0.0):
        findings.add(("data", "eval_split"), "is not used by ppo, which evaluates nothing; leave it out, or use grpo")
