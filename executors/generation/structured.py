"""Structured output on transformers: the tokens that a JSON schema, a regex or a choice allows next, by llguidance.

A grammar is tried in a process of its own first, with limits of time and memory: a hostile one cannot hold up a session
that answers others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from executors.base import bad_input

#: Longest time, in seconds, that a grammar may take to compile.
COMPILE_SECONDS: Final = 20
#: Memory, in MiB, that it may take for it.
_COMPILE_MIB: Final = 2048
#: Compiled grammars that are kept for one tokenizer.
_KEPT: Final = 64
_AT: Final = "inference.structured_outputs"
_TRY: Final = """
import json, resource, sys
given = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"]))
resource.setrlimit(resource.RLIMIT_AS, (given["mib"] << 20, given["mib"] << 20))
sys.path[:] = given["path"]
from llguidance import LLMatcher
print(json.dumps(LLMatcher.validate_grammar(given["grammar"])))
"""


class Grammars:
    """The compiled grammars of one tokenizer; any thread."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = list(end_tokens)
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._tokens: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def check(self, structured: str | None) -> None:
        """Compile what `Sampling.structured` asks for, if anything. Raises ExecutorError: BadInput."""
        if structured is not None:
            self._get(structured)

    def row(self, structured: str) -> Constraint:
        """Return the constraint of one answer. Raises ExecutorError: BadInput for a grammar that cannot be kept to."""
        return Constraint(self._get(structured).deep_copy())

    def _get(self, structured: str) -> Any:
        with self._lock:
            if structured in self._compiled:
                self._compiled.move_to_end(structured)
                return self._compiled[structured]
        made = self._compile(structured)  # without the lock: it may take long, and others answer meanwhile
        with self._lock:
            self._compiled[structured] = made
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return made

    def _compile(self, structured: str) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise bad_input(
                f"{_AT} needs llguidance, which this worker lacks; run `pip install 'gpuflow[inference]'` there, or "
                "set engine: vllm"
            ) from error
        grammar = _grammar(json.loads(structured))
        _try(grammar)
        with self._reading:
            if self._tokens is None:
                self._tokens = self._read_tokenizer()
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return matcher

    def _read_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        if not self._end_tokens:
            raise bad_input(f"{_AT} needs a tokenizer with an end token, and this one has none; use another model")
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._end_tokens)
        except ValueError as error:
            raise bad_input(f"{_AT} needs a fast tokenizer: {error}; use another model, or engine: vllm") from error


class Constraint:
    """What one answer may go on with."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, width: int) -> torch.Tensor:
        """Return a mask of `width` tokens: those that may come next."""
        import numpy as np

        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")[:width]
        self._raise_if_wrong()
        mask = torch.zeros(width, dtype=torch.bool)
        mask[: len(bits)] = torch.from_numpy(bits.astype(bool))
        return mask

    def push(self, token: int) -> bool:
        """Take the token that was chosen, and return whether the answer is whole and cannot go on."""
        self._matcher.consume_token(token)
        self._raise_if_wrong()
        return bool(self._matcher.is_stopped())

    def _raise_if_wrong(self) -> None:
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())


def _grammar(given: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of what `inference.structured_outputs` asks for."""
    from llguidance import LLMatcher

    if given.get("regex") is not None:
        return str(LLMatcher.grammar_from_regex(given["regex"]))
    if given.get("choice") is not None:
        words = " | ".join(json.dumps(word) for word in given["choice"])
        return str(LLMatcher.grammar_from_lark(f"start: {words}"))
    schema = {"type": "object"} if given.get("json_object") else given["json"]
    if isinstance(schema, str):
        schema = json.loads(schema)
    if given.get("disable_additional_properties"):
        schema = _closed(schema)
    options: dict[str, Any] = {"whitespace_flexible": not given.get("disable_any_whitespace"), "lenient": False}
    if given.get("whitespace_pattern"):
        options["whitespace_pattern"] = given["whitespace_pattern"]
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than those it names."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _try(grammar: str) -> None:
    """Compile a grammar where it can do no harm. Raises ExecutorError: BadInput for one that is wrong or too large."""
    given = {"grammar": grammar, "path": sys.path, "seconds": COMPILE_SECONDS, "mib": _COMPILE_MIB}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _TRY],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _refused(f"compiling it took more than {COMPILE_SECONDS} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise _refused(f"it could not be compiled within {COMPILE_SECONDS} s and {_COMPILE_MIB} MiB ({last[:200]})")
    message = json.loads(done.stdout)
    if message and not message.startswith("WARNING"):
        raise _refused(message)


def _refused(message: str) -> Exception:
    cause = " ".join(message.split())[:300]
    return bad_input(f"{_AT} cannot be kept to: {cause}; make it simpler, or take that part out")
