"""The task type `reward`: a model that scores answers, trained with TRL on pairs of which one is preferred."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from executors.data.columns import preference_rows
from executors.training.run import Parts, Rows, Training
from gpuflow.importing import loading

if TYPE_CHECKING:
    from executors.modeling.location import Location
    from executors.training.lengths import Fit, Tell


class RewardTuning(Training):
    """Trains a classifier with one output, the score, for grpo and ppo (`reward_model`, type model)."""

    task_types: ClassVar[tuple[str, ...]] = ("reward",)
    bare: ClassVar[str] = "chosen"
    lora_kind: ClassVar[Literal["CAUSAL_LM", "SEQ_CLS"]] = "SEQ_CLS"

    def roles(self, rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> Rows:
        """Return rows with {prompt, chosen, rejected} or {chosen, rejected}."""
        return preference_rows(rows, data)

    def fit(self, rows: Rows, tokenizer: Any, arguments: Any, *, separator: str | None, tell: Tell) -> Fit:
        """Return how rows fit into `training.max_length`."""
        from executors.training.lengths import scored
        from executors.training.shaping import shape_preferences

        shaped = shape_preferences(rows, chat=bool(tokenizer.chat_template), separator=separator)
        return scored(shaped, tokenizer, arguments, tell)

    def config(self) -> type[Any]:
        """Return TRL's RewardConfig."""
        with loading():
            from trl import RewardConfig

        return RewardConfig

    def load_model(self, location: Location, options: Mapping[str, Any]) -> Any:
        """Load the model with a new head of one output in place of its own, unless it has such a head."""
        from transformers import AutoModelForSequenceClassification

        from executors.modeling.loading import load_model

        return load_model(location, {**options, "num_labels": 1}, AutoModelForSequenceClassification)

    def trainer(self, parts: Parts) -> Any:
        """Return TRL's RewardTrainer."""
        with loading():
            from trl import RewardTrainer

        from executors.training.shaping import shape_preferences

        shaped = [
            shape_preferences(rows, chat=parts.has_template, separator=parts.separator)
            for rows in (parts.job.train_rows, parts.job.eval_rows)
        ]
        return RewardTrainer(**parts.common(*shaped))
