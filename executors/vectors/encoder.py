"""Vectors of texts with a transformers model: batches of tokens, pooled as the model says. One thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from executors.vectors.pooling import Mode, Pooling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Cutting changes a tokenizer as long as it lasts, so one thread at a time.
_TOKENIZING: Final = threading.Lock()


class Encoder:
    """A loaded model; its tokenizer pads on the right."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pooling: Pooling) -> None:
        self._model = model.eval()
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.max_tokens: int | None = min(filter(None, (pooling.max_tokens, _positions(model))), default=None)

    def embed(self, tokens: Sequence[Sequence[int]], model: Any = None) -> Any:
        """Return an array of float32, a row for each list of tokens; `model` stands in for the loaded one."""
        batch = self.tokenizer.pad({"input_ids": [list(one) for one in tokens]}, return_tensors="pt")
        batch = batch.to(self._model.device)
        mask = batch["attention_mask"]
        with torch.inference_mode():
            states = (model or self._model)(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
            return pooled(states, mask, self.pooling.mode).float().cpu().numpy()


def _positions(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model has positions for. Models such as RoBERTa count them from behind the padding's."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "position_embeddings"]
    paddings = [table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None]
    return positions - max(paddings) - 1 if positions and paddings else positions


def pooled(states: torch.Tensor, mask: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return one vector a row of `states` (batch, tokens, size); `mask` is 1 for tokens, 0 for padding on the right."""
    if mode == "cls":
        return states[:, 0]
    if mode == "last":
        return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
    kept = mask.unsqueeze(-1).to(states.dtype)
    if mode == "max":
        return states.masked_fill(kept == 0, float("-inf")).max(1).values
    return (states * kept).sum(1) / kept.sum(1).clamp(min=1)


def tokenized(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> tuple[list[list[int]], list[bool]]:
    """Return the tokens of texts, cut to `max_tokens`, and whether each was cut. In any thread."""
    with _TOKENIZING:
        whole: Mapping[str, Any] = tokenizer(list(texts))
        if max_tokens is None:
            return list(whole["input_ids"]), [False] * len(texts)
        short: Mapping[str, Any] = tokenizer(list(texts), truncation=True, max_length=max_tokens)
    cut = [len(one) < len(other) for one, other in zip(short["input_ids"], whole["input_ids"], strict=True)]
    return list(short["input_ids"]), cut
