"""The task types `sft` and `lora_sft`: supervised fine-tuning with TRL, of all weights or of a LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from executors.base import bad_input
from executors.data.columns import training_rows, with_text_column
from executors.training.run import Parts, Rows, Training
from gpuflow.importing import loading
from gpuflow.protocol import Request

if TYPE_CHECKING:
    from executors.training.lengths import Fit, Tell


class SupervisedTuning(Training):
    """Trains on texts, chats, or prompts with completions."""

    task_types: ClassVar[tuple[str, ...]] = ("sft", "lora_sft")
    continues_adapters: ClassVar[bool] = True
    predicts_tokens: ClassVar[bool] = True
    # Ten times what all weights take (TRL's 2e-5), as an adapter needs: Schulman et al., LoRA Without Regret, 2025.
    lora_defaults: ClassVar[Mapping[str, Any]] = {"learning_rate": 2e-4}

    def roles(self, rows: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> Rows:
        """Return rows with {messages}, {prompt, completion} or {text}."""
        return training_rows(rows, data)

    def named_columns(self, request: Request, rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], list[str]]:
        """Return the section `data`; `training.dataset_text_field` is another way to write `data.column`."""
        data, warnings = super().named_columns(request, rows)
        field = (request.spec.get("training") or {}).get("dataset_text_field")
        if field in (None, "text"):  # TRL's own, which scripts name also for rows of other forms
            return data, warnings
        data, unused = with_text_column(rows, data, field)
        return data, [*warnings, unused] if unused else warnings

    def extra_arguments(self, request: Request) -> dict[str, Any]:
        """Return the name of the texts: rows have the role `text`, whatever their column was called."""
        return {"dataset_text_field": "text"}

    def check_rows(self, request: Request, rows: Rows) -> None:
        """Refuse a loss on a part of the rows that these rows do not have."""
        training: Mapping[str, Any] = request.spec.get("training") or {}
        if not rows:
            return
        if training.get("completion_only_loss") and "prompt" not in rows[0]:
            raise bad_input(
                f"training.completion_only_loss needs prompt and completion, and the rows have {', '.join(rows[0])}; "
                "leave it out (for messages: assistant_only_loss)"
            )
        if training.get("assistant_only_loss") and "text" in rows[0]:
            raise bad_input(
                "training.assistant_only_loss needs messages, or prompt and completion, and the rows have text; "
                "leave it out"
            )

    def check_tokenizer(self, request: Request, rows: Rows, tokenizer: Any, name: str) -> None:
        """Refuse `assistant_only_loss` where nothing says which tokens are an answer's."""
        if not (request.spec.get("training") or {}).get("assistant_only_loss"):
            return
        separator = (request.spec.get("data") or {}).get("separator")
        if not tokenizer.chat_template or (separator is not None and rows and "prompt" in rows[0]):
            raise bad_input(
                f"training.assistant_only_loss needs chats: a model with a chat template ({name} has "
                f"{'one' if tokenizer.chat_template else 'none'}) and no data.separator; leave it out"
            )
        from trl.chat_template_utils import get_training_chat_template, has_generation_markers

        if has_generation_markers(tokenizer.chat_template):
            return
        try:
            get_training_chat_template(tokenizer)
        except ValueError as error:
            raise bad_input(
                f"training.assistant_only_loss: the chat template of {name} does not mark what the assistant says "
                "({% generation %}), and TRL knows no marked form of it; leave it out, give rows of prompt and "
                "completion, or take a model whose template marks it"
            ) from error

    def fit(self, rows: Rows, tokenizer: Any, arguments: Any, *, separator: str | None, tell: Tell) -> Fit:
        """Return how rows fit into `training.max_length`."""
        from executors.training.lengths import supervised
        from executors.training.shaping import shape

        shaped = shape(rows, chat=bool(tokenizer.chat_template), separator=separator)
        return supervised(shaped, tokenizer, arguments, tell)

    def config(self) -> type[Any]:
        """Return TRL's SFTConfig."""
        with loading():
            from trl import SFTConfig

        return SFTConfig

    def trainer(self, parts: Parts) -> Any:
        """Return TRL's SFTTrainer."""
        with loading():
            from trl import SFTTrainer

        from executors.training.shaping import shape

        shaped = [
            shape(rows, chat=parts.has_template, separator=parts.separator)
            for rows in (parts.job.train_rows, parts.job.eval_rows)
        ]
        return SFTTrainer(**parts.common(*shaped))
