"""The peer of training.py: the training as one would write it with TRL by hand, without gpuflow.

Its argument is a file with one JSON object: the kind, the model, the rows and the arguments. It prints one with the
steps per second; under torchrun, rank 0 does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Train, and print the speed."""
    asked = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    config, trainer_class = (SFTConfig, SFTTrainer) if asked["kind"] == "sft" else (DPOConfig, DPOTrainer)
    on_gpu = torch.cuda.is_available()
    arguments = config(
        **asked["training"],
        report_to="none",
        disable_tqdm=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        activation_checkpointing=on_gpu,
        dataloader_pin_memory=on_gpu,
    )
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    rows = [{**row, "prompt": row["prompt"] + "\n"} for row in asked["rows"]]
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.bfloat16 if on_gpu else torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", **asked["lora"]),
    )
    trained = trainer.train()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"steps_per_second": trained.metrics["train_steps_per_second"]}), flush=True)


if __name__ == "__main__":
    main()
