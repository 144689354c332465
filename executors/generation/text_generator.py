"""Runs one batch of prompts through transformers' `generate`, following every row: stop strings, streaming, speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from executors.base import bad_input
from executors.generation.parameters import Sampling
from executors.generation.prompts import Rendered, encoded
from executors.generation.rows import Row
from executors.generation.structured import Constraint, Grammars

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Called after every step with the rows of the batch.
Watcher = Callable[[Sequence[Row]], None]


class _Follow(StoppingCriteria):
    """Feeds the rows with each new token and tells generate which of them have ended."""

    def __init__(self, rows: Sequence[Row], constraints: Sequence[Constraint | None], watch: Watcher) -> None:
        self._rows = rows
        self._constraints = constraints
        self._watch = watch

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        for row, constraint, token in zip(self._rows, self._constraints, input_ids[:, -1].tolist(), strict=True):
            row.push(token)
            if constraint is not None and row.finish_reason is None and constraint.push(token):
                row.complete()
        self._watch(self._rows)
        ended = [row.finish_reason is not None for row in self._rows]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)


class _OccurrencePenalty(LogitsProcessor):
    """presence_penalty and frequency_penalty as OpenAI defines them, over the generated tokens alone."""

    def __init__(self, sampling: Sampling, prompt_tokens: int) -> None:
        self._sampling = sampling
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        generated = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return (
            scores
            - self._sampling.frequency_penalty * counts
            - self._sampling.presence_penalty * (counts > 0).to(scores.dtype)
        )


class _Constrain(LogitsProcessor):
    """Leaves each row the tokens that its constraint allows.

    Where other rules (min_tokens, no_repeat_ngram_size) have taken all of them, the structure counts, not those rules.
    """

    def __init__(self, rows: Sequence[Row], constraints: Sequence[Constraint | None]) -> None:
        self._rows = rows
        self._constraints = constraints

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        changed = scores.clone()
        for number, (row, constraint) in enumerate(zip(self._rows, self._constraints, strict=True)):
            if constraint is None or row.finish_reason is not None:
                continue
            allowed = constraint.allowed(scores.shape[-1]).to(scores.device)
            kept = scores[number].masked_fill(~allowed, float("-inf"))
            if not torch.isfinite(kept).any():
                kept = torch.zeros_like(kept).masked_fill(~allowed, float("-inf"))
            changed[number] = kept
        return changed  # type: ignore[return-value]


class Weights:
    """A loaded model and its tokenizer, for any number of generators.

    The sampling defaults of the checkpoint would fill what a task leaves out: they are read once, here, and taken away.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        defaults = model.generation_config
        ends = defaults.eos_token_id if defaults.eos_token_id is not None else tokenizer.eos_token_id
        self.end_tokens: tuple[int, ...] = (ends,) if isinstance(ends, int) else tuple(ends or ())
        model.generation_config = GenerationConfig(
            pad_token_id=tokenizer.pad_token_id, bos_token_id=defaults.bos_token_id, eos_token_id=None
        )
        config = model.config.get_text_config()
        self.grammars = Grammars(tokenizer, self.end_tokens, max(config.vocab_size, len(tokenizer)))
        self.context_tokens: int | None = getattr(config, "max_position_embeddings", None)

    def batch(self, prompts: Sequence[Rendered]) -> Any:
        """Return rendered prompts as padded tensors.

        Padded after encoding: to encode with padding changes the tokenizer, which other threads may be using.
        """
        return self.tokenizer.pad({"input_ids": encoded(prompts, self.tokenizer)}, return_tensors="pt")


class TextGenerator:
    """A loaded model that answers batches of prompts with one way of sampling. One thread at a time.

    `model` stands in for that of the weights: the same one with adapters.
    """

    def __init__(self, weights: Weights, sampling: Sampling, model: Any = None) -> None:
        self._weights = weights
        self._model = weights.model if model is None else model
        self._tokenizer = weights.tokenizer
        self._sampling = sampling
        self._end_tokens = [*(() if sampling.ignore_eos else weights.end_tokens), *sampling.stop_token_ids]
        self._context_tokens = weights.context_tokens

    @property
    def sampling(self) -> Sampling:
        """How it samples."""
        return self._sampling

    def leaves_room(self, prompt_tokens: int) -> bool:
        """Say whether a prompt leaves room for a whole answer of max_tokens. Raises BadInput for none."""
        return self._room(prompt_tokens) == self._sampling.max_tokens

    def count_tokens(self, prompts: Sequence[Rendered]) -> list[int]:
        """Return the number of tokens of each prompt; in any thread."""
        return [len(tokens) for tokens in encoded(prompts, self._tokenizer)]

    def answer(
        self, prompts: Sequence[Rendered], watch: Watcher, structures: Sequence[str | None] | None = None
    ) -> list[list[Row]]:
        """Return for each prompt its `n` finished rows. Raises ExecutorError: BadInput for too long a prompt.

        `structures` has for each prompt what its answer has to be, as in `Sampling.structured`; without it, all have
        that of the sampling.

        All rows have the room that the longest prompt leaves: `answers.batches` says which may go together.
        """
        batch = self._weights.batch(prompts).to(self._model.device)
        length = batch["input_ids"].shape[1]
        arguments = self._sampling.generate_arguments()
        arguments["max_new_tokens"] = self._room(length)
        if arguments.get("min_new_tokens"):
            arguments["min_new_tokens"] = min(arguments["min_new_tokens"], arguments["max_new_tokens"])
        if structures is None:
            structures = [self._sampling.structured] * len(prompts)
        wanted = [structure for structure in structures for _ in range(self._sampling.n)]
        constraints = [None if structure is None else self._weights.grammars.row(structure) for structure in wanted]
        # A structure that is whole goes on with nothing but an end token, also where `ignore_eos` is set.
        rows = [
            Row(
                self._sampling,
                self._decode,
                frozenset(self._end_tokens if constraint is None else (*self._end_tokens, *self._weights.end_tokens)),
            )
            for constraint in constraints
        ]
        processors = LogitsProcessorList()
        if self._sampling.presence_penalty or self._sampling.frequency_penalty:
            processors.append(_OccurrencePenalty(self._sampling, length))
        if any(constraint is not None for constraint in constraints):
            processors.append(_Constrain(rows, constraints))
        with torch.inference_mode():
            self._model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                eos_token_id=self._end_tokens or None,
                stopping_criteria=StoppingCriteriaList([_Follow(rows, constraints, watch)]),
                logits_processor=processors,
                **arguments,
            )
        for row in rows:
            row.close()
        watch(rows)
        return [rows[start : start + self._sampling.n] for start in range(0, len(rows), self._sampling.n)]

    def _room(self, prompt_tokens: int) -> int:
        if self._context_tokens is None:
            return self._sampling.max_tokens
        room = self._context_tokens - prompt_tokens
        if room < 1:
            raise bad_input(
                f"a prompt has {prompt_tokens} tokens, but the model takes {self._context_tokens} with the answer; "
                "shorten it"
            )
        return min(self._sampling.max_tokens, room)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens,
                skip_special_tokens=self._sampling.skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )
