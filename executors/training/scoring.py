"""A reward as TRL's PPO takes it: a model that gives each token a score, made of whatever scores texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from executors.training.rewards import load_reward
from gpuflow.protocol import Emitter, Request

#: Prompts and answers -> a score for each.
Scorer = Callable[[list[str], list[str]], list[float]]


def text_scorer(request: Request, emitter: Emitter) -> Scorer:
    """Return what scores the answers of a task. Raises ExecutorError: BadInput."""
    reward, tokenizer = load_reward(request, emitter)
    weight = float((request.spec.get("reward_model") or {}).get("weight") or 1.0)
    score = reward if tokenizer is None else _by_model(reward, tokenizer)

    def weighted(prompts: list[str], completions: list[str]) -> list[float]:
        return [weight * one for one in score(prompts=prompts, completions=completions)]

    return weighted


def _by_model(model: Any, tokenizer: Any) -> Callable[..., list[float]]:
    def score(prompts: list[str], completions: list[str]) -> list[float]:
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        batch.pop("token_type_ids", None)
        with torch.inference_mode():
            scores: list[float] = model(**batch.to(model.device)).logits[:, 0].float().tolist()
        return scores

    return score


def padded_prompts(
    prompts: Sequence[Any], tokenizer: Any, *, longest: int | None = None
) -> tuple[list[dict[str, list[int]]], int]:
    """Return rows of token ids, all filled up on the left to the longest prompt, and that number of tokens.

    Of a prompt with more than `longest` tokens the first ones are kept.
    """
    texts = [
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    encoded = tokenizer(
        texts,
        padding=True,
        add_special_tokens=not tokenizer.chat_template,
        truncation=longest is not None,
        max_length=longest,
    )
    rows = [
        {"input_ids": ids, "attention_mask": mask}
        for ids, mask in zip(encoded["input_ids"], encoded["attention_mask"], strict=True)
    ]
    return rows, len(rows[0]["input_ids"])


class RewardModule(torch.nn.Module):
    """Scores token ids by their text. TRL calls the backbone, and `score` on its last hidden states.

    `width` is the number of tokens before the answer; they are the same for all rows (`padded_prompts`).
    """

    base_model_prefix = "backbone"

    def __init__(self, scorer: Scorer, tokenizer: Any, width: int) -> None:
        super().__init__()
        self._scorer, self._tokenizer, self._width = scorer, tokenizer, width
        self.score = torch.nn.Identity()

    def backbone(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Return the score of each row at each of its tokens, shape (rows, tokens, 1), as the last hidden states."""
        prompts = self._texts(input_ids[:, : self._width], attention_mask[:, : self._width])
        answers = self._texts(input_ids[:, self._width :], attention_mask[:, self._width :])
        scores = torch.tensor(self._scorer(prompts, answers), dtype=torch.float32, device=input_ids.device)
        return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])

    def _texts(self, ids: torch.Tensor, mask: torch.Tensor) -> list[str]:
        # Where a row is filled up, TRL puts the id 0 there: it is read by the mask.
        rows = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
        texts: list[str] = self._tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts
