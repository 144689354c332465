"""What a training through gpuflow costs: steps per second of SFT and DPO, next to the same TRL script run by hand.

    python benchmarks/training.py [--quick] [--json]

Rows (a ratio above 1 means that ours is better):

* steps_per_second       supervised fine-tuning (LoRA): steps per second from the start of the training to its end, as
                         TRL measures it (train_steps_per_second), of a task on a worker and of a plain script
* steps_per_second_dpo   the same for DPO
* steps_per_second_2_ranks   the first in two processes (DDP): `nproc_per_node: 2` of a task, torchrun of the script

Both sides train the same rows with the same arguments on the same model, in turns, each in a process of its own. A task
has its record, lease, shim, events of every step and the callbacks of checkpoints on top. The model is a random one of
the Llama family that is made here, larger in a full run, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

SCRIPT = Path(__file__).with_name("training_direct.py")
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured: turns, steps a training, and the width and depth of the model."""

    turns: int
    steps: int
    hidden: int
    layers: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: what is trained, in how many processes, and who the peer is."""

    metric: str
    kind: str
    ranks: int
    peer_name: str


QUICK = Size(turns=1, steps=10, hidden=128, layers=2)
FULL = Size(turns=5, steps=24, hidden=384, layers=6)
CASES = (
    Case(metric="steps_per_second", kind="sft", ranks=1, peer_name="TRL's SFTTrainer in a script"),
    Case(metric="steps_per_second_dpo", kind="dpo", ranks=1, peer_name="TRL's DPOTrainer in a script"),
    Case(metric="steps_per_second_2_ranks", kind="sft", ranks=2, peer_name="the same script by torchrun"),
)


def rows_of(kind: str) -> list[dict[str, str]]:
    """Return 64 rows of one length for a kind of training."""
    rows = []
    for number in range(64):
        question, answer = f"Where is the car with the number {number:02}?", f"The car {number:02} is over there. " * 8
        pair = {"prompt": question, "completion": answer}
        rows.append(pair if kind == "sft" else {"prompt": question, "chosen": answer, "rejected": "Gone. " * 20})
    return rows


def arguments_of(kind: str, size: Size) -> dict[str, Any]:
    """Return the section `training`, which is also what the script gives to TRL."""
    return {
        "max_steps": size.steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-4,
        "max_length": 128,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 1,
        **({} if kind == "sft" else {"beta": 0.1}),
    }


def make_model(folder: Path, size: Size) -> None:
    """Write a random model and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    alphabet = ["<|end|>", "<|pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=size.hidden,
            intermediate_size=size.hidden * 3,
            num_hidden_layers=size.layers,
            num_attention_heads=max(4, size.hidden // 64),
            num_key_value_heads=max(4, size.hidden // 64),
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def ours(app: Any, case: Case, model: Path, size: Size) -> float:
    """Train through gpuflow; return the steps per second."""
    from gpuflow.client import submit

    kind = case.kind
    data = {"type": "list", "items": rows_of(kind)}
    spec = {
        "taskType": "lora_sft" if kind == "sft" else "dpo",
        "model": {"source": {"type": "local", "identifier": str(model)}},
        "data": data if kind == "sft" else {"type": "preferences", "preferences": data["items"]},
        "training": {**arguments_of(kind, size), "nproc_per_node": case.ranks, "save_model": False},
        "lora": LORA,
        "resources": {"hardware": {"gpu": {"count": 0}}},
    }
    result = submit(spec, app=app).get(timeout=3600)
    return float(result["metrics"]["train_steps_per_second"])


def peer(case: Case, model: Path, size: Size, folder: Path) -> float:
    """Train by the script; return the steps per second."""
    asked = {
        "kind": case.kind,
        "model": str(model),
        "rows": rows_of(case.kind),
        "lora": LORA,
        "training": {**arguments_of(case.kind, size), "output_dir": str(folder / "direct")},
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}"]
    environment = dict(os.environ)
    if case.ranks > 1:  # as a task has it: torchrun's own default is one thread a process, however many cores there are
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // case.ranks))
    with (folder / "direct.log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, *(launcher if case.ranks > 1 else []), str(SCRIPT), str(folder / "asked.json")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            check=True,
        )
    return float(json.loads(done.stdout.splitlines()[-1])["steps_per_second"])


def measure(size: Size, folder: Path) -> list[dict[str, Any]]:
    """Run everything and return the rows."""
    harness.progress("making the model")
    model = folder / "model"
    make_model(model, size)
    server, url = harness.start_broker(folder / "broker")
    os.environ["REDIS_URL"] = url
    from gpuflow import app

    worker = harness.start_worker("gpuflow", url, folder, "--name", "bench")
    rates: dict[tuple[str, str], list[float]] = {}
    try:
        harness.ready(app)
        for turn in range(size.turns):
            for case in CASES:
                harness.progress(f"turn {turn + 1} of {size.turns}: {case.metric}")
                both = [
                    ("ours", lambda case=case: ours(app, case, model, size)),
                    ("peer", lambda case=case: peer(case, model, size, folder)),
                ]
                for side, train in both if turn % 2 == 0 else reversed(both):
                    rates.setdefault((case.metric, side), []).append(train())
    finally:
        harness.stop([worker])
        server.stop()
    return [
        harness.row(
            case.metric,
            statistics.median(rates[case.metric, "ours"]),
            statistics.median(rates[case.metric, "peer"]),
            "steps/s",
            more_is_better=True,
            peer_name=case.peer_name,
        )
        for case in CASES
    ]


def main() -> None:
    """Measure and print."""
    given = harness.options(__doc__)
    with tempfile.TemporaryDirectory(prefix="gpuflow-bench-", ignore_cleanup_errors=True) as folder:
        rows = measure(QUICK if given.quick else FULL, Path(folder))
    harness.show("training", rows, as_json=given.json)


if __name__ == "__main__":
    main()
