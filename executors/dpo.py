"""The task type `dpo`: direct preference optimisation with TRL, of all weights or (section `lora`) of an adapter."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from executors.data.columns import preference_rows
from executors.training.run import Parts, Rows, Training
from gpuflow.importing import loading

if TYPE_CHECKING:
    from executors.training.lengths import Fit, Tell


class PreferenceTuning(Training):
    """Trains on pairs of answers of which one is preferred."""

    task_types: ClassVar[tuple[str, ...]] = ("dpo",)
    continues_adapters: ClassVar[bool] = True
    bare: ClassVar[str] = "chosen"

    def roles(self, rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> Rows:
        """Return rows with {prompt, chosen, rejected} or {chosen, rejected}."""
        return preference_rows(rows, data)

    def fit(self, rows: Rows, tokenizer: Any, arguments: Any, *, separator: str | None, tell: Tell) -> Fit:
        """Return how rows fit into `training.max_length`."""
        from executors.training.lengths import preferences
        from executors.training.shaping import shape_preferences

        shaped = shape_preferences(rows, chat=bool(tokenizer.chat_template), separator=separator)
        return preferences(shaped, tokenizer, arguments, tell)

    def config(self) -> type[Any]:
        """Return TRL's DPOConfig."""
        with loading():
            from trl import DPOConfig

        return DPOConfig

    def trainer(self, parts: Parts) -> Any:
        """Return TRL's DPOTrainer; the reference of a full training is a copy of the model as it is now."""
        with loading():
            from trl import DPOTrainer

        from executors.training.shaping import shape_preferences

        shaped = [
            shape_preferences(rows, chat=parts.has_template, separator=parts.separator)
            for rows in (parts.job.train_rows, parts.job.eval_rows)
        ]
        # With a new adapter, the model without it is the reference; with one that is trained on, TRL's copy of it. Of
        # a whole model TRL would load one from the hub again, and so without the adapters that were merged into this.
        reference = None if parts.job.is_lora else copy.deepcopy(parts.model)
        return DPOTrainer(**parts.common(*shaped), ref_model=reference)
