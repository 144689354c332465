"""The text of one answer as its tokens arrive: decoding, stop strings, and what may be streamed already. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from executors.generation.parameters import Sampling

FinishReason = Literal["stop", "length", "abort"]
Decode = Callable[[Sequence[int]], str]


class Row:
    """One answer. `push` takes tokens one by one; `close` ends it.

    The end token, also one of `stop_token_ids`, is no part of the text unless `include_stop_str_in_output` says so. A
    stop string counts where it is complete after `min_tokens` alone. Both as in vLLM.

    Decoding looks at a short window, as the spaces of a token depend on the one before, so a long answer costs no more
    a token than a short one.
    """

    def __init__(self, sampling: Sampling, decode: Decode, end_tokens: Collection[int]) -> None:
        self._sampling = sampling
        self._decode = decode
        self._end_tokens = end_tokens
        self._tokens: list[int] = []
        self._count = 0
        self._window = 0
        self._read = 0
        self._told = 0
        self._searched = 0
        self.text = ""
        self.finish_reason: FinishReason | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens generated, the end token included."""
        return self._count

    def push(self, token: int) -> None:
        """Take the next token, unless the answer has ended."""
        if self.finish_reason is not None:
            return
        self._count += 1
        ended = token in self._end_tokens
        if not ended or self._sampling.include_stop_str_in_output:
            self._tokens.append(token)
        self._extend(final=ended)
        self._cut_at_stop()
        if ended:
            self.finish_reason = "stop"

    def close(self) -> None:
        """End the answer: what is left of an incomplete character is decoded as it is."""
        if self.finish_reason is None:
            self._extend(final=True)
            self.finish_reason = "length"
            self._cut_at_stop()

    def complete(self) -> None:
        """End the answer: its structure is whole, and nothing may follow."""
        if self.finish_reason is None:
            self._extend(final=True)
            self._cut_at_stop()
            self.finish_reason = "stop"

    def abort(self) -> None:
        """End the answer where it is: nobody waits for it any more."""
        if self.finish_reason is None:
            self.finish_reason = "abort"

    def _extend(self, *, final: bool) -> None:
        before = self._decode(self._tokens[self._window : self._read])
        now = self._decode(self._tokens[self._window :])
        if len(now) > len(before) and (final or not now.endswith("\ufffd")):
            self.text += now[len(before) :]
            self._window, self._read = self._read, len(self._tokens)

    def _cut_at_stop(self) -> None:
        """End the text at a stop string that is complete in what is new of it."""
        begins, self._searched = self._searched, len(self.text)
        if self._count <= self._sampling.min_tokens:
            return
        hits = [(self.text.find(stop, max(0, begins - len(stop) + 1)), stop) for stop in self._sampling.stop]
        found = min(((at, stop) for at, stop in hits if at >= 0), default=None)
        if found is not None:
            at, stop = found
            self.text = self.text[: at + (len(stop) if self._sampling.include_stop_str_in_output else 0)]
            self.finish_reason = "stop"

    def take_delta(self) -> str:
        """Return the text that is new since the last call and certain to stay."""
        end = len(self.text)
        if self.finish_reason is None:
            end -= self._held_back()
        delta = self.text[self._told : end]
        self._told = max(self._told, end)
        return delta

    def _held_back(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(
            (
                size
                for stop in self._sampling.stop
                for size in range(1, min(len(stop), len(self.text) + 1))
                if self.text.endswith(stop[:size])
            ),
            default=0,
        )
