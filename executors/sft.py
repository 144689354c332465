"""The task types `sft` and `lora_sft`: supervised fine-tuning with TRL, of all weights or of a LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from executors.data.columns import training_rows
from executors.training.run import Parts, Rows, Training


class SupervisedTuning(Training):
    """Trains on texts, chats, or prompts with completions."""

    task_types: ClassVar[tuple[str, ...]] = ("sft", "lora_sft")
    continues_adapters: ClassVar[bool] = True
    # Ten times what all weights take (TRL's 2e-5), as an adapter needs: Schulman et al., LoRA Without Regret, 2025.
    lora_defaults: ClassVar[Mapping[str, Any]] = {"learning_rate": 2e-4}

    def roles(self, rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> Rows:
        """Return rows with {messages}, {prompt, completion} or {text}."""
        return training_rows(rows, data)

    def config(self) -> type[Any]:
        """Return TRL's SFTConfig."""
        from trl import SFTConfig

        return SFTConfig

    def trainer(self, parts: Parts) -> Any:
        """Return TRL's SFTTrainer."""
        from trl import SFTTrainer

        from executors.training.shaping import shape

        shaped = [
            shape(rows, chat=parts.has_template, separator=parts.separator)
            for rows in (parts.job.train_rows, parts.job.eval_rows)
        ]
        return SFTTrainer(**parts.common(*shaped))
